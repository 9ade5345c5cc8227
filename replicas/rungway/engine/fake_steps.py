"""The fake engine with steps that all its sequences share, as in a real one: a long prompt slows its neighbours.

A step takes the longest `tpot` of the sequences in it plus the time of the prompt tokens that it computes, at most
`step_tokens` of both kinds together. At its end every sequence past its prompt says one token. Prompts are computed in
chunks: bands in order, inside a band equal parts for each tenant (`Work.share`), inside a tenant first come first served.
"""

from __future__ import annotations

from itertools import groupby

from rungway.engine.fake_core import FakeCore
from rungway.engine.fake_stream import FakeProfile, Stream
from rungway.engine.protocol import Delta


class SharedSteps(FakeCore):
    """`FakeCore` on one clock of steps instead of a due time per sequence. `ttft_ms` passes before a prompt begins."""

    def __init__(self, profile: FakeProfile, *, max_num_seqs: int, max_context: int) -> None:
        super().__init__(profile, max_num_seqs=max_num_seqs, max_context=max_context)
        assert profile.step_tokens is not None
        self._step_tokens = profile.step_tokens
        self._left: dict[Stream, int] = {}  # prompt tokens still to compute
        self._chunks: dict[Stream, int] = {}  # of the step that runs
        self._speakers: list[Stream] = []  # of the step that runs
        self._end_ns: int | None = None

    def step(self, now_ns: int) -> list[Delta]:
        """Ends of all steps until `now_ns`, each followed by the next step."""
        out, self._out = self._out, []
        self._dirty = False
        while self._end_ns is not None and self._end_ns <= now_ns:
            end_ns = self._end_ns
            self._finish(end_ns, out)
            self._admit(end_ns)
            self._end_ns = self._begin(end_ns)
        self._admit(now_ns)
        if self._end_ns is None:
            self._end_ns = self._begin(now_ns)
        self._rate.measure(self._emitted, now_ns, busy=bool(self._running))
        return out

    def wake_ns(self) -> int | None:
        if self._dirty:
            return 0
        if self._end_ns is not None:
            return self._end_ns
        return min((stream.due_ns for stream in self._left), default=None)

    def _admitted(self, stream: Stream, now_ns: int) -> None:
        self._left[stream] = stream.context - stream.found
        stream.due_ns = now_ns + stream.start_ns

    def _schedule(self, stream: Stream, due_ns: int) -> None:
        """The common step is the only appointment."""

    def _release(self, stream: Stream) -> None:
        self._left.pop(stream, None)
        super()._release(stream)

    def _begin(self, now_ns: int) -> int | None:
        """Fill a step; when it ends, or None where there is nothing to do now."""
        self._speakers = sorted((s for s in self._running if s not in self._left and s.speaks), key=_order)
        ready = sorted((s for s in self._left if s.due_ns <= now_ns), key=_order)
        if not self._speakers and not ready:
            return None
        budget = max(1, self._step_tokens - len(self._speakers))
        self._chunks = _divide(budget, [(stream, self._left[stream]) for stream in ready])
        slowest_ns = max(stream.tpot_ns for stream in [*self._speakers, *self._chunks])
        return now_ns + slowest_ns + int(self.profile.prefill_ms_per_1k * sum(self._chunks.values()) * 1000)

    def _finish(self, end_ns: int, out: list[Delta]) -> None:
        speakers = self._speakers
        for stream, chunk in self._chunks.items():
            if stream in self._left:
                self._left[stream] -= chunk
                if self._left[stream] <= 0:
                    del self._left[stream]
                    speakers.append(stream)
        for stream in speakers:
            if stream in self._running and stream not in self._left:  # it may have ended or given way meanwhile
                stream.due_ns = end_ns
                self._advance(stream, end_ns, out)


def _order(stream: Stream) -> tuple[int, int]:
    return stream.order


def _divide(budget: int, wants: list[tuple[Stream, int]]) -> dict[Stream, int]:
    """Prompt tokens for each of `wants` (in order) out of `budget`; nobody gets 0 and is listed."""
    chunks: dict[Stream, int] = {}
    for _, band in groupby(wants, key=lambda want: want[0].order[0]):
        tenants: dict[str, list[tuple[Stream, int]]] = {}
        for stream, need in band:
            tenants.setdefault(stream.request.work.share, []).append((stream, need))
        # Who wants least goes first, so that what it leaves is divided among the others.
        lines = sorted(tenants.values(), key=lambda line: sum(need for _, need in line))
        for behind, line in enumerate(lines):
            part = -(-budget // (len(lines) - behind))
            for stream, need in line:
                taken = min(part, need)
                if taken:
                    chunks[stream] = taken
                    part, budget = part - taken, budget - taken
    return chunks
