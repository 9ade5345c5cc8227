"""Drill `controller-loss`: kill -9 of the controller under a steady load, streams in mid-answer, and for DARK_S of each that
comes in its place.

    leased     the gateway admits from its lease until the controller is back
    control    a second platform, the same with leases off: every new request waits for the controller

`steady` stays far inside its quota. Three others have a small one, of requests (`tight`), of tokens (`narrow`) and of money
(`poor`), and ask for more than a lease holds: what it admits of each is bounded by its part of that quota. Readers of long streams
are in mid-answer when the controller dies; each compares its text with one that was read before.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from rungway.chaos import faults, invariants
from rungway.chaos.course import Course, Report, Say, of
from rungway.chaos.faults import Role
from rungway.chaos.invariants import Verdict
from rungway.chaos.load import Phase, Sample, Stream, percentile
from rungway.chaos.outage import Outage, long_text
from rungway.chaos.stage import Stage, StageError, own

MODEL, ANSWER_TOKENS = "large", 12
STEADY_PER_S, LIMITED_PER_S = 4.0, 2.0
LOAD_S, KILL_AFTER_S = 40.0, 6.0
DARK_S = 8.0  # so that the limited tenants ask for more than a lease holds, however fast a controller comes back
LONG_STREAMS, LONG_TOKENS = 4, 300
LEASE_SHARE = 0.5  # config/drill-lease: a lease is half of what is left
NO_LEASE = Path("config/drill-no-lease.yaml")
ANSWERED_MIN, CONTROL_ANSWERED_MAX = 0.99, 0.1
TTFT_MS_MAX = 2000.0
BACK_WITHIN_S = 60.0


class Limit(NamedTuple):
    """A tenant of config/drill-lease with a small quota of one kind."""

    tenant: str
    unit: str
    quota: int


class Used(NamedTuple):
    requests: int
    tokens: int
    nusd: int


LIMITS = (Limit("tight", "requests", 20), Limit("narrow", "tokens", 400), Limit("poor", "nusd", 900_000))


def controller_loss(stage: Stage, say: Say) -> Report:
    """Run it against `stage`, which serves config/drill-lease.yaml and must be our own: it is hit by process id. The
    control arm starts a platform of its own."""
    if stage.state_dir is None:
        raise StageError("controller-loss kills a process: it needs a platform of its own")
    mark = faults.mark_of(stage.state_dir)
    with Course(stage, say) as course:
        say("one long answer, to compare with")
        expected = _readers(stage, 1)[0]
        course.samples.append(expected.sample)
        streams: list[_Reader] = []
        samples, outage = _arm(course, mark, "leases", streams)
        course.samples += [reader.sample for reader in streams]
        leased = _leased(course, samples)
        verdicts = [
            _streams(streams, expected.text),
            *_steady(outage.during(of(samples, "steady", "load"))),
            *_bounded(
                leased, {limit.tenant: len(outage.during(of(samples, limit.tenant, "load"))) for limit in LIMITS}
            ),
            _undegraded(samples),
            _refused(of(samples, "steady", "load")),
            _gauge(outage),
        ]
        course.at_rest()
        return course.report("controller-loss", verdicts, _without_leases(say))


def _without_leases(say: Say) -> list[Verdict]:
    """The control arm."""
    with own(NO_LEASE, None, say) as stage:
        assert stage.state_dir is not None
        with Course(stage, say) as course:
            samples, dark = _arm(course, faults.mark_of(stage.state_dir), "no leases", [])
            steady = of(samples, "steady", "load")
            return _control(dark.during(steady), dark.back_ns)


def _arm(course: Course, mark: str, what: str, streams: list[_Reader]) -> tuple[list[Sample], Outage]:
    """Load for LOAD_S; the controller dies a little after it has begun, and its successors before they serve."""
    outage = Outage(course.stage.url)
    with_streams = what == "leases"

    def hit() -> None:
        invariants.wait_until(lambda: bool(course.admin.live()["flights"]), 60.0)
        if with_streams:
            streams.extend(_start(course.stage, LONG_STREAMS))
        time.sleep(KILL_AFTER_S)
        killed = faults.kill(mark, Role.CONTROLLER)
        outage.begin()
        until = time.monotonic() + DARK_S
        faults.await_successor(mark, Role.CONTROLLER, killed, limit_s=BACK_WITHIN_S)
        while time.monotonic() < until:
            killed = faults.kill(mark, Role.CONTROLLER)
            faults.await_successor(mark, Role.CONTROLLER, killed, limit_s=BACK_WITHIN_S)

    hitter = threading.Thread(target=hit)
    with outage:
        hitter.start()
        samples = course.send(f"{what}: load for {LOAD_S:.0f} s, the controller is killed", _loads(course.stage))
        hitter.join(BACK_WITHIN_S + KILL_AFTER_S)
        outage.await_end(BACK_WITHIN_S)
    for reader in streams:
        reader.thread.join(60.0)
    return samples, outage


def _loads(stage: Stage) -> list[Stream]:
    def load(name: str, rate: float) -> Stream:
        phases = (Phase("load", 0.0, LOAD_S, rate),)
        return Stream(
            name=name, key=stage.key(name), model=MODEL, max_tokens=ANSWER_TOKENS, phases=phases, timeout_s=110.0
        )

    return [load("steady", STEADY_PER_S), *(load(limit.tenant, LIMITED_PER_S) for limit in LIMITS)]


class _Reader:
    """One client that reads a long stream to its end. `sample`: what the books have to know of it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.text = ""
        self.sample = Sample(stream="long", phase="load", planned_wall_ns=time.time_ns(), lag_ms=0.0, status=0)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        started = time.monotonic()
        body = {
            "model": MODEL,
            "max_tokens": 2 * LONG_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": long_text(LONG_TOKENS)}],
        }
        headers = {"Authorization": f"Bearer {self._stage.key('steady')}"}
        address = f"{self._stage.url}/v1/chat/completions"
        try:
            with httpx.stream("POST", address, json=body, headers=headers, timeout=110.0) as answer:
                tokens, done = 0, False
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        frame = json.loads(line[6:])
                        self.text += "".join(one["delta"].get("content") or "" for one in frame["choices"])
                        tokens = frame["usage"]["completion_tokens"] if frame.get("usage") else tokens
                    done = done or line == "data: [DONE]"
                self.sample = msgspec.structs.replace(
                    self.sample,
                    status=answer.status_code,
                    request_id=answer.headers.get("x-request-id", ""),
                    ttft_ms=0.0,
                    e2e_ms=(time.monotonic() - started) * 1000.0,
                    tokens=tokens,
                    done=done,
                )
        except httpx.HTTPError:
            pass


