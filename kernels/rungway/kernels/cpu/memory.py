"""Memory for what is read from end to end in every step: in huge pages where the system gives them.

With small pages, a guest system spends as much time on finding pages as on reading them: weights streamed at 15 GB/s
instead of 28 on the machine where this was measured.
"""

from __future__ import annotations

import math
import mmap
import threading

import torch

_HUGE = 2 << 20
_CHUNK = 16 * _HUGE  # many layers are smaller than a page: they share mappings of this size
_LINE = 64
_lock = threading.Lock()
_left: list[torch.Tensor] = []  # what of the last mapping is still free, as bytes


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros. Its mapping is given back when all tensors in it are gone."""
    size = -(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE
    with _lock:
        if not _left or len(_left[0]) < size:
            fresh = _mapping(max(size, _CHUNK))
            if len(fresh) > size:
                _left[:] = [fresh]
            else:
                return _shaped(fresh, shape, dtype)
        (free,) = _left
        _left[:] = [free[size:]]
    return _shaped(free[:size], shape, dtype)


def _shaped(part: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return part[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _mapping(size: int) -> torch.Tensor:
    """At least `size` bytes of zeros that begin on a huge page."""
    size = -(-size // _HUGE) * _HUGE
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones get small pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # holds on to the mapping
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + size]
