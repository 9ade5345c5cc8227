"""From what a request demands of its answer to a grammar that can be enforced token by token; no vocabulary yet.

The rule of this module: a demand is enforced in full or refused by name. JSON Schema keywords outside `ENFORCED` and
`NOTES` are refused here; the grammar library (llguidance) refuses what it cannot do within those, such as an overlapping
`oneOf`. JSON is written in one fixed form (`, ` and `: `, no other white space): a model that may write blanks anywhere can
write them for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, regex_to_lark

from rungway.engine.protocol import Constraint

TEXT_BYTES_MAX = 131_072
INVALID = "invalid_schema: "
DEAD_END = "dead_end: no token may follow under what the request demands"
CALLS_MAX = 16
_DEPTH_MAX = 64
_CHOICES_MAX = 1024
# Places in a grammar that the client did not write, and options of the library that nobody can set from outside.
_NOISE = re.compile(r"^at 1\(\d+\): (failed to compile JSON schema: )?|\. Enable '\w+' option .*$")
ENFORCED = frozenset(
    [
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "definitions",
        "$id",
        "$anchor",
    ]
)
NOTES = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$comment",
        "$schema",
    ]
)
_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
_ONE = ("additionalProperties", "items", "additionalItems")  # each holds one schema
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
# Per mask about 7 ms for the lexer and 1 ms for the parser at worst, on the thread of the step loop, as long as little text
# is forced (guides.py). What a grammar may take at its beginning bounds how long it compiles.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=100_000, step_max_items=20_000, verbose_errors=False
)
_OPTIONS = "%llguidance"
_ENDLESS = "NoExtensionBias"  # the library's only word on a rule that has no end
_ANYTHING = {"type": "object"}


class ConstraintError(ValueError):
    """A demand that makes no sense or cannot be enforced; the text is for the one who made it."""


class Tool(msgspec.Struct, frozen=True):
    """One function that the model may call; `parameters` is the JSON Schema of its arguments."""

    name: str
    parameters: dict[str, Any] = {}


class Tools(msgspec.Struct, frozen=True):
    """`must`: the answer consists of calls; else it may be text, or text that ends in calls. At most `most` calls. `answer`:
    a JSON Schema that an answer without calls has to fit, None = any text.

    A call is `<tool_call>`, newline, `{"name": ..., "arguments": {...}}`, newline, `</tool_call>` (Hermes' and Qwen's
    form); several are apart by a newline.
    """

    tools: tuple[Tool, ...]
    must: bool = False
    most: int = CALLS_MAX
    answer: dict[str, Any] | None = None


_TOOLS = msgspec.json.Decoder(Tools)


def grammar_text(constraint: Constraint, bytes_max: int = TEXT_BYTES_MAX) -> str:
    """The grammar in Lark's form with llguidance's additions; not compiled. Raises ConstraintError."""
    try:
        size = len(constraint.text.encode())
    except UnicodeEncodeError:
        raise ConstraintError("it holds half of a surrogate pair, which no text can") from None
    if size > bytes_max:
        raise ConstraintError(f"it is longer than {bytes_max} bytes")
    match constraint.kind:
        case "json_schema":
            return "start: " + _json(_object(constraint.text))
        case "json_object":
            return "start: " + _json(_ANYTHING)
        case "regex":
            return f"start: /{_regex(constraint.text)}/"
        case "choice":
            return "start: " + " | ".join(map(_literal, _choices(constraint.text)))
        case "grammar":
            return _lark(constraint.text)
        case "tools":
            return _tools(read_tools(constraint.text))


def unforced(grammar: str) -> str:
    """The same grammar, without the library's writing ahead of what can only come as it is; for a `grammar_text`."""
    return f'{_OPTIONS} {{"no_forcing": true}}\n{grammar}'


def check(constraint: Constraint, bytes_max: int = TEXT_BYTES_MAX) -> None:
    """Compiles without a vocabulary, in about a millisecond for an ordinary schema. Raises ConstraintError."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar_text(constraint, bytes_max), None, limits=LIMITS)
    if wrong:
        raise ConstraintError(clean(messages[0]))
    if constraint.kind == "grammar" and messages:
        # Only what needs a vocabulary is warned of: special tokens, which are the platform's and not the client's.
        raise ConstraintError("a grammar must not name special tokens")


def clean(message: str) -> str:
    """The library's complaint on one line, without its drawing of the place."""
    if _ENDLESS in message:
        return "no text that ends can fit it"
    lines = [line.strip() for line in message.splitlines() if "|" not in line and line.strip(" ^~")]
    return _NOISE.sub("", " ".join(lines))[:300] or "it does not compile"


