"""The compiled kernels as ctypes functions, and the structures that they read. Mirrors linear.h, attention.h, decoder.h.

ctypes releases the interpreter's lock for the time of a call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np

from rungway.kernels.cpu.build import BuildError, built

PANEL = 64  # outputs that lie together in a packed weight
LANES = 16  # of them in a vector
GROUP = 16  # tokens that lie together in a cache block
DIM_MAX = 256
QUERIES_MAX = 64  # query heads of one key head
CODES, HALVES = 0, 1  # kinds of weights: 8 bits, bfloat16
MIDDLED, ZEROED = 2, 3  # 4 bits by group; zeros in the middle of the codes, or one for each group


class Linear(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("stride", c_int32),
        ("group", c_int32),
        ("offsets", c_void_p),
        ("order", c_void_p),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("head_norms", c_void_p),
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", Linear),
        ("layers", POINTER(Layer)),
        ("eps", c_float),
        ("scale", c_float),
        ("count", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("intermediate", c_int32),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("ids", c_void_p),
        ("slots", c_void_p),
        ("output_rows", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("stretches", c_void_p),
        ("caches", c_void_p),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("log_sums", c_void_p),
        ("blocks", c_int64),
        ("block_tokens", c_int32),
        ("tokens", c_int32),
        ("outputs", c_int32),
        ("stretch_count", c_int32),
        ("threads", c_int32),
    ]


# one entry per run of consecutive tokens of one sequence; `table` is the address of its block table (int64)
STRETCH = np.dtype([("first", "i4"), ("count", "i4"), ("position", "i8"), ("table", "u8")], align=True)

_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "rw_forward": (c_int32, [POINTER(Model), POINTER(Step)]),
    "rw_linear": (c_int32, [POINTER(Linear), c_void_p, c_int32, c_void_p, c_int32, c_int32]),
    "rw_gated_linear": (c_int32, [POINTER(Linear), c_void_p, c_int32, c_void_p, c_int32]),
    "rw_norm_codes": (
        None,
        [c_void_p, c_void_p, c_float, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "rw_draw": (c_int32, [c_void_p, c_int32, c_void_p, c_int32, c_void_p, c_int32]),
    "rw_peaks": (None, [c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
    "rw_place": (None, [POINTER(Model), POINTER(Step), c_void_p, c_void_p, c_void_p]),
    "rw_attend": (None, [POINTER(Model), POINTER(Step), c_void_p, c_void_p, c_void_p]),
}


def load(path: Path) -> ctypes.CDLL:
    """A compiled library with its functions' types. Raises BuildError where it cannot be loaded."""
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled kernels do not load: {error}") from error
    return library


@functools.cache
def library() -> ctypes.CDLL:
    """This process's kernels, compiled if need be. Raises BuildError; `RUNGWAY_CPU_KERNELS=off` is a reason too."""
    if os.environ.get("RUNGWAY_CPU_KERNELS") == "off":
        raise BuildError("RUNGWAY_CPU_KERNELS is off")
    return load(built())
