"""Which GPU a tensor lies on, for the tables of configurations."""

from __future__ import annotations

import functools

import torch


def architecture(tensor: torch.Tensor) -> int:
    """80 for compute capability 8.0, 90, 100 and so on; 90 where there is no GPU (the interpreter)."""
    return _of(tensor.device)


@functools.cache
def _of(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
