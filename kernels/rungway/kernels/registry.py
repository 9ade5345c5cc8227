"""Every kernel under one name: formula, reference, Triton implementation, cases. Importing this needs no Triton."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rungway.kernels import cases, reference

Function = Callable[..., Any]


class KernelError(RuntimeError):
    """A CUDA device is asked for and Triton is not installed."""


@dataclass(frozen=True)
class Kernel:
    """`module` holds the Triton function of the same name; it is imported on first use."""

    name: str
    module: str
    reference: Function
    small: list[cases.Case]
    large: list[cases.Case]

    @property
    def formula(self) -> str:
        """What it computes, with shapes and source."""
        return self.reference.__doc__ or ""

    def triton(self) -> Function:
        """The Triton implementation. Raises KernelError where Triton is missing."""
        try:
            module = importlib.import_module(f"rungway.kernels.{self.module}")
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise KernelError(f"{self.name} on a GPU needs the package triton, which is not installed") from error
        function: Function = getattr(module, self.name)
        return function


_MODULES = {
    "rms_norm": "rms_norm",
    "rope": "rope",
    "swiglu": "swiglu",
    "paged_decode_attention": "paged_attention",
}

KERNELS: dict[str, Kernel] = {
    name: Kernel(name, module, getattr(reference, name), cases.SMALL[name], cases.LARGE[name])
    for name, module in _MODULES.items()
}


def get(name: str, device: torch.device | str) -> Function:
    """The function to call for tensors on `device`: Triton on CUDA, the reference elsewhere. Raises KeyError for an
    unknown name and KernelError where Triton is missing."""
    kernel = KERNELS[name]
    return kernel.triton() if torch.device(device).type == "cuda" else kernel.reference
