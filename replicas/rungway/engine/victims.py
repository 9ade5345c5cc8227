"""Who gives way: pure choices over running sequences, made by the scheduler.

For lack of blocks the least worth keeping goes. For a more urgent request that waits, only sequences of strictly less
urgent bands go, just enough of them, and each at most `PREEMPTIONS_MAX` times: then it is pinned. Equal priority never
preempts, or two requests could take turns for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rungway.engine.sequence import Sequence

PREEMPTIONS_MAX = 3

Over = Callable[[str], bool]  # whether a share holds more than its quota of blocks, see quotas.py
Got = Callable[[str], float]  # what a share has had so far, see fairness.py


def pinned(seq: Sequence) -> bool:
    return seq.preemptions >= PREEMPTIONS_MAX


def least_worth_keeping(running: Iterable[Sequence], over: Over) -> Sequence:
    """Of the least urgent band the newest of a share over its quota, else the newest; those that are pinned only when no
    other of their band is there, by age alone. So the oldest of the most urgent band goes last once all are pinned, and
    something always gets on."""
    return max(running, key=lambda seq: (seq.priority, *_unpinned(seq, over), seq.arrival))


def _unpinned(seq: Sequence, over: Over) -> tuple[bool, bool]:
    return (False, False) if pinned(seq) else (True, over(seq.share))


def enough_for(
    head: Sequence,
    running: Iterable[Sequence],
    *,
    rows_free: int,
    blocks_short: Callable[[int], int],
    frees: Callable[[Sequence], int],
    got: Got,
    over: Over,
) -> list[Sequence] | None:
    """The fewest victims, worst first, after whom `head` can run, perhaps none; None where all of them would not do.
    `blocks_short(n)`: blocks that are missing once n sequences have gone; `frees`: blocks that one gives back.

    Order: least urgent band, then shares over their quota, then the share that is furthest ahead, then the least work to
    do again, then the newest."""
    candidates = [seq for seq in running if seq.priority > head.priority and not pinned(seq)]
    candidates.sort(key=lambda s: (-s.priority, not over(s.share), -got(s.share), s.computed, -s.arrival))
    freed = 0
    for count in range(len(candidates) + 1):
        freed += frees(candidates[count - 1]) if count else 0
        if rows_free + count > 0 and freed >= blocks_short(count):
            return candidates[:count]
    return None
