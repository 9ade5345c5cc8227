"""AWQ checkpoints, in the layout of its `gemm` kernels (Lin et al., arXiv 2306.00978; written by AutoAWQ and others).

    qweight  int32 [in, out / 8]      qzeros  int32 [groups, out / 8]      scales  float16 [groups, out]

A word holds the codes of eight neighbouring outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits up.
W[o, i] = (code - zero) * scale.
"""

from __future__ import annotations

from typing import Any

import torch

from rungway.engine.checkpoint_bits import int4_weight, require, unpacked
from rungway.engine.stored import Int4Weight
from rungway.engine.weights import DirectoryWeights

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the code of each output lies


class Awq:
    form = "int4"

    def __init__(self, config: dict[str, Any]) -> None:
        require(config, "AWQ", "bits", (4,), 4)
        require(config, "AWQ", "version", ("gemm", "GEMM"), "gemm")
        require(config, "AWQ", "zero_point", (True,), True)

    def read(self, tensors: DirectoryWeights, module: str) -> Int4Weight | None:
        if not tensors.has(f"{module}.qweight"):
            return None
        codes, zeros = (_outputs_in_order(tensors(f"{module}.{name}")) for name in ("qweight", "qzeros"))
        return int4_weight(codes.T, tensors(f"{module}.scales").T, zeros.T)


def _outputs_in_order(words: torch.Tensor) -> torch.Tensor:
    """[rows, out / 8] -> codes [rows, out]."""
    codes = unpacked(words, 4).view(words.shape[0], -1, 8)
    return codes[:, :, list(_PLACES)].view(words.shape[0], -1)
