"""What a request demands of the form of its answer: `response_format`, `structured_outputs`, and `tools` with their choice.

A demand is checked here, on a thread, in about a millisecond, before the controller hears of the request; the engine
checks again by itself. Whatever cannot be enforced is a 400 `invalid_schema` that names it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rungway.contracts import GatewaySpec
from rungway.engine.constraint import CALLS_MAX, ConstraintError, Tool, Tools, check
from rungway.engine.protocol import Constraint
from rungway.errors import RequestError
from rungway.gateway.schema import ChatBody, CompletionBody, bad
from rungway.gateway.schema_tools import NULL, FunctionTool, ToolChoice
from rungway.outcomes import Code

CHECKED_MAX = 1024
TOOLS_MAX = 128
_CHECKS_AT_A_TIME = 2
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(slots=True, frozen=True)
class Demand:
    """`constraint` for the engine and `param`, the field it comes from; `tools` for the chat template; `calling`: the
    answer's text may hold tool calls."""

    constraint: Constraint | None = None
    param: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    calling: bool = False


_FREE = Demand()


def demand_of(body: ChatBody | CompletionBody) -> Demand:
    """Reads the fields; nothing is compiled yet. Raises RequestError."""
    given = _structured(body) or _format(body)
    if isinstance(body, ChatBody):
        given = _with_tools(body, given) or given
    if given is None:
        return _FREE
    if given.constraint is not None and body.ignore_eos:
        raise bad("ignore_eos", f"'ignore_eos' cannot go with '{given.param}', which sets the end of the answer")
    if given.constraint is not None and body.min_tokens:
        raise bad("min_tokens", f"'min_tokens' cannot go with '{given.param}', which sets the end of the answer")
    return given


