"""What may come next in one sequence: the seam between the sampler and whatever constrains it (a grammar, a schema)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Guide(Protocol):
    """The state of one sequence's constraint after the tokens that it has accepted. Used from the engine's thread only.

    `mask` is called before each token that is sampled or verified; `accept` after it. Speculative decoding accepts draft
    tokens one by one to get the mask at each draft position and rolls the rejected ones back.
    """

    @property
    def complete(self) -> bool:
        """Nothing but the end may follow: the sequence ends with "stop"."""
        ...

    def mask(self) -> NDArray[np.uint32]:
        """Tokens that may come next, a bit each, least significant first: [ceil(vocabulary / 32)]. All zero where the
        constraint has come to a dead end, which ends the sequence with an error."""
        ...

    def accept(self, token: int) -> bool:
        """Moves on by one token; False, without a change, where the token may not come here."""
        ...

    def rollback(self, count: int) -> None:
        """Takes back the last `count` accepted tokens."""
        ...
