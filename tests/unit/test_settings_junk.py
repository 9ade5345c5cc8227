"""Whatever stands in a file, loading either works or ends in ConfigError with lines; never in another exception."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rungway.errors import ConfigError
from rungway.settings import hash_key, load_platform

PLATFORM: dict[str, Any] = {
    "cell": "c",
    "listen": {"port": 8000},
    "tenants_dir": "tenants",
    "state_dir": "state",
    "database": "sqlite",
    "gateway": {"replicas": 1},
    "controller": {"class_shares": {"batch": 0.1}},
    "tiers": {
        "small": {
            "price_usd_per_1k": {"input": 1, "cached_input": 1, "output": 1},
            "rank": 0,
            "versions": {"s": {"backend": "fake", "replicas": {"min": 1}, "fake": {"fail": None}}},
        }
    },
    "models": {"auto": {"tiers": ["small"]}, "chat": {"alias": "auto"}},
    "plans": {"gold": {"quotas": {"queue_max": 1}, "models": ["auto"], "value_usd": {"batch": 1}}},
    "ladder": "ladder.yaml",
    "demo_keys": ["acme"],
}
TENANT: dict[str, Any] = {
    "tenant": "acme",
    "plan": "gold",
    "keys": [{"id": "k", "sha256": hash_key("x"), "scopes": ["usage"], "expires": "2030-01-01"}],
    "isolation": {"reserved_share": 0.1},
    "budget": {"usd": 1, "timezone": "UTC"},
    "ladder": {"floor": "defer", "opt_out": ["template"]},
    "risk": {"high": {"tier_min": "small"}},
}
LADDER: dict[str, Any] = {"rungs": [{"name": "full"}, {"name": "template", "enter": 1}, {"name": "defer", "enter": 2}]}
FILES = {"rungway.yaml": PLATFORM, "tenants/acme.yaml": TENANT, "ladder.yaml": LADDER}
JUNK: tuple[Any, ...] = (
    None,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    10**30,
    "",
    "acme",
    True,
    [],
    [[]],
    {},
    {"x": [None]},
    [1],
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(child, (*path, key))


def with_junk(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = with_junk(copy[path[0]], path[1:], junk)
    return copy


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(yaml.safe_dump(data, sort_keys=False))
    return folder / "rungway.yaml"


def test_the_files_are_right_without_junk(tmp_path: Path) -> None:
    assert load_platform(write(tmp_path, FILES)).demo_keys == ("acme",)


@pytest.mark.parametrize("file", FILES)
def test_junk_anywhere_is_accepted_or_a_list_of_mistakes(tmp_path: Path, file: str) -> None:
    refused: list[ConfigError] = []
    tries = [(path, value) for n, path in enumerate(places(FILES[file])) for value in JUNK[n % 3 :: 3]]
    for path, value in tries:
        try:
            load_platform(write(tmp_path, FILES | {file: with_junk(FILES[file], path, value)}))
        except ConfigError as error:
            refused.append(error)
    assert len(refused) > 20
    assert all(error.mistakes for error in refused)
    assert all(mistake.line >= 1 and mistake.path for error in refused for mistake in error.mistakes)
