"""Server-sent events: one frame per delta, made of fragments that are built once per request. No I/O.

Only the text of a delta is encoded anew; everything around it is the same bytes for all frames of a sequence.
"""

from __future__ import annotations

from rungway.engine.protocol import Delta, PromptToken, TokenLogprob
from rungway.errors import RequestError
from rungway.gateway.answer import (
    Facts,
    chars,
    chat_logprobs,
    error_body,
    escape,
    prompt_member,
    response_id,
    rungway_object,
    text_logprobs,
    usage_object,
)

DONE = "data: [DONE]\n\n"
_OPEN = ',"logprobs":null,"finish_reason":null}]}\n\n'


class Frames:
    """Frames of one answer. The first one carries the `rungway` object, the first of each sequence the role (chat)."""

    __slots__ = ("_base", "_chat", "_facts", "_heads", "_listed", "_offsets", "_prompt", "_tail", "_unsaid")

    def __init__(self, facts: Facts, created: int, chat: bool, listed: int | None = None) -> None:
        """`listed`: alternatives in `prompt_logprobs`, None = there is none."""
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._facts = facts
        self._chat = chat
        self._base = (
            f'data: {{"id":"{response_id(facts.request_id, chat)}","object":"{kind}","created":{created},'
            f'"model":{escape(facts.model or "")}'
        )
        self._heads: dict[int, str] = {}
        self._tail = "}" + _OPEN if chat else _OPEN
        self._offsets: dict[int, int] = {}
        self._unsaid = True
        self._listed = listed
        self._prompt = ""  # the member for the next frame

    def frame(self, delta: Delta) -> str:
        """The frame of one delta, or "" when it has nothing for the client (its text is still held back)."""
        if delta.prompt_logprobs is not None:
            self.take_prompt(delta.prompt_logprobs)
        head = self._heads.get(delta.index)
        if head is not None and delta.finish is None and delta.logprobs is None:
            return head + escape(delta.text) + self._tail if delta.text else ""
        if not delta.text and delta.finish is None and not delta.logprobs:
            return ""
        return self._long(delta, head is None)

    def take_prompt(self, tokens: list[PromptToken]) -> None:
        """The next frame lists the prompt's log-probabilities: that of a chat itself, that of a completion in its choice."""
        if self._listed is not None:
            self._prompt = prompt_member(tokens, self._listed)

    def wrap(self, choice: str) -> str:
        """One choice as a frame; the first of the answer says where it comes from."""
        base = self._base
        if self._chat and self._prompt:
            base, self._prompt = base + self._prompt, ""
        if self._unsaid:
            self._unsaid = False
            base += f',"rungway":{rungway_object(self._facts)}'
        return f'{base},"choices":[{choice}]}}\n\n'

    def usage(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> str:
        """The frame that `stream_options.include_usage` asks for."""
        return f'{self._base},"choices":[],"usage":{usage_object(prompt_tokens, cached_tokens, output_tokens)}}}\n\n'

    def _long(self, delta: Delta, first: bool) -> str:
        """The frame with everything: role, logprobs, finish reason."""
        index = delta.index
        if first:
            self._heads[index] = f'{self._base},"choices":[{{"index":{index},' + (
                '"delta":{"content":' if self._chat else '"text":'
            )
        logprobs = "null" if delta.logprobs is None else self._logprobs(index, delta.logprobs)
        finish = "null" if delta.finish is None else f'"{delta.finish}"'
        if not self._chat:
            said = f'"text":{escape(delta.text)}'
        elif first:
            said = f'"delta":{{"role":"assistant","content":{escape(delta.text)}}}'
        else:
            said = f'"delta":{{"content":{escape(delta.text)}}}' if delta.text else '"delta":{}'
        prompt = ""
        if not self._chat:
            prompt, self._prompt = self._prompt, ""
        return self.wrap(f'{{"index":{index},{said},"logprobs":{logprobs},"finish_reason":{finish}{prompt}}}')

    def _logprobs(self, index: int, tokens: list[TokenLogprob]) -> str:
        if self._chat:
            return chat_logprobs(tokens)
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(chars(one.data) for one in tokens)
        return text_logprobs(tokens, offset)


def error_frame(error: RequestError) -> str:
    """The last event of a stream that failed after its first chunk; no `[DONE]` follows."""
    return "data: " + error_body(error).decode("ascii") + "\n\n"
