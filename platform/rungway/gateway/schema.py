"""The request bodies that inference routes accept, decoded in one pass with strict types.

A field is served (typed below), harmless (accepted, without any effect on the answer), or refused: a field known to the
OpenAI API but not served here is typed `None`, so that an explicit null passes and any value is an error that names the
field. Everything else is an unknown field, and an error too, because silently dropping a constraint is worse.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw, Struct

from rungway.errors import RequestError
from rungway.gateway.schema_tools import MessageCall, ResponseFormat, StructuredOutputs, ToolChoice, ToolEntry
from rungway.outcomes import Code

_NULL = Raw(b"null")


class Part(Struct):
    """One element of a message's content list; only `type: text` is served."""

    type: str
    text: str | None = None


class Message(Struct, forbid_unknown_fields=True):
    """One turn. The fields after `name` appear as nulls when a client sends an assistant's answer back."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[object] | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    audio: None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Options(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints share. Ranges are checked in read.py; here are the types."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    best_of: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # harmless: no effect on the answer, never stored, never a label
    user: str | None = None
    metadata: Raw = _NULL
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # refused
    functions: None = None
    function_call: None = None


class ChatBody(Options, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolEntry] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    audio: None = None
    modalities: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None
    echo: None = None
    suffix: None = None


class CompletionBody(Options, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: None = None
    tools: None = None
    tool_choice: None = None
    parallel_tool_calls: None = None


class EmbeddingBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None  # harmless
    # refused
    messages: None = None
    truncation_side: None = None
    stream: None = None


HARMLESS = (
    "stream",
    "stream_options",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
)

_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)
_EMBEDDING = msgspec.json.Decoder(EmbeddingBody)
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"(?:unknown|missing required) field `(?P<field>[^`]*)`")
_MALFORMED = re.compile(r"^(JSON is malformed: |Input data was )")
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_SHOWN_MAX = 64


def decode_chat(body: bytes) -> ChatBody:
    """Raises RequestError `invalid_request` naming the field."""
    try:
        return _CHAT.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _explain(error, body) from None


def decode_completion(body: bytes) -> CompletionBody:
    """Raises RequestError `invalid_request` naming the field."""
    try:
        return _COMPLETION.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _explain(error, body) from None


def decode_embedding(body: bytes) -> EmbeddingBody:
    """Raises RequestError `invalid_request` naming the field."""
    try:
        return _EMBEDDING.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _explain(error, body) from None


def bad(param: str | None, message: str) -> RequestError:
    """A 400 `invalid_request` about one field."""
    return RequestError(Code.INVALID_REQUEST, message, param=param)


def shown(text: str) -> str:
    """`text` fit to be quoted in an error message: short and printable."""
    short = text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "..."
    return short.encode("unicode_escape").decode("ascii")


def _explain(error: Exception, body: bytes) -> RequestError:
    if not body.strip():
        return bad(None, "the body is empty; a JSON object is needed")
    if isinstance(error, RecursionError):
        return bad(None, "the body is nested too deeply")
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        why = "half of a surrogate pair" if _HALF_PAIR.search(body) else _MALFORMED.sub("", text)
        return bad(None, f"the body is not valid JSON: {why}")
    found = _PATH.search(text)
    path = found["path"] if found else ""
    reason = text[: found.start()] if found else text
    field = _FIELD.search(reason)
    if field is not None:
        param = f"{path}.{field['field']}" if path else field["field"]
        kind = "unknown field" if "unknown" in reason else "missing field"
        return bad(shown(param), f"{kind} '{shown(param)}'")
    if reason.startswith("Expected `null`"):
        return bad(path, f"'{path}' is not supported in this version")
    if not path:
        return bad(None, "the body must be a JSON object")
    return bad(path, f"'{path}': {reason[0].lower()}{reason[1:].replace('`', '')}")
