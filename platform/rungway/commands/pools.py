"""`rungway pools`: replicas, and how full they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rungway.commands.common import DEFAULT_CONFIG, AsJson, Config, Key, State, Url, emit_json, show, table

_POOL = ("in_flight", "slots", "saturation", "queue_depth", "kv_use", "prefill_tokens_per_s", "decode_ms_per_token")
_REPLICA = ("replica_id", "version", "state", "running", "max_num_seqs", "tokens", "kv_tokens")


def pools(
    url: Url = None, key: Key = None, config: Config = DEFAULT_CONFIG, state: State = None, as_json: AsJson = False
) -> None:
    """Pools of replicas: work in flight, queue, KV cache, speed. Needs an admin key."""
    from rungway.commands.http import fetch, need

    answer = fetch(need(url, key, config, state), "GET", "/admin/pools")
    if as_json:
        emit_json(answer)
    else:
        show(pool_table(answer), replica_table(answer))


def pool_table(pools: Mapping[str, Any]) -> Any:
    rows = [
        [name, len(pool.get("replicas") or ()), *(pool.get(field) for field in _POOL)] for name, pool in pools.items()
    ]
    columns = ["in flight", "slots", "saturation", "queued", "KV use", "prefill tok/s", "ms/token"]
    return table("Pools", ["pool", "replicas", *columns], rows)


def replica_table(pools: Mapping[str, Any]) -> Any:
    rows = [
        [name, *(replica.get(field) for field in _REPLICA)]
        for name, pool in pools.items()
        for replica in pool.get("replicas") or ()
    ]
    columns = ["replica", "version", "state", "running", "batch", "tokens", "KV tokens"]
    return table("Replicas", ["pool", *columns], rows)
