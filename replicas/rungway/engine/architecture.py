"""config.json -> what the model code needs to know. A family that is not listed, or asks for a variant that is not
implemented, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rungway.engine.errors import ModelError
from rungway.engine.families import deepseek, dense, sparse
from rungway.engine.families.spec import Architecture

__all__ = ["FAMILIES", "Architecture", "read_architecture"]

FAMILIES: dict[str, Callable[[dict[str, Any]], Architecture]] = {
    "llama": dense.llama,
    "mistral": dense.mistral,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "gemma3_text": dense.gemma3,
    "mixtral": sparse.mixtral,
    "qwen2_moe": sparse.qwen2_moe,
    "qwen3_moe": sparse.qwen3_moe,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
}


def read_architecture(config: dict[str, Any]) -> Architecture:
    """Raises ModelError where the model uses something that is not implemented, rather than run it wrongly."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"model type {family!r} is not supported (have: {', '.join(FAMILIES)})")
    try:
        return FAMILIES[family](config)
    except KeyError as error:
        raise ModelError(f"config.json has no {error}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"config.json cannot be read as {family}: {error}") from error
