"""How far an answer has come, over all its sequences and tries: tokens, ends, usage, and the times that a Finish tells."""

from __future__ import annotations

import msgspec

from rungway.clock import NS_PER_MS
from rungway.engine.protocol import Delta, EngineUsage
from rungway.gateway.faults import ERRORS, Broken
from rungway.outcomes import Code, Outcome
from rungway.types import Finish


class Progress:
    """`emitted[k]` = token ids of sequence k that the client has or gets. `received_ns` is monotonic, as all times."""

    def __init__(self, received_ns: int) -> None:
        self.emitted: list[list[int]] = []
        self.usage = EngineUsage(0, 0, 0)
        self.attempts = 0
        self.scored = False  # the client has or gets the prompt's log-probabilities
        self.first_ns = self.last_ns = 0
        self._received_ns = received_ns
        self._attempt = 0
        self._indices: list[int] = []
        self._finished: set[int] = set()
        self._delivered: dict[int, int] = {}
        self._carried = 0

    @property
    def whole(self) -> bool:
        return len(self._finished) == len(self.emitted)

    @property
    def tokens(self) -> int:
        """Tokens that the client has or gets."""
        return sum(len(ids) for ids in self.emitted)

    @property
    def output_tokens(self) -> int:
        """Output tokens of a whole answer: what earlier tries left plus what the last one's engine counted."""
        return self._carried + self.usage.output_tokens

    def open(self, attempt: int, sequences: int, *, anew: bool = False) -> list[list[int]]:
        """A try begins, with the sequences that have not ended yet, or `anew`, with all. Returns what each of them has
        emitted so far."""
        if anew:
            self.emitted = []
            self._finished.clear()
        if not self.emitted:
            self.emitted = [[] for _ in range(sequences)]
        self._attempt = attempt
        self._indices = [i for i in range(len(self.emitted)) if i not in self._finished]
        self._carried = self.tokens
        self._delivered[attempt] = 0
        self.attempts += 1
        return [self.emitted[i] for i in self._indices]

    def at(self, now_ns: int) -> None:
        """A delta came in."""
        self.last_ns = now_ns
        if not self.first_ns:
            self.first_ns = now_ns

    def drop(self, delta: Delta) -> None:
        """A delta of a try that is given up already: counted, but its tokens will be made anew."""
        self._delivered[self._attempt] += len(delta.token_ids)

    def take(self, delta: Delta) -> tuple[Delta | None, Broken | None]:
        """Book a delta. Returns what the client gets of it, under the number of its sequence, and whether it broke the
        try."""
        self._delivered[self._attempt] += len(delta.token_ids)
        broken: Broken | None = None
        if delta.finish == "cancelled":
            return None, Broken.REPLICA_LOST  # nobody here asked for it: the replica is shutting down
        if delta.finish == "error":
            broken = ERRORS.get((delta.error or "").partition(":")[0], Broken.ERROR)
            if not delta.token_ids:
                return None, broken
            delta = msgspec.structs.replace(delta, finish=None)  # its tokens are good, only its end is not
        self.scored = self.scored or delta.prompt_logprobs is not None
        index = self._indices[delta.index]
        self.emitted[index] += delta.token_ids
        if delta.finish is not None:
            self._finished.add(index)
        if delta.usage is not None:
            self.usage = delta.usage
            if broken is None:
                self._delivered[self._attempt] = delta.usage.output_tokens
        return delta if delta.index == index else msgspec.structs.replace(delta, index=index), broken

    def finish(self, request_id: str, outcome: Outcome, code: Code | None, now_ns: int, cache: str) -> Finish:
        gaps = max(1, self.tokens // max(1, len(self.emitted)) - 1)
        span_ns = self.last_ns - self.first_ns
        return Finish(
            request_id=request_id,
            outcome=outcome,
            code=code,
            attempts=self.attempts,
            delivered=self._delivered,
            ttft_ms=(self.first_ns - self._received_ns) / NS_PER_MS if self.first_ns else None,
            tpot_ms=span_ns / gaps / NS_PER_MS if span_ns and self.tokens else None,
            e2e_ms=(now_ns - self._received_ns) / NS_PER_MS,
            cache=cache,
        )
