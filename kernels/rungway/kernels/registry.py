"""Every kernel under one name: formula, reference, Triton implementation, cases. Importing this needs no Triton."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rungway.kernels import attention_reference, cases, layouts, reference, sampling_reference
from rungway.kernels.case import Case

Function = Callable[..., Any]


class KernelError(RuntimeError):
    """A CUDA device is asked for and Triton is not installed."""


@dataclass(frozen=True)
class Kernel:
    """`module` holds the Triton function of the same name; it is imported on first use. `writes`: places of the arguments
    that are changed as well."""

    name: str
    module: str
    reference: Function
    small: list[Case]
    large: list[Case]
    writes: tuple[int, ...] = ()

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


_ATTENTION = attention_reference.paged_attention
_SOURCES: dict[str, tuple[str, Function]] = {
    "rms_norm": ("rms_norm", reference.rms_norm),
    "rope": ("rope", reference.rope),
    "rope_kv": ("rope_kv", reference.rope_kv),
    "swiglu": ("glu", reference.swiglu),
    "geglu": ("glu", reference.geglu),
    "paged_decode_attention": ("decode_attention", _ATTENTION),
    "paged_prefill_attention": ("prefill_attention", _ATTENTION),
    "int8_linear": ("weight_only", layouts.int8_linear),
    "int4_linear": ("weight_only", layouts.int4_linear),
    "fp8_linear": ("weight_only", layouts.fp8_linear),
    "sample": ("sampling", sampling_reference.sample),
}
_WRITES = {"rope_kv": (4, 5)}

KERNELS: dict[str, Kernel] = {
    name: Kernel(name, module, formula, cases.SMALL[name], cases.LARGE[name], _WRITES.get(name, ()))
    for name, (module, formula) in _SOURCES.items()
}


def get(name: str, device: torch.device | str) -> Function:
    """The function to call for tensors on `device`: Triton on CUDA, the reference elsewhere. Raises KeyError for an
    unknown name and KernelError where Triton is missing."""
    kernel = KERNELS[name]
    return kernel.triton() if torch.device(device).type == "cuda" else kernel.reference
