"""The texts of one request for embeddings, as the engines of a tier see them: counted, cut where that was asked for."""

from __future__ import annotations

import asyncio

from rungway.contracts import TierKind
from rungway.engine.protocol import EmbedInput
from rungway.errors import RequestError
from rungway.gateway.catalogue import Catalogue, Plan
from rungway.gateway.prompts import INLINE_CHARS_MAX, Lexer, Tokenizers
from rungway.gateway.schema import bad
from rungway.outcomes import Code

Given = list[str] | list[list[int]]


class Inputs:
    """`cut`: most tokens of one input, what is beyond is dropped; None = nothing is. Rendered at most once per lexer."""

    def __init__(self, given: Given, cut: int | None) -> None:
        self._given = given
        self._cut = cut
        self._rendered: dict[int, tuple[list[EmbedInput], list[int]]] = {}

    def __len__(self) -> int:
        return len(self._given)

    @property
    def chars(self) -> int:
        return sum(len(one) for one in self._given)

    def inputs(self, lexer: Lexer) -> list[EmbedInput]:
        return self._whole(lexer)[0]

    def lengths(self, lexer: Lexer) -> list[int]:
        """Tokens of each input."""
        return self._whole(lexer)[1]

    def _whole(self, lexer: Lexer) -> tuple[list[EmbedInput], list[int]]:
        found = self._rendered.get(id(lexer))
        if found is None:
            render = self._as_text if lexer.by_text else self._as_ids
            pairs = [render(one, lexer) for one in self._given]
            found = self._rendered[id(lexer)] = [given for given, _ in pairs], [size for _, size in pairs]
        return found

    def _as_text(self, one: str | list[int], lexer: Lexer) -> tuple[EmbedInput, int]:
        text = one if isinstance(one, str) else " ".join(map(str, one))
        if self._cut is not None and lexer.tokenizer.count(text) > self._cut:
            text = " ".join(text.split()[: self._cut])
        return EmbedInput([], text), lexer.tokenizer.count(text)

    def _as_ids(self, one: str | list[int], lexer: Lexer) -> tuple[EmbedInput, int]:
        """Token ids of the client's are taken as they are: nothing is put around them."""
        if not isinstance(one, str):
            ids = one if self._cut is None else one[: self._cut]
        elif self._cut is None or lexer.sentences is None:
            ids = lexer.tokenizer.encode(one)
        else:
            ids = lexer.sentences.cut(one, self._cut)
        return EmbedInput(ids), len(ids)


async def measure_inputs(inputs: Inputs, plan: Plan, tokenizers: Tokenizers, catalogue: Catalogue) -> dict[str, int]:
    """Tokens of all inputs together, for the plan's tier. Long ones are counted on a thread.

    Raises RequestError `starting` while the tokenizer is missing, `context_length_exceeded` for an input that is longer
    than the model takes, or where all together are more than a replica takes at a time.
    """
    (tier,) = plan.tiers
    assert catalogue.tiers[tier].kind is TierKind.EMBEDDING
    lexer = tokenizers.of_tier(catalogue, tier)[0]
    if inputs.chars <= INLINE_CHARS_MAX:
        lengths = inputs.lengths(lexer)
    else:
        lengths = await asyncio.to_thread(inputs.lengths, lexer)
    context = catalogue.context_min[tier]
    for index, tokens in enumerate(lengths):
        if tokens > context:
            raise _too_long(
                f"input {index} has {tokens} tokens, but model '{plan.model}' takes at most {context} tokens of one "
                "input; shorten it or send 'truncate_prompt_tokens'"
            )
    total, most = sum(lengths), catalogue.embed_tokens_max[tier]
    if total > most:
        raise _too_long(
            f"all inputs together have {total} tokens, but model '{plan.model}' takes at most {most} tokens of one "
            "request; send them in several"
        )
    return {tier: total}


def check_ids(inputs: list[list[int]], lexer: Lexer) -> None:
    """Ids that the model does not have are refused before they cost anything."""
    for index, ids in enumerate(inputs):
        if min(ids) < 0 or max(ids) >= lexer.tokenizer.vocab_size:
            raise bad(f"input[{index}]", f"token ids must be between 0 and {lexer.tokenizer.vocab_size - 1}")


def _too_long(message: str) -> RequestError:
    return RequestError(Code.CONTEXT_LENGTH_EXCEEDED, message, param="input")
