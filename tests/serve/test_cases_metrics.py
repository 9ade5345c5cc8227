"""Metrics that outsiders cannot grow: names, keys, paths and ids that clients make up are no labels."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.case_platform import CasePlatform, chat_body, together

pytestmark = pytest.mark.serve

EACH = 60
GROWTH_MAX = 50
RSS_KB_GROWTH_MAX = 20_000


def series(cases: CasePlatform) -> dict[tuple[str, str], float]:
    """Every sample of /metrics by name and labels, read by a standard parser."""
    text = httpx.get(f"{cases.process.url}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, str(sorted(sample.labels.items()))): sample.value for sample in samples}


def rss_kb(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def junk(cases: CasePlatform) -> list[Callable[[], httpx.Response]]:
    url = cases.process.url
    client = httpx.Client(base_url=url, timeout=60.0)
    odd = ['no"quote', "new\nline", "back\\slash", "x" * 10_000]

    def model(name: str) -> Callable[[], httpx.Response]:
        return lambda: cases.chat("plain", model=name)

    def key() -> httpx.Response:
        headers = {"Authorization": f"Bearer rw_plain_{uuid.uuid4().hex}"}
        return client.post("/v1/chat/completions", json=chat_body("hi"), headers=headers)

    def path() -> httpx.Response:
        return client.get(f"/x/{uuid.uuid4().hex}.php")

    def ids() -> httpx.Response:
        names = ("x-rungway-session", "idempotency-key", "x-request-id", "x-tenant-id")
        return cases.chat(
            "junk", headers={name: uuid.uuid4().hex for name in names}, user=uuid.uuid4().hex, max_tokens=1
        )

    models = [model(name) for name in [*odd, *(uuid.uuid4().hex for _ in range(EACH))]]
    return [*models, *[key] * EACH, *[path] * EACH, *[ids] * EACH]


def test_what_clients_make_up_does_not_grow_the_metrics(cases: CasePlatform) -> None:
    cases.chat("junk", max_tokens=1)
    processes = [pid for role in ("Gateway", "Controller") for pid in cases.process.members(f"rungway:{role}")]
    assert len(processes) == 2
    calls = junk(cases)
    together(calls[:8])
    before, memory = series(cases), {pid: rss_kb(pid) for pid in processes}
    for start in range(0, len(calls), 16):
        together(calls[start : start + 16])
    after = series(cases)
    assert len(after) - len(before) <= GROWTH_MAX
    new = " ".join(labels for name, labels in after if (name, labels) not in before)
    assert not [value for value in (cases.keys["plain"], ".php", "x" * 20) if value in new]
    assert {pid: max(0, rss_kb(pid) - memory[pid]) < RSS_KB_GROWTH_MAX for pid in processes} == dict.fromkeys(
        processes, True
    )
