"""Which GPU a tensor lies on, for the tables of configurations."""

from __future__ import annotations

import torch


def architecture(tensor: torch.Tensor) -> int:
    """80 for compute capability 8.0, 90, 100 and so on; 90 where there is no GPU (the interpreter)."""
    if tensor.device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor
