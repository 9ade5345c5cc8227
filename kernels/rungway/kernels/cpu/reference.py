"""The CPU kernels' formulae in plain torch: what tests compare with. Attention, rotation and norms are those of
rungway.kernels.reference and attention_reference."""

from __future__ import annotations

import torch

PEAK = 127.0


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in 8 bits: scale = max |x| / 127, code = round(x / scale); a row of zeros has scale 0 and codes 0.

    `x` [rows, size] float32. Returns int8 codes and scales [rows, 1]. Source: dynamic per-token quantisation as in Yao et
    al., ZeroQuant, arXiv 2206.01861.
    """
    peaks = x.abs().amax(-1, keepdim=True)
    by = torch.where(peaks > 0, PEAK / peaks, 0.0)
    return (x * by).round().to(torch.int8), peaks / PEAK


def linear_codes(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y = (codes_x codes^T) * scale_x * scales + bias, the product of codes summed as integers.

    `x` [rows, in], `codes` [out, in] int8, `scales` and `bias` [out]. Returns float32 [rows, out].
    """
    own, by = encode(x)
    y = (own.long() @ codes.long().T).float() * by * scales
    return y if bias is None else y + bias


def linear_nibbles(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = scale_x * sum over groups of scales * (codes_x (codes - zeros)^T) + bias; each group's product of codes summed as
    integers.

    `x` [rows, in], `codes` 0..15 [out, in], `scales` and `zeros` [out, groups], `bias` [out]. Returns float32 [rows, out].
    """
    own, by = encode(x)
    groups, group = scales.shape[1], codes.shape[1] // scales.shape[1]
    weights = (codes.view(-1, groups, group) - zeros[:, :, None]).double()
    parts = torch.einsum("rgi,ogi->rog", own.double().view(-1, groups, group), weights)
    y = ((parts * scales.double()).sum(2) * by.double()).float()
    return y if bias is None else y + bias


def linear_halves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + b with both factors rounded to bfloat16 and sums in float32. `weight` [out, in]."""
    y = x.bfloat16().float() @ weight.bfloat16().float().T
    return y if bias is None else y + bias
