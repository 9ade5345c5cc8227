"""Times the parts of a model from outside: by the seams where its layers are made (Maker) and its operations called (Ops).

Attention is what lies between placing keys and the output projection, the gate what lies between the two projections of an
MLP: so it does not matter which operations a build uses for them. A model that computes a whole step in one call sees layers
that it does not know and takes its ordinary path; how long its one call takes is measured without a stopwatch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

from rungway.engine.ops import Angles, Ops, Span
from rungway.engine.precision import Maker, Precision, Projection, Role
from rungway.engine.roofline import Clock, Part
from rungway.engine.stored import Weight

_BETWEEN = {(Part.PLACE, Part.OUT): Part.ATTENTION, (Part.GATE_UP, Part.DOWN): Part.GATE}


class Stopwatch:
    """Seconds by part since `reset`."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.reset()

    def reset(self) -> None:
        self.spent: dict[Part, float] = defaultdict(float)
        self._last: tuple[Part, float] | None = None

    def enter(self, part: Part) -> float:
        now = self.clock()
        if self._last is not None:
            before, ended = self._last
            between = _BETWEEN.get((before, part))
            if between is not None:
                self.spent[between] += now - ended
        return now

    def leave(self, part: Part, entered: float) -> None:
        now = self.clock()
        self.spent[part] += now - entered
        self._last = (part, now)


class TimedProjection:
    def __init__(self, inner: Projection, part: Part, watch: Stopwatch) -> None:
        self._inner = inner
        self._part = part
        self._watch = watch

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        entered = self._watch.enter(self._part)
        y = self._inner(x)
        self._watch.leave(self._part, entered)
        return y

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        entered = self._watch.enter(self._part)
        y = self._inner.add(x, residual)
        self._watch.leave(self._part, entered)
        return y


class TimedMaker(Maker):
    """Makes the layers that Maker makes, each with a stopwatch."""

    def __init__(self, precision: Precision, watch: Stopwatch) -> None:
        super().__init__(precision)
        self._watch = watch

    def __call__(
        self,
        role: Role,
        weight: Weight,
        bias: torch.Tensor | None = None,
        *,
        keep: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Projection:
        return TimedProjection(
            super().__call__(role, weight, bias, keep=keep, dtype=dtype), Part(role.value), self._watch
        )


class TimedOps:
    """The operations of `inner`; those that are parts of their own with a stopwatch."""

    def __init__(self, inner: Ops, watch: Stopwatch) -> None:
        self._inner = inner
        self._watch = watch
        self.decode_masks = inner.decode_masks
        self.adds_in_norm = inner.adds_in_norm

    def __getattr__(self, name: str) -> Any:
        """What else the inner operations can do."""
        return getattr(self._inner, name)

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        entered = self._watch.clock()  # not `enter`: a norm may stand between any two parts
        both = self._inner.norm(x, weight, eps, residual)
        self._watch.spent[Part.NORMS] += self._watch.clock() - entered
        return both

    def angles(self, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> Angles:
        return self._inner.angles(positions, frequencies, dtype)

    def place(
        self,
        qkv: torch.Tensor,
        heads: int,
        angles: Angles,
        stored: torch.Tensor,
        slots: torch.Tensor,
        norms: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        entered = self._watch.enter(Part.PLACE)
        queries = self._inner.place(qkv, heads, angles, stored, slots, norms, eps)
        self._watch.leave(Part.PLACE, entered)
        return queries

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._inner.swiglu(gate_up)

    def decode(self, queries: torch.Tensor, stored: torch.Tensor, span: Span) -> torch.Tensor:
        return self._inner.decode(queries, stored, span)

    def prefill(self, queries: torch.Tensor, stored: torch.Tensor, span: Span) -> torch.Tensor:
        return self._inner.prefill(queries, stored, span)
