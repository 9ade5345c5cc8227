"""From messages to tokens: one tokenizer per model source, exact prompt lengths per tier, and the trimmed prompt of the
rung `context_trim`.

Encoding a long prompt takes milliseconds, so prompts above `INLINE_CHARS_MAX` characters are measured on a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rungway.contracts import TierKind, Version
from rungway.engine.embedding.fake import FAKE_DIMENSIONS
from rungway.engine.embedding.tokenizer import SentenceTokenizer
from rungway.engine.errors import ModelError, PromptError
from rungway.engine.loader import model_dir
from rungway.engine.tokenizer import Tokenizer, load_tokenizer
from rungway.errors import RequestError
from rungway.gateway.catalogue import Catalogue, Plan
from rungway.outcomes import Code

INLINE_CHARS_MAX = 8192


class Lexer(NamedTuple):
    """A tokenizer and how the engines behind it take prompts: as token ids, or as text whose words they count.
    `sentences`: the same tokenizer, where it is an embedding model's."""

    tokenizer: Tokenizer
    by_text: bool
    sentences: SentenceTokenizer | None = None

    @property
    def dimensions(self) -> int:
        """Of an embedding model's vectors."""
        return FAKE_DIMENSIONS if self.sentences is None else self.sentences.dimensions


class Tokenizers:
    """Tokenizers by (backend, model source, kind of tier); equal sources are loaded once and stay loaded across reloads."""

    def __init__(self, models_dir: Path) -> None:
        self._models_dir = models_dir
        self._loaded: dict[tuple[str, str, str], Lexer] = {}
        self._tiers: dict[str, list[Lexer]] = {}  # of `_catalogue`
        self._catalogue: Catalogue | None = None

    def get(self, version: Version) -> Lexer | None:
        return self._loaded.get(_name(version))

    def keep(self, version: Version, lexer: Lexer) -> None:
        self._loaded[_name(version)] = lexer

    def of_tier(self, catalogue: Catalogue, tier: str) -> list[Lexer]:
        """The distinct lexers of a tier's versions. Raises RequestError `starting` while one is not there yet."""
        if catalogue is not self._catalogue:
            self._catalogue, self._tiers = catalogue, {}
        lexers = self._tiers.get(tier)
        if lexers is None:
            lexers = self._tiers[tier] = self._distinct(catalogue, tier)
        return lexers

    def _distinct(self, catalogue: Catalogue, tier: str) -> list[Lexer]:
        found: dict[int, Lexer] = {}
        for version in catalogue.tiers[tier].versions:
            lexer = self._loaded.get(_name(version))
            if lexer is None:
                raise RequestError(Code.STARTING, f"tier '{tier}' is still starting", retry_after_s=2)
            found[id(lexer)] = lexer
        return list(found.values())

    def lacking(self, versions: Iterable[Version]) -> list[str]:
        """The model sources whose tokenizer is not here yet."""
        return sorted({version.model for version in versions if self.get(version) is None})

    async def load(self, versions: Iterable[Version]) -> bool:
        """Loads what is missing and can be had, on a thread. True when all are here."""
        whole = True
        for version in versions:
            if self.get(version) is not None:
                continue
            try:
                self.keep(version, await asyncio.to_thread(self._open, version))
            except (ModelError, OSError):
                whole = False
        return whole

    def _open(self, version: Version) -> Lexer:
        by_text = version.backend == "fake"
        path = None if by_text else model_dir(version.model, self._models_dir)
        if path is not None and version.kind is TierKind.EMBEDDING:
            sentences = SentenceTokenizer(path)
            return Lexer(sentences, by_text, sentences)
        return Lexer(load_tokenizer(version.backend, path), by_text)


def _name(version: Version) -> tuple[str, str, str]:
    return version.backend, version.model, version.kind


class Rendered(NamedTuple):
    """A prompt as one lexer sees it; `ids` is empty for lexers that go by text."""

    text: str
    ids: list[int]
    tokens: int


