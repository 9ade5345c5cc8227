"""Who gives way: pure choices over running sequences, made by the scheduler.

For lack of blocks the least worth keeping goes. For a more urgent request that waits, only sequences of strictly less
urgent bands go, just enough of them, and each at most `PREEMPTIONS_MAX` times: then it is pinned. Equal priority never
preempts, or two requests could take turns for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rungway.engine.sequence import Sequence

PREEMPTIONS_MAX = 3

Got = Callable[[str], float]  # what a share has had so far, see fairness.py


def pinned(seq: Sequence) -> bool:
    return seq.preemptions >= PREEMPTIONS_MAX


def least_worth_keeping(running: Iterable[Sequence]) -> Sequence:
    """The newest of the least urgent band; those that are pinned only when no other of their band is there. The oldest of
    the most urgent band goes last, so that something always gets on."""
    return max(running, key=lambda seq: (seq.priority, not pinned(seq), seq.arrival))


def enough_for(
    head: Sequence,
    running: Iterable[Sequence],
    *,
    rows_free: int,
    blocks_short: Callable[[int], int],
    frees: Callable[[Sequence], int],
    got: Got,
) -> list[Sequence] | None:
    """The fewest victims, worst first, after whom `head` can run, perhaps none; None where all of them would not do.
    `blocks_short(n)`: blocks that are missing once n sequences have gone; `frees`: blocks that one gives back.

    Order: least urgent band, then the share that is furthest ahead, then the least work to do again, then the newest."""
    candidates = [seq for seq in running if seq.priority > head.priority and not pinned(seq)]
    candidates.sort(key=lambda seq: (-seq.priority, -got(seq.group.work.share), seq.computed, -seq.arrival))
    freed = 0
    for count in range(len(candidates) + 1):
        freed += frees(candidates[count - 1]) if count else 0
        if rows_free + count > 0 and freed >= blocks_short(count):
            return candidates[:count]
    return None
