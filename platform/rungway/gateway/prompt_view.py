"""What an answer shows of its prompt: the text before each sequence (`echo`), and the log-probabilities of its tokens, in
OpenAI's `logprobs` beside the echo, in vLLM's `prompt_logprobs` by themselves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec

from rungway.contracts import GatewaySpec
from rungway.engine.protocol import Delta, PromptToken, TokenLogprob
from rungway.gateway.prompts import Prompt
from rungway.gateway.schema import ChatBody, CompletionBody, bad

VALUES_INLINE_MAX = 2048
"""Answers with more log-probabilities, which take milliseconds to write out, are written on a thread."""


@dataclass(slots=True, frozen=True)
class View:
    """`echo`: the prompt goes before each answer, as `text` or, where that is None, as what its tokens say. `echoed` and
    `listed`: alternatives for each token, beside the echo and in `prompt_logprobs`; None = no log-probabilities there."""

    echo: bool = False
    text: str | None = None
    echoed: int | None = None
    listed: int | None = None

    @property
    def shows(self) -> bool:
        return self.echo or self.listed is not None

    @property
    def wanted(self) -> int | None:
        """What the engine has to tell: alternatives for each token of the prompt, None = nothing."""
        wanted = [count for count in (self.echoed, self.listed) if count is not None]
        if self.echo and self.text is None:
            wanted.append(0)  # the tokens themselves
        return max(wanted, default=None)

    @property
    def param(self) -> str:
        """The field to blame."""
        return "echo" if self.listed is None else "prompt_logprobs"

    def check(self, prompt_tokens: int, values_max: int) -> None:
        """Raises RequestError where so long a prompt would give more log-probabilities than an answer may have."""
        if self.wanted is None or prompt_tokens * (1 + self.wanted) <= values_max:
            return
        raise bad(
            self.param,
            f"'{self.param}': {prompt_tokens} prompt tokens with {self.wanted} alternatives each are more than "
            f"{values_max} log-probabilities; ask for fewer alternatives or send a shorter prompt",
        )


HIDDEN = View()


def view_of(body: ChatBody | CompletionBody, prompt: Prompt, spec: GatewaySpec) -> View:
    """Raises RequestError naming the field."""
    most = spec.prompt_logprobs_max
    listed, echoed = body.prompt_logprobs, None
    if listed is not None and not 0 <= listed <= most:
        raise bad("prompt_logprobs", f"'prompt_logprobs' must be between 0 and {most}")
    if isinstance(body, ChatBody):
        return View(listed=listed)
    if body.echo:
        echoed = body.logprobs
        if echoed is not None and echoed > most:
            raise bad("logprobs", f"'logprobs' must be between 0 and {most} beside 'echo'")
    text = prompt.written if body.echo and prompt.token_ids is None else None
    return View(bool(body.echo), text, echoed, listed)


class Showing:
    """Puts a view into the deltas of one answer, in order."""

    __slots__ = ("_begun", "_tokens", "_view")

    def __init__(self, view: View) -> None:
        self._view = view
        self._begun: set[int] = set()
        self._tokens: list[PromptToken] = []

    def heavy(self, deltas: list[Delta]) -> bool:
        """Whether the prompt's log-probabilities, which take long to write out, are in them."""
        if all(delta.index in self._begun for delta in deltas):
            return False
        told = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), self._tokens)
        return len(told) * (1 + (self._view.wanted or 0)) > VALUES_INLINE_MAX

    def show(self, deltas: list[Delta]) -> list[Delta]:
        return [self._shown(delta) for delta in deltas]

    @property
    def text(self) -> str:
        """What goes before each sequence; of a prompt of ids once they were told."""
        view = self._view
        if view.text is not None or not view.echo:
            return view.text or ""
        return _text(b"".join([token.data for token in self._tokens]))

    def _shown(self, delta: Delta) -> Delta:
        view, told = self._view, delta.prompt_logprobs
        if told is not None:
            self._tokens = told
            if view.listed is None:
                delta = msgspec.structs.replace(delta, prompt_logprobs=None)
        if not view.echo or delta.index in self._begun:
            return delta
        self._begun.add(delta.index)
        logprobs = delta.logprobs
        if view.echoed is not None:
            logprobs = [*(_beside_echo(token, view.echoed) for token in self._tokens), *(logprobs or ())]
        return msgspec.structs.replace(delta, text=self.text + delta.text, logprobs=logprobs)


def _beside_echo(token: PromptToken, tops: int) -> TokenLogprob:
    top = [(_text(data), data, logprob) for _, data, logprob in token.top[:tops]]
    return TokenLogprob(_text(token.data), token.data, token.logprob, top)


def prompt_logprobs(tokens: list[PromptToken], tops: int) -> str:
    """vLLM's shape: null for the first token, for each other one an object from token id to `logprob`, `rank` and
    `decoded_token`, the prompt's own token first."""

    def entry(data: bytes, logprob: float | None, rank: int) -> dict[str, object]:
        return {"logprob": logprob, "rank": rank, "decoded_token": _text(data)}

    shown: list[dict[str, dict[str, object]] | None] = []
    for token in tokens:
        if token.logprob is None:
            shown.append(None)
            continue
        one = {str(token.id): entry(token.data, token.logprob, token.rank)}
        for rank, (id_, data, logprob) in enumerate(token.top[:tops], 1):
            if id_ != token.id:
                one[str(id_)] = entry(data, logprob, rank)
        shown.append(one)
    return json.dumps(shown, separators=(",", ":"))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
