"""A layer's mixture of experts: a router picks few of them for each token, and their results are added by its weights.

Tokens are sorted by expert and each expert that is wanted runs once. Neither the choice nor the sum depends on what else
is in the batch: router scores are computed in float64 and rounded, so that the order of summation, which varies with the
number of rows, is rounded away; equal scores go to the lower expert; results are added in the order of rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rungway.engine.families.spec import Routing, Score
from rungway.engine.parts import Builder, Stream, gate_of, joined
from rungway.engine.precision import Role
from rungway.engine.stored import Weight

_ABOVE_ZERO = 1e-20


class Router:
    """Chooses experts. The weight may lie under either of two names; a correction bias beside it."""

    def __init__(self, build: Builder, prefix: str, routing: Routing) -> None:
        names = (f"{prefix}mlp.gate.weight", f"{prefix}block_sparse_moe.gate.weight")
        self._weight = build.find(*names, dtype=torch.float64)
        self._routing = routing
        self._bias: torch.Tensor | None = None
        if routing.corrected:
            self._bias = build.get(f"{prefix}mlp.gate.e_score_correction_bias", torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (float32) and numbers of the chosen experts, both [tokens, chosen], best first."""
        routing = self._routing
        logits = F.linear(x.double(), self._weight)
        scores = (logits.sigmoid() if routing.score is Score.SIGMOID else logits.softmax(-1)).float()
        ranked = scores if self._bias is None else scores + self._bias
        if routing.groups > 1:
            ranked = ranked.masked_fill(~self._eligible(ranked), float("-inf"))
        chosen = _best(ranked, routing.chosen)
        weights = scores.gather(1, chosen)
        if routing.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _ABOVE_ZERO)
        return weights * routing.scale, chosen

    def _eligible(self, ranked: torch.Tensor) -> torch.Tensor:
        """[tokens, experts]: whether an expert is in one of its token's best groups."""
        routing = self._routing
        grouped = ranked.view(len(ranked), routing.groups, -1)
        totals = grouped.topk(routing.group_best, -1).values.sum(-1)
        kept = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, _best(totals, routing.groups_chosen), True)
        return kept[:, :, None].expand_as(grouped).reshape(ranked.shape)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` largest of each row are; of equal ones the first."""
    return values.argsort(stable=True, dim=-1, descending=True)[:, :count]


class _Expert:
    """A gated MLP without a norm or a residual."""

    def __init__(self, build: Builder, place: str, gate_up: Weight, down: Weight) -> None:
        self._gate = gate_of(build.arch, build.ops)
        self._gate_up = build.made(place, Role.GATE_UP, gate_up, None)
        self._down = build.made(place, Role.DOWN, down, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._gate(self._gate_up(x)))


class Experts:
    """Norm, router, experts, and the expert that every token passes where there is one."""

    def __init__(self, build: Builder, prefix: str, before: str, routing: Routing) -> None:
        """`before`: name of the norm that feeds it."""
        self._ops = build.ops
        self._eps = build.arch.norm_eps
        self._group = build.group
        self._norm = build.norm(before)
        self._router = Router(build, prefix, routing)
        self._experts = _experts(build, prefix, routing.experts)
        self._shared: _Expert | None = None
        self._shared_gate: torch.Tensor | None = None
        if routing.shared:
            name = f"{prefix}mlp.shared_expert{'' if routing.shared_gate else 's'}."
            self._shared = _named(build, name, "gate_proj", "up_proj", "down_proj")
        if routing.shared_gate:
            self._shared_gate = build.get(f"{prefix}mlp.shared_expert_gate.weight", build.precision.hidden)

    def __call__(self, stream: Stream) -> Stream:
        inputs, x = stream.normed(self._ops, self._norm, self._eps)
        y = self._routed(inputs, *self._router(inputs))
        if self._shared is not None:
            shared = self._shared(inputs)
            y += shared if self._shared_gate is None else torch.sigmoid(F.linear(inputs, self._shared_gate)) * shared
        return joined(self._ops, y if self._group is None else self._group.sum(y), x)

    def _routed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        tokens, each = chosen.shape
        order = chosen.flatten().argsort(stable=True)
        sorted_x = x.index_select(0, order // each)
        sorted_y = torch.empty_like(sorted_x)
        start = 0
        for expert, count in enumerate(torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist()):
            if count:
                sorted_y[start : start + count] = self._experts[expert](sorted_x[start : start + count])
                start += count
        by_token = torch.empty_like(sorted_y).index_copy_(0, order, sorted_y).view(tokens, each, -1)
        weights = weights.to(x.dtype)
        y = by_token[:, 0] * weights[:, :1]
        for rank in range(1, each):
            y.addcmul_(by_token[:, rank], weights[:, rank : rank + 1])
        return y


def _experts(build: Builder, prefix: str, count: int) -> list[_Expert]:
    """All of a layer; checkpoints keep them stacked, or each by itself under one of two sets of names."""
    places = [f"{prefix}mlp.experts.{expert}." for expert in range(count)]
    try:
        gate_up, down = build.get(f"{prefix}mlp.experts.gate_up_proj"), build.get(f"{prefix}mlp.experts.down_proj")
    except KeyError:
        pass
    else:
        return [_Expert(build, place, gate_up[at], down[at]) for at, place in enumerate(places)]
    try:
        return [_named(build, place, "gate_proj", "up_proj", "down_proj") for place in places]
    except KeyError:
        places = [f"{prefix}block_sparse_moe.experts.{expert}." for expert in range(count)]
        return [_named(build, place, "w1", "w3", "w2") for place in places]


def _named(build: Builder, place: str, gate: str, up: str, down: str) -> _Expert:
    return _Expert(build, place, build.fused(place, gate, up)[0], build.fused(place, down)[0])
