"""How likely a tier answers an Ask well: P(ok | tier, ask), calibrated, and never lower for a more capable tier.

Two logistic heads on standardised features. `weak` is P(ok) of the smallest tier. `gap` is the chance that the most
capable tier is right where the smallest is wrong, so that

    P(ok | top) = weak + (1 - weak) * gap        P(ok | rank) = weak + (1 - weak) * gap * rank / top_rank

With `gap` in 0..1 a higher rank can never score below a lower one: monotone by construction, not by training. Each head
ends in a Platt step (Platt 1999): a slope and an offset fitted on held-out scores. The shipped numbers come from
`rungway.simulate.train_quality`; what they are worth, and where they stop being worth it, is in docs/router.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources

import msgspec

from rungway.policies.features import NAMES

MODEL_FILE = "quality.json"
# A feature counts as if it stood at most this many standard deviations from the training mean: prompts unlike the
# training data are judged like its edge, not by extrapolation.
CLAMP_DEVIATIONS = 4.0


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Weights on standardised features, and the Platt step on their sum: sigmoid(slope * score + offset)."""

    weights: tuple[float, ...]
    bias: float
    platt_slope: float
    platt_offset: float


class QualityData(msgspec.Struct, frozen=True, kw_only=True):
    """The file: coefficients, and how they were made (`made`, for people; the code does not read it)."""

    features: tuple[str, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]
    weak: Head
    gap: Head
    prior_weak: float
    prior_gap: float
    made: dict[str, object]


class QualityModel:
    """P(ok) per capability rank. Immutable after construction; `p_ok` is pure."""

    def __init__(self, data: QualityData) -> None:
        width = len(data.features)
        assert width == len(data.means) == len(data.deviations) == len(data.weak.weights) == len(data.gap.weights)
        self.data = data
        self._width = width
        # Standardising, weights and the Platt slope folded into one row per feature: bounds of the raw value, its mean,
        # and its two slopes.
        self._rows = tuple(
            (mean - CLAMP_DEVIATIONS * dev, mean + CLAMP_DEVIATIONS * dev, mean, weak / dev, gap / dev)
            for mean, dev, weak, gap in zip(
                data.means, data.deviations, _scaled(data.weak), _scaled(data.gap), strict=True
            )
        )
        self._weak_bias = data.weak.platt_slope * data.weak.bias + data.weak.platt_offset
        self._gap_bias = data.gap.platt_slope * data.gap.bias + data.gap.platt_offset

    def heads(self, features: Sequence[float]) -> tuple[float, float]:
        """(weak, gap), both 0 to 1. Features that are absent, of another width or not finite give the prior."""
        if len(features) != self._width:
            return self.data.prior_weak, self.data.prior_gap
        weak, gap = self._weak_bias, self._gap_bias
        for value, (low, high, mean, weak_slope, gap_slope) in zip(features, self._rows, strict=True):
            step = (low if value < low else high if value > high else value) - mean
            weak += weak_slope * step
            gap += gap_slope * step
        if weak != weak or gap != gap:  # a NaN passes every comparison above
            return self.data.prior_weak, self.data.prior_gap
        return 1.0 / (1.0 + math.exp(-weak)), 1.0 / (1.0 + math.exp(-gap))

    def p_ok(self, rank: int, top_rank: int, features: Sequence[float]) -> float:
        """P(ok) of capability `rank` where `top_rank` is the most capable one declared. A lone tier counts as top."""
        weak, gap = self.heads(features)
        return p_of(weak, gap, rank, top_rank)


def p_of(weak: float, gap: float, rank: int, top_rank: int) -> float:
    """P(ok) of `rank` from the two heads; ranks between the smallest and the top share the gap evenly."""
    reach = min(rank / top_rank, 1.0) if top_rank > 0 else 1.0
    return weak + (1.0 - weak) * gap * reach


def decode(raw: bytes) -> QualityModel:
    """The model in a JSON file's bytes. Raises msgspec.ValidationError when its shape is wrong."""
    return QualityModel(msgspec.json.decode(raw, type=QualityData))


def load_default() -> QualityModel:
    """The packaged model. Reads a file: call it once at the edge and pass the model on."""
    model = decode((resources.files("rungway.policies") / "data" / MODEL_FILE).read_bytes())
    assert model.data.features == NAMES, "data/quality.json was made for other features; run train_quality again"
    return model


def _scaled(head: Head) -> tuple[float, ...]:
    return tuple(weight * head.platt_slope for weight in head.weights)
