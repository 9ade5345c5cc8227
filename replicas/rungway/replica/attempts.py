"""What a replica knows of its attempts: those that run, those it has seen, those that must not begin."""

from __future__ import annotations

from typing import Generic, TypeVar

from rungway.engine.fake_script import input_lengths, prompt_length
from rungway.engine.protocol import Delta, EngineUsage, Work
from rungway.types import AttemptEnd, Billing, Usage

_FINISH_ORDER = ("stop", "length", "cancelled", "error")  # of several sequences the worst one names the attempt's end

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A dict that forgets its oldest keys beyond `size`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: dict[K, V] = {}

    def put(self, key: K, value: V) -> None:
        self._items.pop(key, None)
        self._items[key] = value
        if len(self._items) > self._size:
            del self._items[next(iter(self._items))]

    def get(self, key: K) -> V | None:
        return self._items.get(key)

    def pop(self, key: K) -> V | None:
        return self._items.pop(key, None)

    def __contains__(self, key: K) -> bool:
        return key in self._items


class Attempt:
    """One attempt in the engine. `slot` is its place in the token log; `gateway` is empty once that peer is lost. `prompt_tokens`
    of an embedding grow with each vector."""

    __slots__ = (
        "attempt",
        "billing",
        "emitted",
        "evicted",
        "finish",
        "gateway",
        "lengths",
        "open_indices",
        "prompt_tokens",
        "reported",
        "request_id",
        "slot",
        "started_wall_ns",
    )

    def __init__(self, work: Work, billing: Billing, gateway: str, slot: int, started_wall_ns: int) -> None:
        self.request_id = work.request_id
        self.attempt = work.attempt
        self.billing = billing
        self.gateway = gateway
        self.slot = slot
        self.started_wall_ns = started_wall_ns
        self.lengths = input_lengths(work)
        self.prompt_tokens = 0 if work.kind == "embed" else prompt_length(work)
        self.open_indices = set(range(work.sequences))
        self.emitted = 0
        self.reported = 0
        self.evicted = False
        self.finish = "stop"

    def counted(self, delta: Delta) -> bool:
        """Books what a delta says was computed; False where it says nothing of that kind."""
        if delta.token_ids:
            self.emitted += len(delta.token_ids)
        elif delta.vector is not None:
            self.prompt_tokens += self.lengths[delta.index]
        else:
            return False
        return True

    def finished(self, index: int, finish: str) -> None:
        """One sequence ended so."""
        self.open_indices.discard(index)
        self.finish = max(self.finish, finish, key=_FINISH_ORDER.index)

    def usage_so_far(self) -> EngineUsage:
        """What can be said of an attempt whose engine will report no usage any more."""
        return EngineUsage(self.prompt_tokens if self.emitted or self.lengths else 0, 0, self.emitted)


def attempt_end(
    replica_id: str,
    request_id: str,
    attempt: int,
    billing: Billing,
    usage: EngineUsage,
    finish: str,
    times: tuple[int, int],
) -> AttemptEnd:
    """`times` are the wall clock at start and end, nanoseconds."""
    return AttemptEnd(
        request_id=request_id,
        attempt=attempt,
        replica_id=replica_id,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, output_tokens=usage.output_tokens
        ),
        finish=finish,
        billing=billing,
        started_wall_ns=times[0],
        ended_wall_ns=times[1],
    )


def closing_deltas(
    request_id: str, attempt: int, indices: list[int], finish: str, error: str | None, usage: EngineUsage
) -> list[Delta]:
    """Last deltas of an attempt that the engine will not end itself; the very last one carries the usage."""
    last = len(indices) - 1
    return [
        Delta(request_id, attempt, index, "", [], None, finish, error, 0.0, usage if place == last else None)
        for place, index in enumerate(indices)
    ]