def read_tools(text: str) -> Tools:
    """Raises ConstraintError."""
    try:
        tools = _TOOLS.decode(text.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConstraintError(f"the tools cannot be read: {error}") from None
    if not tools.tools or not 1 <= tools.most <= CALLS_MAX:
        raise ConstraintError(f"tools need at least one tool and 1 to {CALLS_MAX} calls")
    return tools


def check_schema(schema: object) -> None:
    """Refuses, by name, keywords that would not be enforced. Raises ConstraintError."""
    if not isinstance(schema, dict):
        raise ConstraintError("a schema must be a JSON object")
    waiting: list[tuple[object, int]] = [(schema, 0)]
    while waiting:
        part, depth = waiting.pop()
        if depth > _DEPTH_MAX:
            raise ConstraintError(f"a schema is at most {_DEPTH_MAX} levels deep")
        if isinstance(part, dict):
            for keyword in part:
                if keyword not in ENFORCED and keyword not in NOTES and not keyword.startswith("x-"):
                    raise ConstraintError(f"the schema's keyword '{keyword[:64]}' cannot be enforced")
            if "x-guidance" in part:
                raise ConstraintError("the schema's keyword 'x-guidance' cannot be enforced")
            waiting += [(below, depth + 1) for below in _below(part)]


def _below(schema: dict[str, Any]) -> Iterator[object]:
    for keyword in _ONE:
        value = schema.get(keyword)
        yield from value if isinstance(value, list) else (value,)
    for keyword in _LISTS:
        value = schema.get(keyword)
        yield from value if isinstance(value, list) else ()
    for keyword in _MAPS:
        value = schema.get(keyword)
        yield from value.values() if isinstance(value, dict) else ()


def _object(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise ConstraintError("the schema is not valid JSON") from None
    if not isinstance(schema, dict):
        raise ConstraintError("a schema must be a JSON object")
    return schema


def _json(schema: dict[str, Any]) -> str:
    check_schema(schema)
    return "%json " + json.dumps({**schema, "x-guidance": _FORM}, ensure_ascii=True)


def _literal(text: str) -> str:
    return json.dumps(text)  # escapes whatever is not ASCII; and what the library's reader refuses as it is


def _regex(text: str) -> str:
    """Between slashes. A last backslash would take the closing one's meaning."""
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ConstraintError("the expression ends in a backslash")
    return str(regex_to_lark(text, ""))


def _lark(text: str) -> str:
    if text.lstrip().startswith("{"):
        raise ConstraintError("a grammar must be in Lark's form")
    if _OPTIONS in text:
        raise ConstraintError("a grammar must not set options of the library")
    return text


def _choices(text: str) -> list[str]:
    try:
        choices = msgspec.json.decode(text.encode("utf-8", "surrogatepass"), type=list[str])
    except msgspec.DecodeError:
        raise ConstraintError("choices must be a list of strings") from None
    if not 1 <= len(choices) <= _CHOICES_MAX or not all(choices):
        raise ConstraintError(f"there must be 1 to {_CHOICES_MAX} choices, none of them empty")
    return choices


def _arguments(tool: Tool) -> dict[str, Any]:
    """Arguments are an object, and none where no parameters are declared."""
    if not tool.parameters:
        return {**_ANYTHING, "additionalProperties": False}
    if tool.parameters.get("type", "object") != "object":
        raise ConstraintError(f"the parameters of tool '{tool.name}' must be of type object")
    return {**tool.parameters, **_ANYTHING}


def _tools(tools: Tools) -> str:
    """Text is lazy: it ends where the opening tag is whole, and from there on only a call may follow."""
    lines = []
    for at, tool in enumerate(tools.tools):
        head = '{"name": ' + json.dumps(tool.name) + ', "arguments": '
        lines.append(f'f{at}: {_literal(head)} {_json(_arguments(tool))} "}}"')
    names = " | ".join(f"f{at}" for at in range(len(tools.tools)))
    lines.append(f'rest: "\\n" ({names}) "\\n</tool_call>"')
    more = f'("\\n<tool_call>" rest){{0,{tools.most - 1}}}' if tools.most > 1 else ""
    if tools.must:
        lines.append(f'start: "<tool_call>" rest {more}')
    elif tools.answer is not None:
        lines.append(f'start: answer | "<tool_call>" rest {more}')
        lines.append(f"answer: {_json(tools.answer)}")
    else:
        lines.append(f"start: TEXT | opening rest {more}")
        lines.append('opening[lazy]: TEXT "<tool_call>"')
        lines.append("TEXT: /(.|\\n)*/")
    return "\n".join(lines) + "\n"
