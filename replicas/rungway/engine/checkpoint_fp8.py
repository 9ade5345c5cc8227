"""Checkpoints in 8-bit floats (e4m3, Micikevicius et al., arXiv 2209.05433), in the two ways in use.

    weight            float8_e4m3fn [out, in]
    weight_scale_inv  [ceil(out / 128), ceil(in / 128)], one for each block (DeepSeek-AI, arXiv 2412.19437)
    weight_scale      one number, [out] or [out, 1]

W[o, i] = code * scale; despite its name `weight_scale_inv` is multiplied, too. Scales of activations that a checkpoint may
have are not read: activations are either left as they are or scaled token by token.
"""

from __future__ import annotations

from typing import Any

import torch

from rungway.engine.checkpoint_bits import require
from rungway.engine.errors import ModelError
from rungway.engine.stored import Fp8Weight
from rungway.engine.weights import DirectoryWeights
from rungway.kernels.layouts import BLOCK


class Fp8:
    form = "fp8"

    def __init__(self, config: dict[str, Any]) -> None:
        require(config, "FP8", "fmt", ("e4m3",), "e4m3")
        require(config, "FP8", "weight_block_size", (None, [BLOCK, BLOCK]), None)

    def read(self, tensors: DirectoryWeights, module: str) -> Fp8Weight | None:
        return fp8_weight(tensors, module)


def fp8_weight(tensors: DirectoryWeights, module: str) -> Fp8Weight | None:
    """None where the module is plain. Raises ModelError for scales of another shape."""
    scaled = next((name for name in ("weight_scale_inv", "weight_scale") if tensors.has(f"{module}.{name}")), None)
    if scaled is None:
        return None
    codes, scales = tensors(f"{module}.weight"), tensors(f"{module}.{scaled}").float()
    if codes.dtype is not torch.float8_e4m3fn:
        raise ModelError(f"{module}.weight is {codes.dtype}, not float8_e4m3fn")
    rows, columns = codes.shape
    if scales.numel() == 1:
        return Fp8Weight(codes, scales.reshape(1).repeat(rows))
    if scales.shape in ((rows,), (rows, 1)):
        return Fp8Weight(codes, scales.reshape(rows))
    if scales.shape != (-(-rows // BLOCK), -(-columns // BLOCK)):
        raise ModelError(f"{module}.{scaled} has shape {list(scales.shape)}, which is neither by row nor by block")
    return Fp8Weight(codes, scales)
