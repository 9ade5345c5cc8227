"""Tools for models whose chat template knows none: the list in the system message, calls and results as plain text.

The form is Hermes' (also Qwen's): calls stand in `<tool_call>`, results come back in `<tool_response>`.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

_INTRODUCTION = (
    "You can call functions. Their signatures, one JSON object a line:\n<tools>\n{tools}\n</tools>\n"
    "To call one, answer with\n<tool_call>\n"
    '{{"name": <its name>, "arguments": <a JSON object>}}\n</tool_call>\nResults come back in <tool_response>.'
)


def without_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """Messages that any template can render: roles system, user and assistant, text content only."""
    plain: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            _add_result(plain, message["content"])
        elif message.get("tool_calls"):
            parts = [message["content"], *(_call(call["function"]) for call in message["tool_calls"])]
            plain.append({"role": "assistant", "content": "\n".join(part for part in parts if part)})
        else:
            plain.append({"role": message["role"], "content": message["content"]})
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        introduction = _INTRODUCTION.format(tools=listed)
        if plain and plain[0]["role"] == "system":
            plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{introduction}"}
        else:
            plain.insert(0, {"role": "system", "content": introduction})
    return plain


def _call(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _add_result(plain: list[Message], content: str) -> None:
    """Results that follow each other are one turn of the user, as turns have to alternate."""
    text = f"<tool_response>\n{content}\n</tool_response>"
    last = plain[-1] if plain else None
    if last is not None and last["role"] == "user" and last["content"].endswith("</tool_response>"):
        last["content"] += "\n" + text
    else:
        plain.append({"role": "user", "content": text})
