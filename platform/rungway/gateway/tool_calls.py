"""Reads tool calls out of an answer's text, in whatever pieces it comes. No I/O.

A call is `<tool_call>`, JSON `{"name": ..., "arguments": {...}}`, `</tool_call>`. The name comes out once it is whole, the
arguments as they come, exactly as the model wrote them. What comes out does not depend on how the text was cut, so a stream
and a whole answer hold the same calls. What looks like a call and is none stays text.
"""

from __future__ import annotations

import hashlib
import json
import re
from enum import Enum
from typing import NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


class Said(NamedTuple):
    """A piece of plain content."""

    text: str


class Began(NamedTuple):
    """Call number `call` of this answer, from 0, begins."""

    call: int
    name: str


class Argued(NamedTuple):
    """A piece of the arguments of a call."""

    call: int
    text: str


Event = Said | Began | Argued


class _At(Enum):
    TEXT = "text"
    HEAD = "head"
    ARGUMENTS = "arguments"
    TAIL = "tail"


class Reader:
    """One sequence. `push` pieces, then `end` once; `count` = calls that began, `cut` = the last one has not ended."""

    __slots__ = ("_at", "_depth", "_escaped", "_held", "_quoted", "count")

    def __init__(self) -> None:
        self.count = 0
        self._at = _At.TEXT
        self._held = ""
        self._depth = 0
        self._quoted = self._escaped = False

    @property
    def cut(self) -> bool:
        return self._at is _At.ARGUMENTS

    def push(self, text: str) -> list[Event]:
        """What is certain by now; neighbours of one kind are joined."""
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return _joined(events)

    def end(self) -> list[Event]:
        """The text is over: what was held back is text, but for a call that has begun."""
        held, self._held = self._held, ""
        match self._at:
            case _At.TEXT:
                # White space after a call only sets it apart.
                return [Said(held)] if held and (held.strip() or not self.count) else []
            case _At.HEAD:
                return self._whole(held) or [Said(OPEN + held)]
        return []

    def _step(self, events: list[Event]) -> bool:
        """Moves on as far as one state allows; False where more text is needed."""
        match self._at:
            case _At.TEXT:
                return self._text(events)
            case _At.HEAD:
                return self._head(events)
            case _At.ARGUMENTS:
                return self._arguments(events)
            case _At.TAIL:
                return self._tail()

    def _text(self, events: list[Event]) -> bool:
        at = self._held.find(OPEN)
        if at >= 0:
            said = self._held[:at].rstrip()
            self._held, self._at = self._held[at + len(OPEN) :], _At.HEAD
        else:
            keep = _possible(self._held)
            said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if said:
            events.append(Said(said))
        return at >= 0

    def _head(self, events: list[Event]) -> bool:
        found = _HEAD.match(self._held)
        close = self._held.find(CLOSE)
        if found is not None and (close < 0 or found.end() <= close):
            try:
                name = str(json.loads(found[1]))
            except ValueError:
                name = found[1][1:-1]
            events.append(Began(self.count, name))
            self.count += 1
            self._held, self._at = self._held[found.end() :], _At.ARGUMENTS
            return True
        if close < 0:
            return False
        inner, self._held = self._held[:close], self._held[close + len(CLOSE) :]
        events += self._whole(inner) or [Said(OPEN + inner + CLOSE)]
        self._at = _At.TEXT
        return True

    def _whole(self, inner: str) -> list[Event]:
        """A call whose members come in another order; nothing where it is no call."""
        try:
            call = json.loads(inner)
        except (ValueError, RecursionError):
            return []
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        if not isinstance(call.get("arguments"), dict):
            return []
        self.count += 1
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        return [Began(self.count - 1, call["name"]), Argued(self.count - 1, arguments)]

    def _arguments(self, events: list[Event]) -> bool:
        """Up to the brace that closes the first one; braces inside of strings do not count."""
        for at, char in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = self._quoted
            elif char == '"':
                self._quoted = not self._quoted
            elif not self._quoted and char in "{[":
                self._depth += 1
            elif not self._quoted and char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    events.append(Argued(self.count - 1, self._held[: at + 1]))
                    self._held, self._at = self._held[at + 1 :], _At.TAIL
                    return True
        if self._held:
            events.append(Argued(self.count - 1, self._held))
            self._held = ""
        return False

    def _tail(self) -> bool:
        close = self._held.find(CLOSE)
        if close < 0:
            return False
        self._held, self._at = self._held[close + len(CLOSE) :], _At.TEXT
        return True


def _possible(text: str) -> int:
    """Characters at the end that may belong to an opening tag: the beginning of one, and white space before it."""
    tag = next((size for size in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:size])), 0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip())


def _joined(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of text as one."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Said) and isinstance(last, Said):
            joined[-1] = Said(last.text + event.text)
        else:
            joined.append(event)
    return joined


class Call(NamedTuple):
    """`arguments` as the model wrote them; cut off where its answer was."""

    name: str
    arguments: str


class Calls(NamedTuple):
    """A whole answer; `cut` as a Reader's."""

    content: str
    calls: list[Call]
    cut: bool


def read_calls(text: str) -> Calls:
    reader = Reader()
    content, calls = "", list[Call]()
    for event in reader.push(text) + reader.end():
        match event:
            case Said():
                content += event.text
            case Began():
                calls.append(Call(event.name, ""))
            case Argued():
                calls[event.call] = Call(calls[event.call].name, calls[event.call].arguments + event.text)
    return Calls(content, calls, reader.cut)


def call_id(request_id: str, choice: int, index: int) -> str:
    """Unique, and the same whenever this answer is given again."""
    key = f"{request_id}/{choice}/{index}".encode()
    return "call_" + hashlib.blake2b(key, digest_size=12).hexdigest()


def finish_of(finish: str, calls: int, cut: bool) -> str:
    """The client's finish reason: an answer that ends with calls by itself is one of tool calls. One that the client's own
    stop string `cut` in the middle of a call is not: nobody should run that call."""
    return "tool_calls" if calls and finish == "stop" and not cut else finish
