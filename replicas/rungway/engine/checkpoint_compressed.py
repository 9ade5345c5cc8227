"""Checkpoints of the library compressed-tensors: one description, several layouts. These are read:

float-quantized, naive-quantized   8-bit floats, as in checkpoint_fp8
int-quantized                      weight int8 [out, in], weight_scale [out, 1] or one number; dequantised
pack-quantized                     4 or 8 bits: weight_packed int32 [out, in * bits / 32], lowest bits first, codes
                                   shifted by half their range to be positive; weight_scale [out, groups];
                                   weight_zero_point int32 [out * bits / 32, groups], packed down its columns;
                                   weight_g_idx [in], the group of each input. Of 4 bits the codes are kept.
"""

from __future__ import annotations

from typing import Any

import torch

from rungway.engine.checkpoint_bits import dense, int4_weight, require, sorted_inputs, unpacked
from rungway.engine.checkpoint_fp8 import fp8_weight
from rungway.engine.errors import ModelError
from rungway.engine.stored import Stored
from rungway.engine.weights import DirectoryWeights

_WHAT = "compressed-tensors"
_FLOATS = ("float-quantized", "naive-quantized")
_LAYOUTS = (*_FLOATS, "int-quantized", "pack-quantized")


class Compressed:
    def __init__(self, config: dict[str, Any]) -> None:
        groups = list((config.get("config_groups") or {}).values())
        if not groups:
            raise ModelError(f"{_WHAT} weights without config_groups are not supported")
        self._bits = {self._bits_of(config, group) for group in groups}
        if len(self._bits) > 1:
            raise ModelError(f"{_WHAT} weights that mix layouts are not supported")
        self._layout, self._width = next(iter(self._bits))
        four = self._layout == "pack-quantized" and self._width == 4
        self.form = "int4" if four else "fp8" if self._layout in _FLOATS else "dense"

    @staticmethod
    def _bits_of(config: dict[str, Any], group: dict[str, Any]) -> tuple[str, int]:
        layout = require({"format": group.get("format") or config.get("format")}, _WHAT, "format", _LAYOUTS, None)
        weights = group.get("weights") or {}
        kind = "float" if layout in _FLOATS else "int"
        require(weights, f"{_WHAT} {layout}", "type", (kind,), kind)
        widths = (4, 8) if layout == "pack-quantized" else (8,)
        return str(layout), int(require(weights, f"{_WHAT} {layout}", "num_bits", widths, 8))

    def read(self, tensors: DirectoryWeights, module: str) -> Stored | torch.Tensor | None:
        if self._layout in _FLOATS:
            return fp8_weight(tensors, module)
        if not tensors.has(f"{module}.weight_scale"):
            return None
        scales = tensors(f"{module}.weight_scale")
        if self._layout == "pack-quantized":
            return self._packed(tensors, module, scales)
        if tensors.has(f"{module}.weight_zero_point"):
            raise ModelError(f"{_WHAT} int-quantized weights with zero points are not supported ({module})")
        codes = tensors(f"{module}.weight")
        if scales.numel() not in (1, codes.shape[0]):
            raise ModelError(f"{module}.weight_scale has shape {list(scales.shape)}, which is not by row")
        return codes.float() * scales.float().reshape(-1, 1)

    def _packed(self, tensors: DirectoryWeights, module: str, scales: torch.Tensor) -> Stored | torch.Tensor:
        bits = self._width
        codes = unpacked(tensors(f"{module}.weight_packed"), bits)
        if tensors.has(f"{module}.weight_shape"):
            codes = codes[:, : int(tensors(f"{module}.weight_shape")[1])]  # the last word may be padded
        scales = (
            scales.reshape(codes.shape[0], -1) if scales.numel() > 1 else scales.reshape(1, 1).repeat(len(codes), 1)
        )
        zeros = torch.full_like(scales, float(1 << (bits - 1)))
        if tensors.has(f"{module}.weight_zero_point"):
            zeros = unpacked(tensors(f"{module}.weight_zero_point").T.contiguous(), bits).T[: len(codes)]
        groups = tensors(f"{module}.weight_g_idx") if tensors.has(f"{module}.weight_g_idx") else None
        order = sorted_inputs(groups, scales.shape[1], module)
        if order is not None:
            codes = codes[:, order]
        return int4_weight(codes, scales, zeros, order) if bits == 4 else dense(codes, scales, zeros, order)
