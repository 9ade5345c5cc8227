"""Chat messages: which roles may say what, and how they go to the chat template."""

from __future__ import annotations

from typing import Any

import msgspec

from rungway.gateway.prompts import Prompt
from rungway.gateway.schema import Message, bad, shown

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def chat_prompt(given: list[Message], tools: list[dict[str, Any]]) -> Prompt:
    """Raises RequestError naming the message."""
    if not given:
        raise bad("messages", "'messages' must hold at least one message")
    messages: list[dict[str, Any]] = []
    called: set[str] = set()
    for i, message in enumerate(given):
        role = _ROLES.get(message.role)
        if role is None:
            old = "function messages are not supported; send role 'tool'" if message.role == "function" else ""
            raise bad(f"messages[{i}].role", old or f"there is no role '{shown(message.role)}'")
        turn: dict[str, Any] = {"role": role}
        if message.tool_calls is not None:
            turn["tool_calls"] = _calls(message, i, called)
        if role == "tool":
            if message.tool_call_id is None:
                raise bad(f"messages[{i}].tool_call_id", "a tool message needs the 'tool_call_id' that it answers")
            if message.tool_call_id not in called:
                raise bad(f"messages[{i}].tool_call_id", "no message before this one made that call")
        elif message.tool_call_id is not None:
            raise bad(f"messages[{i}].tool_call_id", "only tool messages have a 'tool_call_id'")
        turn["content"] = _content(message, i, empty_ok="tool_calls" in turn)
        messages.append(turn)
    return Prompt(messages=messages, tools=tools)


def _calls(message: Message, i: int, called: set[str]) -> list[dict[str, Any]]:
    """Arguments become objects, for templates write them out as JSON themselves."""
    if message.role != "assistant":
        raise bad(f"messages[{i}].tool_calls", "only assistant messages make tool calls")
    if not message.tool_calls:
        raise bad(f"messages[{i}].tool_calls", "'tool_calls' must not be empty; leave it out")
    calls: list[dict[str, Any]] = []
    for j, call in enumerate(message.tool_calls):
        path = f"messages[{i}].tool_calls[{j}]"
        if call.type != "function":
            raise bad(f"{path}.type", "only calls of type 'function' are supported")
        try:
            arguments = _OBJECT.decode(call.function.arguments.encode("utf-8", "surrogatepass"))
        except (msgspec.DecodeError, RecursionError):
            raise bad(f"{path}.function.arguments", "'arguments' must be a JSON object, as text") from None
        called.add(call.id)
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls


def _content(message: Message, i: int, *, empty_ok: bool) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None and empty_ok:
        return ""
    if not isinstance(content, list):
        raise bad(f"messages[{i}].content", "a message needs text content")
    texts: list[str] = []
    for j, part in enumerate(content):
        if part.type != "text":
            raise bad(f"messages[{i}].content[{j}].type", "only content parts of type 'text' are supported")
        if part.text is None:
            raise bad(f"messages[{i}].content[{j}].text", "a text part needs 'text'")
        texts.append(part.text)
    return "\n".join(texts)
