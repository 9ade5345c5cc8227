"""GPTQ checkpoints (Frantar et al., arXiv 2210.17323; written by AutoGPTQ, GPTQModel and others), 4 and 8 bits.

    qweight  int32 [in * bits / 32, out]         the codes of neighbouring inputs share a word, lowest bits first
    qzeros   int32 [groups, out * bits / 32]     neighbouring outputs share a word; in the format `gptq` one less than
                                                 the zero is stored, in `gptq_v2` the zero itself
    scales   float16 [groups, out]
    g_idx    int32 [in]                          the group of each input; with `desc_act` not in order

W[o, i] = (code - zero) * scale. Of 4 bits the codes are kept; 8 bits are dequantised.
"""

from __future__ import annotations

from typing import Any

import torch

from rungway.engine.checkpoint_bits import dense, int4_weight, require, sorted_inputs, unpacked
from rungway.engine.errors import ModelError
from rungway.engine.stored import Int4Weight
from rungway.engine.weights import DirectoryWeights


class Gptq:
    def __init__(self, config: dict[str, Any]) -> None:
        self._bits = int(require(config, "GPTQ", "bits", (4, 8), None))
        require(config, "GPTQ", "pack_dtype", ("int32",), "int32")
        require(config, "GPTQ", "is_marlin_format", (False,), False)
        layout = require(config, "GPTQ", "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        if config.get("dynamic"):
            raise ModelError("GPTQ weights with settings of their own for some layers (`dynamic`) are not supported")
        self._zero_offset = 1 if layout == "gptq" else 0
        self.form = "int4" if self._bits == 4 else "dense"

    def read(self, tensors: DirectoryWeights, module: str) -> Int4Weight | torch.Tensor | None:
        if not tensors.has(f"{module}.qweight"):
            return None
        scales = tensors(f"{module}.scales").T
        codes = unpacked(tensors(f"{module}.qweight").T.contiguous(), self._bits)
        zeros = unpacked(tensors(f"{module}.qzeros"), self._bits).T.float() + self._zero_offset
        if scales.shape != zeros.shape or codes.shape[0] != scales.shape[0] or codes.shape[1] % scales.shape[1]:
            raise ModelError(f"the tensors of {module} do not fit together")
        groups = tensors(f"{module}.g_idx") if tensors.has(f"{module}.g_idx") else None
        order = sorted_inputs(groups, scales.shape[1], module)
        if order is not None:
            codes = codes[:, order]
        return int4_weight(codes, scales, zeros, order) if self._bits == 4 else dense(codes, scales, zeros, order)