class Prompt:
    """What the client sent: chat messages, a text, or token ids; rendered at most once per lexer. Messages are as
    Tokenizer.render_chat takes them, with `tools` that may be called."""

    def __init__(
        self,
        *,
        messages: list[dict[str, Any]] | None = None,
        text: str | None = None,
        ids: list[int] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        self.messages = messages
        self._tools = tools or None
        self._text = text
        self._ids = ids
        self._whole: dict[int, Rendered] = {}
        self._trimmed: dict[int, Rendered] = {}

    @property
    def chars(self) -> int:
        if self.messages is not None:
            return sum(len(message["content"]) for message in self.messages) + len(str(self._tools or ""))
        return len(self._text) if self._text is not None else len(self._ids or ())

    @property
    def turns(self) -> int:
        return len(self.messages) if self.messages is not None else 1

    @property
    def written(self) -> str:
        """What the client wrote, without any template; empty for token ids."""
        if self.messages is None:
            return self._text or ""
        if len(self.messages) == 1:
            return str(self.messages[0]["content"])
        return "\n".join(message["content"] for message in self.messages)

    @property
    def token_ids(self) -> list[int] | None:
        """The ids when the client sent ids itself."""
        return self._ids

    def whole(self, lexer: Lexer) -> Rendered:
        found = self._whole.get(id(lexer))
        if found is None:
            found = self._whole[id(lexer)] = self._render(lexer, self.messages)
        return found

    def trimmed(self, lexer: Lexer, limit_tokens: int) -> Rendered:
        """The prompt without its oldest turns, so that it fits `limit_tokens` if that is possible at all. System
        messages and the last message always stay; the first turn that is kept is a user's."""
        found = self._trimmed.get(id(lexer))
        if found is None:
            found = self._trimmed[id(lexer)] = self._trim(lexer, limit_tokens)
        return found

    def _render(self, lexer: Lexer, messages: list[dict[str, Any]] | None) -> Rendered:
        if self._ids is not None:
            return Rendered(" ".join(map(str, self._ids)) if lexer.by_text else "", self._ids, len(self._ids))
        text = self._text or "" if messages is None else lexer.tokenizer.render_chat(messages, self._tools)
        if lexer.by_text:
            return Rendered(text, [], max(1, lexer.tokenizer.count(text)))
        ids = lexer.tokenizer.encode(text)
        return Rendered(text, ids, len(ids))

    def _trim(self, lexer: Lexer, limit_tokens: int) -> Rendered:
        whole = self.whole(lexer)
        messages = self.messages
        if messages is None or whole.tokens <= limit_tokens:
            return whole
        cuts = _cuts(messages)
        if not cuts:
            return whole
        # Length falls with every turn that goes, so the first cut that fits is found by halving.
        low, high = 0, len(cuts) - 1
        while low < high:
            middle = (low + high) // 2
            if self._render(lexer, _without(messages, cuts[middle])).tokens <= limit_tokens:
                high = middle
            else:
                low = middle + 1
        return self._render(lexer, _without(messages, cuts[low]))


class Lengths(NamedTuple):
    """Prompt tokens per candidate tier, whole and after the rung `context_trim`."""

    whole: dict[str, int]
    trimmed: dict[str, int]


async def measure(prompt: Prompt, plan: Plan, tokenizers: Tokenizers, catalogue: Catalogue) -> Lengths:
    """Exact lengths for every candidate tier; the longest counts where versions of a tier tokenize differently.

    Raises RequestError `starting` while a tokenizer is missing, `invalid_request` when the chat template refuses the
    messages, `context_length_exceeded` when no candidate fits.
    """
    lexers = {tier: tokenizers.of_tier(catalogue, tier) for tier in plan.candidates}
    limit = catalogue.ladder.context_limit_tokens

    roomiest = max(plan.candidates, key=lambda tier: catalogue.context_max[tier])
    if prompt.turns > catalogue.context_max[roomiest]:
        # A turn has a token at least. Rendering tens of thousands of them only to refuse them takes seconds.
        raise _too_long(prompt, plan, f"at least {prompt.turns}", catalogue.context_max[roomiest])

    def work() -> Lengths:
        whole = {tier: max(prompt.whole(lexer).tokens for lexer in several) for tier, several in lexers.items()}
        fits = any(tokens < catalogue.context_max[tier] for tier, tokens in whole.items())
        if not (fits and plan.may_trim and prompt.turns > 1 and any(tokens > limit for tokens in whole.values())):
            return Lengths(whole, whole)
        cut = {tier: max(prompt.trimmed(lexer, limit).tokens for lexer in several) for tier, several in lexers.items()}
        return Lengths(whole, cut)

    try:
        lengths = work() if prompt.chars <= INLINE_CHARS_MAX else await asyncio.to_thread(work)
    except PromptError as error:
        raise RequestError(
            Code.INVALID_REQUEST, f"the model takes no such messages: {error}", param="messages"
        ) from None
    if all(lengths.whole[tier] >= catalogue.context_max[tier] for tier in plan.candidates):
        raise _too_long(prompt, plan, str(lengths.whole[roomiest]), catalogue.context_max[roomiest])
    return lengths


def _too_long(prompt: Prompt, plan: Plan, tokens: str, most: int) -> RequestError:
    return RequestError(
        Code.CONTEXT_LENGTH_EXCEEDED,
        f"the prompt has {tokens} tokens, but model '{plan.model}' takes at most {most} tokens of prompt and answer together",
        param="messages" if prompt.messages is not None else "prompt",
    )


def _cuts(messages: list[dict[str, Any]]) -> list[int]:
    """How many of the oldest non-system turns may go, fewest first: a user's turn, or the last message, comes next. Calls
    and their results go together, so a result that is the last message keeps its user's turn."""
    turns = [message for message in messages[:-1] if message["role"] != "system"]
    alone = messages[-1]["role"] != "tool"
    return [k for k in range(1, len(turns) + 1) if (alone if k == len(turns) else turns[k]["role"] == "user")]


def _without(messages: list[dict[str, Any]], dropped: int) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for message in messages[:-1]:
        if message["role"] != "system" and dropped > 0:
            dropped -= 1
        else:
            kept.append(message)
    return [*kept, messages[-1]]