class Checks:
    """Demands that were checked before, and a few threads for new ones."""

    def __init__(self) -> None:
        self._known: OrderedDict[Constraint, str | None] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    async def check(self, demand: Demand, spec: GatewaySpec) -> None:
        """Raises RequestError `invalid_schema`."""
        constraint = demand.constraint
        if constraint is None:
            return
        if len(constraint.text.encode("utf-8", "surrogatepass")) > spec.constraint_bytes_max:
            raise _invalid(demand.param, f"it is longer than {spec.constraint_bytes_max} bytes")
        if constraint in self._known:
            self._known.move_to_end(constraint)
        else:
            self._known[constraint] = await self._reason(constraint, demand.param, spec.constraint_check_s)
            while len(self._known) > CHECKED_MAX:
                self._known.popitem(last=False)
        reason = self._known[constraint]
        if reason is not None:
            raise _invalid(demand.param, reason)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    async def _reason(self, constraint: Constraint, param: str, limit_s: float) -> str | None:
        """Why it cannot be enforced. A check that takes too long says nothing of the next try."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_CHECKS_AT_A_TIME, thread_name_prefix="constraint")
        try:
            checking = asyncio.get_running_loop().run_in_executor(self._pool, check, constraint)
            await asyncio.wait_for(checking, limit_s)
        except ConstraintError as error:
            return str(error)
        except TimeoutError:
            raise _invalid(param, f"checking it takes longer than {limit_s:g} s") from None
        return None


def _invalid(param: str, reason: str) -> RequestError:
    return RequestError(Code.INVALID_SCHEMA, f"'{param}' cannot be enforced: {reason}", param=param)


def _structured(body: ChatBody | CompletionBody) -> Demand | None:
    given = body.structured_outputs
    if given is None:
        return None
    if body.response_format is not None and body.response_format.type != "text":
        raise bad("structured_outputs", "'structured_outputs' and 'response_format' are both given")
    if isinstance(body, ChatBody) and body.tools:
        raise bad("structured_outputs", "'structured_outputs' cannot go with 'tools'; use 'response_format'")
    found: list[Constraint] = []
    if given.json != NULL:
        found.append(Constraint("json_schema", _schema_text(bytes(given.json))))
    if given.regex is not None:
        found.append(Constraint("regex", given.regex))
    if given.choice is not None:
        found.append(Constraint("choice", json.dumps(given.choice)))
    if given.grammar is not None:
        found.append(Constraint("grammar", given.grammar))
    if given.json_object is not None:
        if not given.json_object:
            raise bad("structured_outputs.json_object", "'structured_outputs.json_object' can only be true")
        found.append(Constraint("json_object"))
    if len(found) != 1:
        raise bad(
            "structured_outputs", "'structured_outputs' takes exactly one of json, regex, choice, grammar, json_object"
        )
    return Demand(found[0], "structured_outputs")


def _schema_text(raw: bytes) -> str:
    """A schema may also come as a JSON string that holds it."""
    if raw[:1] == b'"':
        return str(msgspec.json.decode(raw))
    return raw.decode("utf-8", "replace")


def _format(body: ChatBody | CompletionBody) -> Demand | None:
    given = body.response_format
    if given is None:
        return None
    match given.type:
        case "text":
            return None
        case "json_object":
            return Demand(Constraint("json_object"), "response_format")
        case "json_schema":
            if given.json_schema is None or given.json_schema.definition == NULL:
                raise bad("response_format.json_schema", "'response_format.json_schema' needs a name and a 'schema'")
            text = bytes(given.json_schema.definition).decode("utf-8", "replace")
            return Demand(Constraint("json_schema", text), "response_format")
    raise bad("response_format.type", "'response_format.type' must be text, json_object or json_schema")


def _with_tools(body: ChatBody, given: Demand | None) -> Demand | None:
    """None where no tool may be called."""
    choice = body.tool_choice
    if body.tools is None:
        if choice is not None and choice != "none":
            raise bad("tool_choice", "'tool_choice' needs 'tools'")
        if body.parallel_tool_calls is not None:
            raise bad("parallel_tool_calls", "'parallel_tool_calls' needs 'tools'")
        return None
    if not 1 <= len(body.tools) <= TOOLS_MAX:
        raise bad("tools", f"'tools' takes 1 to {TOOLS_MAX} tools")
    functions: dict[str, FunctionTool] = {}
    for i, entry in enumerate(body.tools):
        if entry.type != "function" or entry.function is None:
            raise bad(f"tools[{i}]", "only tools of type 'function' are supported")
        if _NAME.fullmatch(entry.function.name) is None:
            raise bad(f"tools[{i}].function.name", "a function's name has 1 to 64 letters, digits, '_' and '-'")
        if entry.function.name in functions:
            raise bad(f"tools[{i}].function.name", f"two tools are named '{entry.function.name}'")
        functions[entry.function.name] = entry.function
    if choice == "none":
        return None
    callable_, must = _choice(choice, functions)
    parameters = {name: _parameters(function, f"tools.{name}") for name, function in functions.items()}
    answer = None
    if given is not None and given.constraint is not None:
        answer = _object(given.constraint.text or '{"type": "object"}', given.param)
    tools = Tools(
        tools=tuple(Tool(name, parameters[name]) for name in callable_),
        must=must,
        most=1 if body.parallel_tool_calls is False else CALLS_MAX,
        answer=answer,
    )
    constraint = Constraint("tools", msgspec.json.encode(tools).decode())
    listed = [_listed(function, parameters[name]) for name, function in functions.items()]
    return Demand(constraint, "tools", listed, calling=True)


def _choice(choice: str | ToolChoice | None, functions: dict[str, FunctionTool]) -> tuple[list[str], bool]:
    """The functions that may be called, and whether one has to be."""
    if isinstance(choice, ToolChoice):
        name = choice.function.name if choice.type == "function" and choice.function is not None else None
        if name is None:
            raise bad("tool_choice", '\'tool_choice\' as an object names a function: {"type": "function", ...}')
        if name not in functions:
            raise bad("tool_choice", "'tool_choice' names a function that is not in 'tools'")
        return [name], True
    if choice not in (None, "auto", "required"):
        raise bad("tool_choice", "'tool_choice' must be none, auto, required or a named function")
    return list(functions), choice == "required"


def _object(text: str, param: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _invalid(param, "the schema is not valid JSON") from None
    if not isinstance(value, dict):
        raise _invalid(param, "a schema must be a JSON object")
    return value


def _parameters(function: FunctionTool, param: str) -> dict[str, Any]:
    return {} if function.parameters == NULL else _object(bytes(function.parameters).decode("utf-8", "replace"), param)


def _listed(function: FunctionTool, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat templates expect it."""
    shape: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        shape["description"] = function.description
    shape["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": shape}
