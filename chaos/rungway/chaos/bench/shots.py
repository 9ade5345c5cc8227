"""Requests as ready bytes, and the check of what came back: every word of the expected text, once and in order.

The engines behind a benchmark say a text that depends on the prompt alone. So an answer that lost, repeated or swapped
a frame, or that belongs to somebody else's prompt, differs from the text that the same prompt got before the load.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from rungway.chaos.bench.http_wire import Answer


@dataclass(frozen=True)
class Shot:
    """One request. `text` is the answer's expected text ("" = only the status is checked)."""

    raw: bytes
    stream: bool = False
    text: str = ""


@dataclass(frozen=True)
class Target:
    """Where to shoot: an OpenAI-shaped server. Connections take `keys` in turn; none = no Authorization header."""

    host: str
    port: int
    model: str
    keys: tuple[str, ...] = ()
    stream_model: str = ""

    def shot(self, prompt: str, *, max_tokens: int, stream: bool, key: int = 0, text: str = "") -> Shot:
        model = (self.stream_model or self.model) if max_tokens > 1 else self.model
        body = json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "stream": stream,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        if self.keys:
            head += f"authorization: Bearer {self.keys[key % len(self.keys)]}\r\n"
        return Shot(head.encode() + b"\r\n" + body, stream, text)


class _Piece(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Piece | None = None
    message: _Piece | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True)
class Verdict:
    """What is wrong with one answer; `problem` "" = nothing. Counts are words; `frames` are SSE data frames seen."""

    problem: str = ""
    text: str = ""
    frames: int = 0
    lost: int = 0
    misplaced: int = 0


def judge(shot: Shot, answer: Answer) -> Verdict:
    """Status, form and text of one answer."""
    if answer.broken:
        return Verdict(answer.broken)
    if answer.status != 200:
        return Verdict(f"status {answer.status}", lost=len(shot.text.split()))
    body = answer.body()
    try:
        verdict = _streamed(body) if shot.stream else _whole(body)
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
        return Verdict("unreadable answer", lost=len(shot.text.split()))
    if verdict.problem or not shot.text or verdict.text == shot.text:
        return verdict
    lost, misplaced = compare(shot.text.split(), verdict.text.split())
    return Verdict("wrong text", verdict.text, verdict.frames, lost, misplaced)


def _whole(body: bytes) -> Verdict:
    choice = _decode(body).choices[0]
    return Verdict(text=(choice.message.content if choice.message else None) or "")


def _streamed(body: bytes) -> Verdict:
    texts: list[str] = []
    finish = None
    done = False
    frames = 0
    for event in body.replace(b"\r\n", b"\n").split(b"\n\n"):
        if not event.startswith(b"data:"):
            continue
        data = event[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        if done:
            return Verdict("a frame after [DONE]", "".join(texts), frames)
        frames += 1
        chunk = _decode(data)
        if chunk.error is not None:
            return Verdict("error frame", "".join(texts), frames)
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            if choice.delta is not None and choice.delta.content:
                texts.append(choice.delta.content)
    problem = "" if done and finish else "no [DONE]" if not done else "no finish reason"
    return Verdict(problem, "".join(texts), frames)


def compare(wanted: list[str], got: list[str]) -> tuple[int, int]:
    """(lost, misplaced) words: wanted ones that never came, and ones that came where they do not belong: before a word
    that they follow, a second time, or from another text."""
    place = {word: at for at, word in enumerate(wanted)}
    lost = len(set(wanted) - set(got))
    misplaced, last = 0, -1
    for word in got:
        at = place.get(word, -1)
        if at > last:
            last = at
        else:
            misplaced += 1
    return lost, misplaced
