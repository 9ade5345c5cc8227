"""Which drafts were right. A draft is right where it is the very token that the model gives at its place.

The token of each place is chosen from that place's own distribution (bias, penalties, filters and all, counting the
drafts before it) with the random number of that place. Drafts only decide which places are computed at once: whatever
they say, the answer is the one without drafts, token for token, for any seed (docs/decisions/0005).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rungway.engine.guide import Guide
from rungway.engine.sampler import Row, Sampled


def rows(row: Row, drafts: list[int], guide: Guide | None = None) -> list[Row]:
    """The place after the known tokens, and the place after each draft, each under what `guide` allows there."""
    later = [
        row._replace(tokens=[*row.tokens, *drafts[:count]], position=row.position + count)
        for count in range(1, len(drafts) + 1)
    ]
    return [row, *later] if guide is None else _guided([row, *later], drafts, guide)


def _guided(places: list[Row], drafts: list[int], guide: Guide) -> list[Row]:
    """Beyond a draft that may not come, masks do not matter: that draft cannot be right."""
    masks = [guide.mask()]
    for draft in drafts:
        if not guide.accept(draft):
            break
        masks.append(guide.mask())
    guide.rollback(len(masks) - 1)
    masks += masks[-1:] * (len(places) - len(masks))
    return [place._replace(mask=mask) for place, mask in zip(places, masks, strict=True)]


def split(sampled: list[Sampled], counts: list[int]) -> Iterator[list[Sampled]]:
    """`sampled` in pieces of the given sizes."""
    left = iter(sampled)
    for count in counts:
        yield list(islice(left, count))


def run(drafts: list[int], sampled: list[Sampled]) -> list[Sampled]:
    """What the model says, from the first place to that of the first draft that it does not say itself, or one more than
    all drafts. `sampled`: one for each of `rows`."""
    right = next((at for at, draft in enumerate(drafts) if sampled[at].token != draft), len(drafts))
    return sampled[: right + 1]
