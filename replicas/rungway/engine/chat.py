"""Renders a model's chat template (Jinja) and keeps what people wrote from becoming control tokens.

`shield` breaks every special-token literal inside message values with GUARD, a Unicode noncharacter that no text needs;
the tokenizer recognises special tokens only in what the template itself wrote and drops GUARD from the rest. So
`<|im_end|>` typed by a user is spelled out in ordinary tokens and can neither end a turn nor open a system turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rungway.engine.errors import ModelError, PromptError

GUARD = "\ufdd1"


def shield(text: str, specials: re.Pattern[str] | None, literals: Sequence[str]) -> str:
    """`text` with GUARD inside each special literal, and at its ends where it could complete one with a neighbour."""
    if specials is None or not text:
        return text
    shielded = specials.sub(lambda match: match[0][0] + GUARD + match[0][1:], text)
    for literal in literals:
        if any(shielded.endswith(literal[:size]) for size in range(1, len(literal))):
            shielded += GUARD
        if any(shielded.startswith(literal[size:]) for size in range(1, len(literal))):
            shielded = GUARD + shielded
    return shielded


def shield_all(value: Any, specials: re.Pattern[str] | None, literals: Sequence[str]) -> Any:
    """`shield` on every string of a JSON-like value, names of members included."""
    if isinstance(value, str):
        return shield(value, specials, literals)
    if isinstance(value, list):
        return [shield_all(item, specials, literals) for item in value]
    if isinstance(value, dict):
        return {shield(name, specials, literals): shield_all(item, specials, literals) for name, item in value.items()}
    return value


class ChatTemplate:
    """A compiled template, in the sandbox and with the options that templates are written for (as in transformers).
    `takes_tools`: it says something of `tools` by itself."""

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        """`variables`: bos_token and the like. Raises ModelError when the template does not compile."""
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise
        self._variables = variables
        try:
            self._template = env.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(env.parse(source))
        except TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt up to and including the assistant's opening. Raises PromptError when the template refuses."""
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=True, **self._variables)
        except (TemplateError, TypeError, KeyError) as error:
            raise PromptError(f"the chat template refuses these messages: {error}") from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
