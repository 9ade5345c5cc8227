"""Reads the tensors of a model directory one at a time; a sharded model is found through its index file or by glob."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rungway.engine.errors import ModelError


class DirectoryWeights:
    """Callable by tensor name; raises KeyError for a name that no file holds."""

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{path} holds no *.safetensors file")
        try:
            self._files: list[Any] = [safe_open(str(file), framework="pt") for file in files]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the weights in {path} cannot be read: {error}") from error
        self.nbytes = sum(file.stat().st_size for file in files)
        self._where: dict[str, Any] = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def has(self, name: str) -> bool:
        return name in self._where

    def __call__(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)  # type: ignore[no-any-return]


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ModelError."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path / 'config.json'}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path / 'config.json'} does not hold a JSON object")
    return config
