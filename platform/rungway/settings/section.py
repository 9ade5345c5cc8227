"""The base of every mapping in a settings file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A mapping in a file: unknown keys are mistakes and nothing is converted silently."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def refuse(at: str, message: str) -> PydanticCustomError:
    """A mistake between fields, placed on the key `at`."""
    return PydanticCustomError("rungway", "{text}", {"text": message, "at": at})
