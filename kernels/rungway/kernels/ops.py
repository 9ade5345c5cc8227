"""The kernels as functions, each going where its first argument is: Triton on CUDA, else the reference, whose arguments and
results it has. Shapes and formulae: reference.py, attention_reference.py, sampling_reference.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

from rungway.kernels import reference, sampling_reference
from rungway.kernels.attention_reference import paged_attention
from rungway.kernels.registry import get

P = ParamSpec("P")
R = TypeVar("R")


def _dispatched(name: str, formula: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(formula)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, get(name, cast(torch.Tensor, args[0]).device)(*args, **kwargs))

    return call


rms_norm = _dispatched("rms_norm", reference.rms_norm)
rope = _dispatched("rope", reference.rope)
rope_kv = _dispatched("rope_kv", reference.rope_kv)
swiglu = _dispatched("swiglu", reference.swiglu)
geglu = _dispatched("geglu", reference.geglu)
paged_decode_attention = _dispatched("paged_decode_attention", paged_attention)
paged_prefill_attention = _dispatched("paged_prefill_attention", paged_attention)
sample = _dispatched("sample", sampling_reference.sample)
