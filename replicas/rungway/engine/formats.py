"""The numbers that a model can be served in, by name: what each means for its layers, and what it costs in memory.

float32    everything in float32; the exact mode.
bfloat16   weights, activations and cache in bfloat16.
int8       linear layers in 8 bits. On CPU activations are put into 8 bits, too, shapes that packed bfloat16 computes faster
           stay in that, cache in bfloat16; `auto` takes it only after a test of its answers on the model itself. On a GPU
           activations stay bfloat16.
int8+bfloat16  the same with those layers in bfloat16 that cost most accuracy: into attention, and down to the residual.
int4       linear layers in 4 bits by group, the head in 8 on CPU, and activations with own kernels there; never by `auto`. `-g128` = larger groups, `-sym` = without zeros.
stored     layers as a quantised checkpoint has them (stored.py), what it left plain in bfloat16; never asked for by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from rungway.engine.fp8 import fp8_ready
from rungway.engine.int4 import int4_ready
from rungway.engine.int8 import int8_works
from rungway.engine.native_linear import native_works


class Role(StrEnum):
    """The linear layers of a decoder."""

    QKV = "qkv"
    OUT = "out"
    GATE_UP = "gate_up"
    DOWN = "down"
    HEAD = "head"


@dataclass(frozen=True)
class Precision:
    """`hidden`: type of the activations between layers. `cache`: of keys and values, and of the weights that are kept
    plain. `int8`: which linear layers may be 8 bits. `int4`: which are made 4 bits, in groups of up to `group` inputs.
    `stored`: layers stay as a quantised checkpoint has them."""

    name: str
    hidden: torch.dtype
    cache: torch.dtype
    int8: frozenset[Role] = frozenset()
    int4: frozenset[Role] = frozenset()
    group: int = 0
    symmetric: bool = False
    stored: bool = False


INT8 = Precision("int8", torch.float32, torch.bfloat16, frozenset(Role))
INT8_PART = replace(INT8, name="int8+bfloat16", int8=frozenset({Role.OUT, Role.GATE_UP, Role.HEAD}))


_FORMAT = re.compile(r"int4(?:-g(32|128)(-sym)?)?")


def four_bits(name: str, device: torch.device) -> Precision | None:
    """The precision of `int4`, `int4-g32` or `int4-g128`, the latter two with or without `-sym`; None for other names.
    `int4` is `int4-g32`: small models need the smaller groups."""
    found = _FORMAT.fullmatch(name)
    if found is None:
        return None
    group, symmetric = int(found[1] or 32), bool(found[2])
    on_cpu = device.type == "cpu"
    return Precision(
        f"int4-g{group}{'-sym' if symmetric else ''}",
        torch.float32 if on_cpu else torch.bfloat16,
        torch.bfloat16,
        int8=frozenset({Role.HEAD}) if on_cpu and int8_ready(device) else frozenset(),
        int4=frozenset(Role) - {Role.HEAD},
        group=group,
        symmetric=symmetric,
    )


def as_stored(form: str, device: torch.device) -> Precision:
    """A quantised checkpoint's own bits; its plain layers in bfloat16."""
    hidden = torch.float32 if device.type == "cpu" else torch.bfloat16
    return Precision(f"{form}-stored", hidden, torch.bfloat16, stored=True)


INT8_GPU = Precision("int8", torch.bfloat16, torch.bfloat16, frozenset(Role))


def plain(dtype: torch.dtype) -> Precision:
    return Precision(str(dtype).removeprefix("torch."), dtype, dtype)


def int8_ready(device: torch.device) -> bool:
    """Whether products with 8-bit weights can be had on this device."""
    return device.type == "cuda" or int8_works() or native_works()


def keeps(form: str, device: torch.device) -> bool:
    """Whether weights of that form can be computed with as they are."""
    return int4_ready(device) if form == "int4" else fp8_ready(device) if form == "fp8" else False


@dataclass(frozen=True)
class Format:
    """`name`: what to write as `dtype`. `bits`: of a weight in a linear layer with its share of scales and zeros (one
    output's 32-bit scale counted over 1,024 inputs)."""

    name: str
    bits: float


FORMATS: dict[str, Format] = {
    kind.name: kind
    for kind in (
        Format("float32", 32.0),
        Format("bfloat16", 16.0),
        Format("float16", 16.0),
        Format("int8", 8 + 32 / 1024),
        Format("int4", 4 + 32 / 32),
        Format("int4-g32", 4 + 32 / 32),
        Format("int4-g128", 4 + 32 / 128),
        Format("int4-g32-sym", 4 + 32 / 32),
        Format("int4-g128-sym", 4 + 32 / 128),
    )
}
