"""Server-sent events of answers that may call tools. No I/O.

A delta gives a frame for each thing that is certain by then: a piece of content, the beginning of a call (its id and name,
no arguments yet), a piece of a call's arguments. The finish reason comes in a frame of its own.
"""

from __future__ import annotations

from rungway.engine.protocol import Delta
from rungway.gateway.answer import Facts, chat_logprobs, escape
from rungway.gateway.sse import Frames
from rungway.gateway.tool_calls import Argued, Began, Event, Reader, Said, call_id, finish_of


class CallFrames(Frames):
    """Frames of one chat answer; a reader for each sequence."""

    __slots__ = ("_began", "_readers", "_request_id")

    def __init__(self, facts: Facts, created: int, listed: int | None = None) -> None:
        super().__init__(facts, created, True, listed)
        self._request_id = facts.request_id
        self._readers: dict[int, Reader] = {}
        self._began: set[int] = set()

    def frame(self, delta: Delta) -> str:
        """The frames of one delta, or "" when it has nothing for the client yet."""
        if delta.prompt_logprobs is not None:
            self.take_prompt(delta.prompt_logprobs)
        index = delta.index
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = Reader()
        events = reader.push(delta.text)
        if delta.finish is not None:
            events += reader.end()
        said = [self._said(index, event) for event in events]
        if delta.logprobs and not said:
            said = [""]
        logprobs = ["null"] * len(said)
        if delta.logprobs:
            logprobs[0] = chat_logprobs(delta.logprobs)
        frames = [self._choice(index, part, value, "null") for part, value in zip(said, logprobs, strict=True)]
        if delta.finish is not None:
            frames.append(self._choice(index, "", "null", f'"{finish_of(delta.finish, reader.count, reader.cut)}"'))
        return "".join(frames)

    def _choice(self, index: int, said: str, logprobs: str, finish: str) -> str:
        if index not in self._began:
            self._began.add(index)
            said = '"role":"assistant"' + ("," + said if said else ',"content":null')
        return self.wrap(f'{{"index":{index},"delta":{{{said}}},"logprobs":{logprobs},"finish_reason":{finish}}}')

    def _said(self, index: int, event: Event) -> str:
        match event:
            case Said():
                return f'"content":{escape(event.text)}'
            case Began():
                identity = call_id(self._request_id, index, event.call)
                call = f'"id":"{identity}","type":"function","function":{{"name":{escape(event.name)},"arguments":""}}'
            case Argued():
                call = f'"function":{{"arguments":{escape(event.text)}}}'
        return f'"tool_calls":[{{"index":{event.call},{call}}}]'
