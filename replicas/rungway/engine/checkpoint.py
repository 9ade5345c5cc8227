"""Opens the weights of a model directory, plain or quantised; what config.json says of them decides how they are read.

Which layers are quantised is seen from the tensors that are there, not from lists of names: a checkpoint leaves a layer
plain by storing a plain `weight` for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from rungway.engine.checkpoint_awq import Awq
from rungway.engine.checkpoint_compressed import Compressed
from rungway.engine.checkpoint_fp8 import Fp8
from rungway.engine.checkpoint_gptq import Gptq
from rungway.engine.errors import ModelError
from rungway.engine.stored import Int4Weight, Stored
from rungway.engine.weights import DirectoryWeights

_WEIGHT = ".weight"


class Scheme(Protocol):
    """How one kind of checkpoint stores a layer. `form`: int4 | fp8 | dense, what its layers can be kept in."""

    form: str

    def read(self, tensors: DirectoryWeights, module: str) -> Stored | torch.Tensor | None:
        """The weight [out, in] of a module; a plain tensor (float32) where no layer computes with its bits; None where the
        checkpoint has it plain. Raises ModelError for a layout that it does not know."""
        ...


_SCHEMES: dict[str, Callable[[dict[str, Any]], Scheme]] = {
    "awq": Awq,
    "gptq": Gptq,
    "fp8": Fp8,
    "fbgemm_fp8": Fp8,
    "compressed-tensors": Compressed,
}


class QuantisedWeights:
    """Callable by tensor name like plain weights, dequantising as it goes; `stored` gives the bits themselves."""

    def __init__(self, tensors: DirectoryWeights, scheme: Scheme) -> None:
        self._tensors = tensors
        self._scheme = scheme
        self.form = scheme.form

    def __call__(self, name: str) -> torch.Tensor:
        """Raises KeyError for a name that no file holds, even in another form."""
        module = name.removesuffix(_WEIGHT)
        found = self._read(module) if module != name else None
        if found is None:
            return self._tensors(name)
        return found if isinstance(found, torch.Tensor) else found.dense()

    def stored(self, module: str) -> Stored | None:
        found = self._read(module)
        return None if isinstance(found, torch.Tensor) else found

    def _read(self, module: str) -> Stored | torch.Tensor | None:
        found = self._scheme.read(self._tensors, module)
        if isinstance(found, Int4Weight):
            rows, columns = found.shape
            fits = found.scales.shape == found.zeros.shape == (rows, columns // found.group)
            if not fits or columns % found.group or (found.order is not None and len(found.order) != columns):
                raise ModelError(f"the tensors of {module} do not fit together")
        return found


def open_weights(path: Path, config: dict[str, Any]) -> DirectoryWeights | QuantisedWeights:
    """The weights of a model directory. Raises ModelError where they cannot be read, or are quantised in a way that is not
    supported: it says which."""
    tensors = DirectoryWeights(path)
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return tensors
    method = quantisation.get("quant_method")
    if method not in _SCHEMES:
        raise ModelError(f"quantised weights of kind {method!r} are not supported (have: {', '.join(_SCHEMES)})")
    return QuantisedWeights(tensors, _SCHEMES[method](quantisation))
