"""The exact cache's bounds, and its key."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rungway.cache.exact import ExactCache
from rungway.cache.key import cache_key, canonical
from rungway.clock import NS_PER_S


def test_entries_live_for_their_time_and_no_longer() -> None:
    cache: ExactCache[str] = ExactCache()
    cache.configure({"acme": (10, 2.0)})
    cache.put("acme", "k", "v", 0)
    assert cache.get("acme", "k", 2 * NS_PER_S - 1) == "v"
    assert cache.get("acme", "k", 2 * NS_PER_S) is None
    assert cache.size("acme") == 0


def test_the_least_recently_used_goes_first() -> None:
    cache: ExactCache[int] = ExactCache()
    cache.configure({"acme": (2, 60.0)})
    cache.put("acme", "a", 1, 0)
    cache.put("acme", "b", 2, 0)
    assert cache.get("acme", "a", 1) == 1
    cache.put("acme", "c", 3, 1)
    assert [cache.get("acme", key, 2) for key in "abc"] == [1, None, 3]


def test_tenants_do_not_share_and_unknown_ones_have_nothing() -> None:
    cache: ExactCache[int] = ExactCache()
    cache.configure({"acme": (2, 60.0), "beta": (0, 60.0)})
    cache.put("acme", "k", 1, 0)
    cache.put("beta", "k", 2, 0)
    cache.put("gone", "k", 3, 0)
    assert [cache.get(name, "k", 0) for name in ("acme", "beta", "gone")] == [1, None, None]


def test_a_reload_keeps_what_still_fits() -> None:
    cache: ExactCache[int] = ExactCache()
    cache.configure({"acme": (3, 60.0), "beta": (3, 60.0)})
    for name in ("acme", "beta"):
        for key in "abc":
            cache.put(name, key, 1, 0)
    cache.configure({"acme": (2, 60.0)})
    assert [cache.size(name) for name in ("acme", "beta")] == [2, 0]
    assert cache.get("acme", "a", 0) is None


class Body(msgspec.Struct, kw_only=True):
    model: str
    bias: dict[str, float] | None = None
    later: int = 0
    user: str | None = None


def test_a_field_is_in_the_key_unless_it_is_named_harmless() -> None:
    base = canonical(Body(model="m"), ["user"])
    assert canonical(Body(model="m", user="u"), ["user"]) == base
    assert canonical(Body(model="m", later=1), ["user"]) != base
    one, two = {"1": 1.0, "2": 2.0}, {"2": 2.0, "1": 1.0}
    assert canonical(Body(model="m", bias=one), []) == canonical(Body(model="m", bias=two), [])


@given(st.lists(st.text(max_size=4), min_size=8, max_size=8))
def test_different_parts_never_run_into_the_same_key(parts: list[str]) -> None:
    def key(tenant: str, epoch: str, endpoint: str, body: str) -> str:
        return cache_key(tenant=tenant, epoch=epoch, endpoint=endpoint, body=body.encode())

    assert (key(*parts[:4]) == key(*parts[4:])) == (parts[:4] == parts[4:])
