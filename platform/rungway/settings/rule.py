"""A `Rule` says in words what a field allows and reads its value; it is put on a field with `Annotated`.

The words stand in every message about a wrong value and in docs/configuration.md, so that the three cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

NULL_TEXT = "null is not a value: leave the key out for the default, write 0 for nothing allowed"
NULL_OR_UNLIMITED = f"{NULL_TEXT} or `unlimited` for no limit"


@dataclass(frozen=True)
class Names:
    """Names that fields may refer to. None = not known because that part of the file is broken: do not check."""

    tiers: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    rungs: tuple[str, ...] | None = None
    plans: tuple[str, ...] | None = None
    tenants: tuple[str, ...] | None = None

    def of(self, kind: str) -> tuple[str, ...] | None:
        names: tuple[str, ...] | None = getattr(self, kind)
        return names


@dataclass(frozen=True)
class Rule:
    """What a field allows, in words (`allowed`), and how to read it. `secret`: never repeat the value in a message."""

    allowed: str
    parse: Callable[[Any, Names], Any]
    secret: bool = False
    null_ok: bool = False
    unlimited: bool = False
    names: str = ""  # which names of `Names` the value refers to

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._validate)

    def _validate(self, value: Any, info: core_schema.ValidationInfo[Any]) -> Any:
        if value is None:
            if self.null_ok:
                return None
            text = NULL_OR_UNLIMITED if self.unlimited else NULL_TEXT
            raise PydanticCustomError("rungway", "{text} (allowed: {allowed})", {"text": text, "allowed": self.allowed})
        try:
            return self.parse(value, info.context if isinstance(info.context, Names) else Names())
        except ValueError as error:
            what = str(error) or ("this value is not allowed" if self.secret else f"{show(value)} is not allowed")
            raise PydanticCustomError(
                "rungway", "{text} (allowed: {allowed})", {"text": what, "allowed": self.allowed}
            ) from None


def show(value: Any) -> str:
    """A value in a message: short, as it would stand in YAML."""
    text = "true" if value is True else "false" if value is False else repr(value)
    if isinstance(value, dict | list):
        text = "a mapping" if isinstance(value, dict) else "a list"
    return text if len(text) <= 40 else f"{text[:36]}..."


def close(word: str, allowed: tuple[str, ...]) -> str:
    match = get_close_matches(word, allowed, 1)
    return f"; did you mean `{match[0]}`?" if match else ""
