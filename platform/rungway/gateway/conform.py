"""Does a finished answer fit what was demanded? Asked after the fact, by other code than the one that enforced it.

JSON is parsed and checked with `jsonschema`, calls are read as the client will get them. `pattern` and `patternProperties` are
left to the grammar: Python's `re` takes exponential time for some expressions, and they are the client's. Expressions and
grammars of the client's are not run again for the same reason.
"""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from rungway.engine.constraint import Tools, read_tools
from rungway.engine.protocol import Constraint
from rungway.gateway.tool_calls import read_calls


def _left_out(*_: Any) -> None:
    """A keyword that is not checked again."""


_Validator = extend(Draft202012Validator, {"pattern": _left_out, "patternProperties": _left_out})
_NOWHERE: Registry[Any] = Registry()  # retrieves nothing


def conforms(constraint: Constraint, text: str) -> bool:
    """For an answer that ended by itself."""
    match constraint.kind:
        case "json_object":
            return isinstance(_read(text), dict)
        case "json_schema":
            return _fits(text, json.loads(constraint.text))
        case "choice":
            return text in json.loads(constraint.text)
        case "tools":
            return _calls_fit(read_tools(constraint.text), text)
    return True


def _calls_fit(tools: Tools, text: str) -> bool:
    content, calls, _ = read_calls(text)
    if not calls:
        return not tools.must and (tools.answer is None or _fits(content, tools.answer))
    schemas = {tool.name: tool.parameters for tool in tools.tools}
    if len(calls) > tools.most or (content and (tools.must or tools.answer is not None)):
        return False
    return all(call.name in schemas and _fits(call.arguments, schemas[call.name]) for call in calls)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _fits(text: str, schema: dict[str, Any]) -> bool:
    value = _read(text)
    if value is _NOT_JSON:
        return False
    if "patternProperties" in json.dumps(schema):
        return True  # which members are additional ones depends on the client's expressions
    try:
        return bool(_Validator(schema, registry=_NOWHERE).is_valid(value))
    except (Unresolvable, RecursionError):
        return False


_NOT_JSON = object()
