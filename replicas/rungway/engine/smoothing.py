"""Makes layers easier to put into fewer bits, at no cost while running.

A few channels of a layer's input are much larger than the rest and take the code range from them. Dividing a channel by
a factor and multiplying the weight's column by it changes nothing in the product, but spreads the difficulty over both
(Xiao et al., "SmoothQuant", ICML 2023). The division is folded into what makes the input: a norm's weight, or the rows
of the projection before. Where only weights lose bits, the same exchange goes by what counts there: columns that carry
more of the activations are made larger against the grid of their group (Lin et al., "AWQ", MLSys 2024). What channels
carry comes from the plain model reading the text of selftest.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rungway.engine.linear import Linear

_SHARE = 0.5  # how much of the difficulty moves to the weights
_LEAST = 1e-5


class Seen(NamedTuple):
    """What the input channels of a layer carried: largest magnitude and sum of squares, both [in]."""

    peaks: torch.Tensor
    squares: torch.Tensor


class Watched:
    """A plain layer that notes the largest magnitude of each input channel, and the sum of its squares."""

    def __init__(self, inner: Linear, inputs: int) -> None:
        self._inner = inner
        self.peaks = torch.zeros(inputs)
        self.squares = torch.zeros(inputs)

    @property
    def seen(self) -> Seen:
        return Seen(self.peaks, self.squares)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._note(x)
        return self._inner(x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        self._note(x)
        return self._inner.add(x, residual)

    def _note(self, x: torch.Tensor) -> None:
        values = x.float()
        torch.maximum(self.peaks, values.abs().amax(0), out=self.peaks)
        self.squares += values.square().sum(0)


def factors(peaks: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By what to divide each input channel and multiply each column of `weight` [out, in]; 1 on average (geometric), and 1
    for channels that were never seen to carry anything."""
    columns = weight.float().abs().amax(0)
    raw = peaks.clamp(min=_LEAST) ** _SHARE / columns.clamp(min=_LEAST) ** (1.0 - _SHARE)
    raw = torch.where(peaks > _LEAST, raw, raw.log().mean().exp())
    return raw / raw.log().mean().exp()


def weight_factors(squares: torch.Tensor, weight: torch.Tensor, share: float) -> torch.Tensor:
    """The same for layers whose activations keep their bits. `squares` [in]: sums of squares of each input channel;
    `share`: how far columns follow them, 0 = not at all."""
    own = weight.float().abs().mean(0).clamp(min=_LEAST) ** (share / 2)
    raw = squares.sqrt().clamp(min=_LEAST) ** share / own
    raw = torch.where(squares > 0, raw, raw.log().mean().exp())
    return raw / raw.log().mean().exp()
