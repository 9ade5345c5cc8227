"""One really running platform with fake engines for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rungway.serve import processes
from support.platform_process import PlatformProcess, running_platform


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    """`url` and `keys` of a platform on a free port. At the end nothing that it started may be left."""
    with running_platform(tmp_path_factory.mktemp("platform") / "state") as running:
        yield running
        assert running.running(), f"the platform ended during the tests:\n{running.text()}"
        assert running.stop() == 0
        assert processes.find(running.mark) == []