def _start(stage: Stage, count: int) -> list[_Reader]:
    return [_Reader(stage) for _ in range(count)]


def _readers(stage: Stage, count: int) -> list[_Reader]:
    found = _start(stage, count)
    for reader in found:
        reader.thread.join(110.0)
    return found


def _leased(course: Course, samples: Sequence[Sample]) -> dict[str, Used]:
    """What the lease admitted, by stream, from the ledger."""
    found: dict[str, Used] = {}
    for sample in samples:
        if sample.status == 200:
            row = course.admin.get(f"/v1/decisions/{sample.request_id}")["request"]
            if row["reason"] == "lease":
                used = found.get(sample.stream, Used(0, 0, 0))
                tokens = row["prompt_tokens"] + row["output_tokens"]
                found[sample.stream] = Used(used.requests + 1, used.tokens + tokens, used.nusd + row["cost_nusd"])
    return found


def _streams(readers: Sequence[_Reader], expected: str) -> Verdict:
    same = sum(reader.text == expected and bool(expected) for reader in readers)
    text = f"{same} of {len(readers)} to their end, the same text"
    return Verdict("streams in mid-answer at the kill", text, "all", same == len(readers) == LONG_STREAMS)


def _steady(samples: Sequence[Sample]) -> list[Verdict]:
    at_once = [s for s in samples if s.done and s.ttft_ms is not None and s.ttft_ms <= TTFT_MS_MAX]
    share = len(at_once) / len(samples) if samples else 0.0
    p99_ms = percentile([s.ttft_ms for s in samples if s.ttft_ms is not None], 99)
    return [
        Verdict(
            "new requests inside the lease, answered during the outage",
            f"{share:.1%} of {len(samples)}",
            f">= {ANSWERED_MIN:.0%} of some",
            share >= ANSWERED_MIN,
        ),
        Verdict("their TTFT p99", f"{p99_ms:.0f} ms", f"<= {TTFT_MS_MAX:.0f} ms", p99_ms <= TTFT_MS_MAX),
    ]


def _bounded(leased: dict[str, Used], asked: dict[str, int]) -> list[Verdict]:
    """Overspend is at most the lease, in every currency that a quota has; and each of them asked for more. `asked`: requests
    while the controller was away."""
    verdicts = []
    for limit in LIMITS:
        used = leased.get(limit.tenant, Used(0, 0, 0))
        spent, most, many = getattr(used, limit.unit), int(LEASE_SHARE * limit.quota), asked.get(limit.tenant, 0)
        text = f"{spent:,} in {used.requests} requests of {many} while it was away"
        ok = 0 < spent <= most and used.requests < many
        verdicts.append(Verdict(f"{limit.unit} of {limit.tenant} admitted from the lease", text, f"1 to {most:,}", ok))
    return verdicts


def _undegraded(samples: Sequence[Sample]) -> Verdict:
    worse = sum(sample.status == 200 and sample.degraded != "none" for sample in samples)
    return Verdict("degraded answers", str(worse), "0", not worse)


def _refused(samples: Sequence[Sample]) -> Verdict:
    """Also those that waited: the new controller may not refuse them because it does not know the replicas yet."""
    lost = [sample for sample in samples if not sample.done]
    codes = ", ".join(sorted({sample.code or "no end" for sample in lost}))
    return Verdict("steady's requests without an answer, all phases", f"{len(lost)} {codes}".strip(), "0", not lost)


def _gauge(outage: Outage) -> Verdict:
    text = f"rose after {outage.rose_s:.1f} s, controller back after {outage.back_s:.1f} s"
    ok = 0 < outage.rose_s <= outage.back_s <= BACK_WITHIN_S
    return Verdict("rungway_quota_degraded 1, then 0 again", text, f"back <= {BACK_WITHIN_S:.0f} s", ok)


def _control(samples: Sequence[Sample], back_ns: int) -> list[Verdict]:
    """Answered while there was no controller; those who waited for its return do not count."""
    answered = sum(0 < sample.first_wall_ns < back_ns for sample in samples)
    share = answered / len(samples) if samples else 1.0
    return [
        Verdict(
            "new requests answered during the outage without a lease",
            f"{share:.1%} of {len(samples)}",
            f"breaks: < {CONTROL_ANSWERED_MAX:.0%}",
            share < CONTROL_ANSWERED_MAX,
        )
    ]
