"""The order that goes to a replica: what to run and who pays. Pure."""

from __future__ import annotations

import msgspec

from rungway.engine.protocol import EmbedInput, Work
from rungway.gateway.inputs import Inputs
from rungway.gateway.prompts import Lexer
from rungway.gateway.read import Reading
from rungway.gateway.sampling import bad_words
from rungway.gateway.schema import EmbeddingBody
from rungway.messages import Start
from rungway.types import Grant, billing_of


def start_message(
    reading: Reading, grant: Grant, lexer: Lexer, max_tokens: int, resume: list[list[int]], scored: bool
) -> Start:
    """`max_tokens` is that of the first grant, so that a later try ends where the first one would have. `resume[i]` = what
    the i-th of the sequences that still run has emitted. `scored`: the prompt's log-probabilities are here already."""
    ask, offer = reading.ask, grant.offer
    if isinstance(reading.prompt, Inputs):
        return Start(_embedding(reading, grant, reading.prompt.inputs(lexer)), billing_of(ask, grant))
    if offer.context_limit is None:
        prompt = reading.prompt.whole(lexer)
    else:
        prompt = reading.prompt.trimmed(lexer, offer.context_limit)
    asked = None if isinstance(reading.body, EmbeddingBody) else reading.body.bad_words
    words = () if lexer.by_text else bad_words(asked, lexer.tokenizer)
    work = Work(
        request_id=ask.request_id,
        attempt=grant.attempt,
        prompt_ids=prompt.ids,
        prompt_text=prompt.text if lexer.by_text else "",
        sampling=msgspec.structs.replace(
            reading.sampling,
            max_tokens=max_tokens,
            min_tokens=min(reading.sampling.min_tokens, max_tokens),
            bad_words=words,
            prompt_logprobs=None if scored else reading.sampling.prompt_logprobs,
        ),
        sequences=len(resume),
        resume=resume if any(resume) else [],
        share=ask.tenant,
        weight=grant.weight,
        priority=grant.priority,
    )
    return Start(work, billing_of(ask, grant))


def _embedding(reading: Reading, grant: Grant, inputs: list[EmbedInput]) -> Work:
    return Work(
        request_id=reading.ask.request_id,
        attempt=grant.attempt,
        prompt_ids=[],
        prompt_text="",
        sampling=reading.sampling,
        sequences=len(inputs),
        share=reading.ask.tenant,
        weight=grant.weight,
        priority=grant.priority,
        kind="embed",
        inputs=inputs,
    )
