"""Really running platforms with fake engines for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rungway.serve import processes
from support.case_platform import CasePlatform, platform_shape, running_cases
from support.case_tenants import CASES, PAIR
from support.platform_process import PlatformProcess, running_platform


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    """`url` and `keys` of a platform on a free port. At the end nothing that it started may be left."""
    with running_platform(tmp_path_factory.mktemp("platform") / "state") as running:
        yield running
        assert running.running(), f"the platform ended during the tests:\n{running.text()}"
        assert running.stop() == 0
        assert processes.find(running.mark) == []


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CasePlatform]:
    """One gateway, one replica per tier, and a tenant per black-box case. At the end every bill must be right."""
    with running_cases(tmp_path_factory.mktemp("cases"), platform_shape(), CASES) as running:
        yield running
        running.settled(30.0)
        assert running.admin("/audit/verify")["ok"]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CasePlatform]:
    """Two gateways and two small replicas, to lose one of. At the end every bill must be right."""
    shape = platform_shape(gateways=2, small=2, inter_token_timeout_s=3, retries_max=2)
    with running_cases(tmp_path_factory.mktemp("pair"), shape, PAIR) as running:
        yield running
        running.settled(60.0)
        assert running.admin("/audit/verify")["ok"]
