"""The embedding engine without threads: requests in, steps out. Pure Python.

A step takes inputs in the order of the fair queue (strict bands, inside a band the share that got least for its weight,
then age) until the token budget is used up, whoever sent them, and encodes them as one batch. An input is computed whole,
so one that is longer than the budget has a step for itself. Nothing is held between steps, so nothing is ever preempted:
an urgent request waits for the step that runs, at most.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count

from rungway.engine.answer import refused
from rungway.engine.embedding.encoder import Encoder, Failed, Piece
from rungway.engine.fairness import FairQueue
from rungway.engine.fake_script import input_lengths
from rungway.engine.meter import Meter
from rungway.engine.protocol import Delta, EngineStats, EngineUsage, Work
from rungway.engine.sequence import Group, Sequence, Status
from rungway.engine.step_costs import TokenCost
from rungway.engine.validate import INPUTS_MAX


class Request:
    """The open inputs of one Work, and the tokens of those that have their vector."""

    __slots__ = ("computed", "group", "open")

    def __init__(self, work: Work) -> None:
        self.group = Group(work)
        self.open: dict[Sequence, Piece] = {}
        self.computed = 0


class EmbedCore:
    """Single-threaded, except `check` and `stats`, which any thread may call."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        max_num_batched_tokens: int,
        waiting_max: int,
        clock_ns: Callable[[], int],
    ) -> None:
        """Requests beyond `waiting_max` waiting inputs are refused, except where none wait."""
        assert max_num_batched_tokens >= 1
        self._encoder = encoder
        self._budget = max_num_batched_tokens
        self._waiting_max = waiting_max
        self._queue = FairQueue()
        self._requests: dict[str, Request] = {}
        self._active: Counter[str] = Counter()
        self._arrivals = count()
        self._tokens = 0  # of all open inputs
        self._meter = Meter(clock_ns)
        self._cost = TokenCost()
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        return len(self._queue) > 0

    def add(self, work: Work) -> list[Delta]:
        """Takes a request; its end at once where it cannot run."""
        pieces = [
            Piece(given.ids, given.text, size) for given, size in zip(work.inputs, input_lengths(work), strict=True)
        ]
        why = self._refusal(work, pieces)
        if why is not None:
            return refused(work, why)
        with self._lock:
            request = self._requests[work.request_id] = Request(work)
            self._active[work.share] += 1
            self._queue.arrive(work.share)
            for index, piece in enumerate(pieces):
                seq = Sequence(request.group, index, next(self._arrivals), piece.tokens)
                seq.tokens = piece.ids or [0] * piece.tokens
                seq.context = piece.tokens
                seq.status = Status.WAITING
                request.group.members.append(seq)
                request.open[seq] = piece
                self._tokens += piece.tokens
                self._queue.push(seq)
        return []

    def cancel(self, request_id: str) -> list[Delta]:
        """Ends all open inputs of a request; nothing for an unknown one."""
        with self._lock:
            request = self._requests.get(request_id)
            return [] if request is None else [self._end(request, seq, "cancelled") for seq in list(request.open)]

    def end_all(self, error: str | None = None) -> list[Delta]:
        """Ends every request: cancelled, or with `error` where the engine itself has failed."""
        finish = "cancelled" if error is None else "error"
        with self._lock:
            return [
                self._end(request, seq, finish, error)
                for request in list(self._requests.values())
                for seq in list(request.open)
            ]

    def step(self) -> list[Delta]:
        """Encodes one batch; nothing where there is no work. A device failure ends the requests of that batch with an
        error, and only those."""
        with self._lock:
            batch = self._schedule()
        if not batch:
            return []
        pieces = [self._requests[seq.group.work.request_id].open[seq] for seq in batch]
        self._meter.start()
        try:
            results = self._encoder.encode(pieces)
        except RuntimeError as error:
            results = [Failed(f"engine failure: {error}") for _ in batch]
        tokens = sum(piece.tokens for piece in pieces)
        self._cost.learn(tokens, self._meter.stop(decoded=0))
        with self._lock:
            deltas = [
                delta
                for seq, result in zip(batch, results, strict=True)
                if (delta := self._take(seq, result)) is not None
            ]
            self._queue.settle(self._active.keys())
        return deltas

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(
                running=len(self._requests),
                waiting=0,
                tokens_in_flight=self._tokens,
                kv_blocks_total=0,
                kv_blocks_free=0,
                kv_blocks_cached=0,
                step_ms=self._meter.step_ms,
                prefill_tokens_per_s=self._cost.tokens_per_s,
                path=self._encoder.path,
            )

    def check(self) -> list[str]:
        """Recounts queue and tokens from the requests themselves; returns what disagrees."""
        with self._lock:
            wrong = self._queue.problems(seq for request in self._requests.values() for seq in request.open)
            still = [(seq, piece) for request in self._requests.values() for seq, piece in request.open.items()]
            if sum(piece.tokens for _, piece in still) != self._tokens:
                wrong.append("tokens in flight do not add up")
            waiting = {id(seq) for seq, _ in still if seq.status is Status.WAITING}
            if {id(seq) for seq in self._queue} != waiting:
                wrong.append("the queue is not the set of waiting inputs")
            if self._active != Counter(request.group.work.share for request in self._requests.values()):
                wrong.append("the count of active shares is wrong")
            return wrong

    def _refusal(self, work: Work, pieces: list[Piece]) -> str | None:
        if work.kind != "embed":
            return "this engine makes embeddings; it generates no text"
        if work.request_id in self._requests:
            return "a request of this id is already here"
        if not 1 <= work.sequences == len(pieces) <= INPUTS_MAX:
            return f"{work.sequences} sequences for {len(pieces)} inputs"
        longest = max(piece.tokens for piece in pieces)
        if longest > self._encoder.context:
            return f"an input of {longest} tokens does not fit a context of {self._encoder.context}"
        if not (self._encoder.goes_by_text or all(piece.ids for piece in pieces)):
            return "an input has no tokens"
        for ids, _, _ in pieces:
            if ids and not (min(ids) >= 0 and max(ids) < self._encoder.vocab_size):
                return f"a token id is outside the vocabulary of {self._encoder.vocab_size}"
        if not (work.weight > 0 and math.isfinite(work.weight)):
            return f"weight must be positive, not {work.weight}"
        waiting = len(self._queue)
        if waiting and waiting + len(pieces) > self._waiting_max:
            return f"{waiting} inputs wait already"
        return None

    def _schedule(self) -> list[Sequence]:
        """At least one input while any waits. Who does not fit ends the batch: nobody overtakes."""
        batch: list[Sequence] = []
        left = self._budget
        while (seq := self._queue.head()) is not None and (not batch or len(seq.tokens) <= left):
            self._queue.admitted(seq)
            seq.status = Status.RUNNING
            batch.append(seq)
            left -= len(seq.tokens)
        return batch

    def _take(self, seq: Sequence, result: bytes | Failed | None) -> Delta | None:
        """What became of one input of the batch. Its tokens are charged as soon as they are computed."""
        request = self._requests[seq.group.work.request_id]
        tokens = len(seq.tokens)
        self._queue.paid(seq, tokens)
        self._queue.charge(seq.share, inputs=tokens / seq.weight)
        seq.computed = seq.charged = tokens
        if result is None:
            return None
        if isinstance(result, Failed):
            return self._end(request, seq, "error", result.why)
        request.computed += tokens
        return self._end(request, seq, "stop", vector=result)

    def _end(
        self, request: Request, seq: Sequence, finish: str, error: str | None = None, vector: bytes | None = None
    ) -> Delta:
        """The one way out of an input; the last one brings the request's usage."""
        work = request.group.work
        if seq.status is Status.WAITING:
            self._queue.remove(seq)
        self._queue.forgive(seq)
        seq.status = Status.ENDED
        self._tokens -= request.open.pop(seq).tokens
        usage = None
        if not request.open:
            usage = EngineUsage(request.computed, 0, 0)
            del self._requests[work.request_id]
            self._active[work.share] -= 1
            if not self._active[work.share]:
                del self._active[work.share]
        return Delta(
            work.request_id, work.attempt, seq.index, "", [], finish=finish, error=error, usage=usage, vector=vector
        )
