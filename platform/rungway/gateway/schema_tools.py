"""The parts of a request body that constrain its answer: formats, tools, calls. Schemas stay as they were written (Raw), for
the order of their members decides the order in the answer."""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

NULL = Raw(b"null")


class SchemaFormat(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    definition: Raw = msgspec.field(default=NULL, name="schema")
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: str
    json_schema: SchemaFormat | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """Exactly one of them. `json` is a schema, as an object or as text."""

    json: Raw = NULL
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FunctionTool(Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None


class ToolEntry(Struct, forbid_unknown_fields=True):
    type: str
    function: FunctionTool | None = None


class NamedFunction(Struct, forbid_unknown_fields=True):
    name: str


class ToolChoice(Struct, forbid_unknown_fields=True):
    type: str
    function: NamedFunction | None = None


class CalledFunction(Struct):
    """`arguments` is JSON text. What a client's library added when it read the call does not matter."""

    name: str
    arguments: str


class MessageCall(Struct):
    """A call that an assistant's message made; a streamed one may still bear its index."""

    id: str
    function: CalledFunction
    type: str = "function"
