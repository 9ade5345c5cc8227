"""Makes activations easier to put into 8 bits, at no cost while running.

A few channels of a layer's input are much larger than the rest and take the code range from them. Dividing a channel by
a factor and multiplying the weight's column by it changes nothing in the product, but spreads the difficulty over both
(Xiao et al., "SmoothQuant", ICML 2023). The division is folded into what makes the input: a norm's weight, or the rows
of the projection before. Channel peaks come from the plain model reading the text of selftest.py.
"""

from __future__ import annotations

import torch

from rungway.engine.linear import Linear

_SHARE = 0.5  # how much of the difficulty moves to the weights
_LEAST = 1e-5


class Watched:
    """A plain layer that notes the largest magnitude of each input channel."""

    def __init__(self, inner: Linear, inputs: int) -> None:
        self._inner = inner
        self.peaks = torch.zeros(inputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._note(x)
        return self._inner(x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        self._note(x)
        return self._inner.add(x, residual)

    def _note(self, x: torch.Tensor) -> None:
        torch.maximum(self.peaks, x.float().abs().amax(0), out=self.peaks)


def factors(peaks: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By what to divide each input channel and multiply each column of `weight` [out, in]; 1 on average (geometric), and 1
    for channels that were never seen to carry anything."""
    columns = weight.float().abs().amax(0)
    raw = peaks.clamp(min=_LEAST) ** _SHARE / columns.clamp(min=_LEAST) ** (1.0 - _SHARE)
    raw = torch.where(peaks > _LEAST, raw, raw.log().mean().exp())
    return raw / raw.log().mean().exp()
