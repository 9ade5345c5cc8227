"""What makes a request impossible, found before it costs anything. A bad request ends alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

from rungway.engine.protocol import Sampling, Work

SEQUENCES_MAX = 128
LOGPROBS_MAX = 64
STOPS_MAX = 64
INPUTS_MAX = 65_536  # of a request for embeddings; callers bound it far lower
NO_EMBEDDINGS = "this engine generates text; it makes no embeddings"
BAD_WORDS_MAX = 256
BEAMS_MAX = 16
BEAM_PENALTY_MAX = 10.0


def problem(work: Work, *, vocab_size: int, context: int) -> str | None:
    """Why `work` cannot run, in words for its sender, or None. `context` = positions that one sequence may have."""
    if work.kind != "generate":
        return NO_EMBEDDINGS
    if not 1 <= work.sequences <= SEQUENCES_MAX:
        return f"sequences must be between 1 and {SEQUENCES_MAX}, not {work.sequences}"
    if len(work.resume) > work.sequences:
        return "resume names more sequences than asked for"
    if not work.prompt_ids:
        return "the prompt has no tokens"
    longest = len(work.prompt_ids) + max((len(tokens) for tokens in work.resume), default=0)
    if longest >= context:
        return f"prompt of {longest} tokens leaves no room in a context of {context}"
    for tokens in (work.prompt_ids, *work.resume):
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            return f"a token id is outside the vocabulary of {vocab_size}"
    if not (work.weight > 0 and math.isfinite(work.weight)):
        return f"weight must be positive, not {work.weight}"
    if work.sampling.use_beam_search and (work.sequences > BEAMS_MAX or any(work.resume)):
        return f"a beam search has at most {BEAMS_MAX} beams, and begins at the prompt"
    return _sampling_problem(work.sampling, vocab_size)


def _sampling_problem(ask: Sampling, vocab_size: int) -> str | None:
    numbers = (ask.temperature, ask.top_p, ask.min_p, ask.presence_penalty, ask.frequency_penalty)
    if not all(math.isfinite(number) for number in (*numbers, ask.repetition_penalty, *ask.logit_bias.values())):
        return "a sampling parameter is not a finite number"
    named: dict[str, Iterable[int]] = {
        "logit_bias": ask.logit_bias,
        "stop_token_ids": ask.stop_token_ids,
        "allowed_token_ids": ask.allowed_token_ids or (),
        "bad_words": chain.from_iterable(ask.bad_words),
    }
    for name, tokens in named.items():
        bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            return f"{name} names token {bad}, outside the vocabulary of {vocab_size}"
    rules = (
        (ask.max_tokens >= 0, "max_tokens must not be negative"),
        (ask.temperature >= 0, "temperature must not be negative"),
        (0 < ask.top_p <= 1, "top_p must be above 0 and at most 1"),
        (0 <= ask.min_p <= 1, "min_p must be between 0 and 1"),
        (ask.top_k >= 0, "top_k must not be negative"),
        (ask.repetition_penalty > 0, "repetition_penalty must be positive"),
        (ask.logprobs is None or 0 <= ask.logprobs <= LOGPROBS_MAX, f"logprobs must be between 0 and {LOGPROBS_MAX}"),
        (
            ask.prompt_logprobs is None or 0 <= ask.prompt_logprobs <= LOGPROBS_MAX,
            f"prompt_logprobs must be between 0 and {LOGPROBS_MAX}",
        ),
        (len(ask.stop) <= STOPS_MAX, f"at most {STOPS_MAX} stop strings"),
        (0 <= ask.min_tokens <= ask.max_tokens, "min_tokens must be between 0 and max_tokens"),
        (ask.allowed_token_ids is None or len(ask.allowed_token_ids) > 0, "allowed_token_ids must not be empty"),
        (len(ask.stop_token_ids) <= STOPS_MAX, f"at most {STOPS_MAX} stop_token_ids"),
        (len(ask.bad_words) <= BAD_WORDS_MAX, f"at most {BAD_WORDS_MAX} bad_words"),
        (all(ask.bad_words), "each of bad_words must have a token"),
        (ask.constraint is None or not ask.min_tokens, "min_tokens cannot go with a constraint, which sets the end"),
        (ask.constraint is None or not ask.ignore_eos, "ignore_eos cannot go with a constraint, which sets the end"),
    )
    return next((message for holds, message in rules if not holds), None) or _beams_problem(ask)


def _beams_problem(ask: Sampling) -> str | None:
    """Beams are ranked by what the model says and nothing else."""
    if not ask.use_beam_search:
        return None
    if not ask.max_tokens:
        return "a beam search must be allowed at least one token"
    if not -BEAM_PENALTY_MAX <= ask.length_penalty <= BEAM_PENALTY_MAX:
        return f"length_penalty must be between {-BEAM_PENALTY_MAX} and {BEAM_PENALTY_MAX}"
    plain = Sampling(
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        min_p=ask.min_p,
        seed=ask.seed,
        stop=ask.stop,
        logprobs=ask.logprobs,
        ignore_eos=ask.ignore_eos,
        stop_token_ids=ask.stop_token_ids,
        include_stop_str_in_output=ask.include_stop_str_in_output,
        skip_special_tokens=ask.skip_special_tokens,
        use_beam_search=True,
        length_penalty=ask.length_penalty,
        prompt_logprobs=ask.prompt_logprobs,
    )
    if ask != plain:
        return "a beam search takes no constraint, bias, penalties, min_tokens, allowed or bad tokens"
    return None
