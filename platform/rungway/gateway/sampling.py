"""The fields of a request that say how tokens are chosen, checked one by one. Names and defaults are OpenAI's and vLLM's."""

from __future__ import annotations

from rungway.engine.protocol import Sampling
from rungway.engine.tokenizer import Tokenizer
from rungway.gateway.constrain import Demand
from rungway.gateway.schema import ChatBody, CompletionBody, bad

STOPS_MAX = 4
STOP_CHARS_MAX = 512
BIASES_MAX = 300
TOP_LOGPROBS_CHAT_MAX = 20
TOP_LOGPROBS_COMPLETION_MAX = 5
SEED_BITS = 63
TOKENS_MAX = 2**31 - 1
STOP_IDS_MAX = 64
ALLOWED_IDS_MAX = 10_000
BAD_WORDS_MAX = 64
BAD_WORD_CHARS_MAX = 128
LENGTH_PENALTY_MAX = 10.0
_NOT_WITH_BEAMS = (
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
)


def sampling_of(
    body: ChatBody | CompletionBody, bound: int | None, demand: Demand, prompt_logprobs: int | None
) -> Sampling:
    """`max_tokens` here is the client's bound; the grant's own bound replaces it. `bad_words` wait for the tokenizer of the
    version that is granted. `prompt_logprobs`: what the view of the prompt wants. Raises RequestError."""
    if body.seed is not None and body.seed.bit_length() > SEED_BITS:
        raise bad("seed", "'seed' must fit into 64 bits")
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise bad("top_p", "'top_p' must be above 0 and at most 1")
    if body.bad_words:
        _check_words(body.bad_words)
    if body.repetition_penalty is not None and not 0 < body.repetition_penalty <= 10:
        raise bad("repetition_penalty", "'repetition_penalty' must be above 0 and at most 10")
    _check_beams(body, demand)
    return Sampling(
        max_tokens=bound or 1,
        temperature=_ranged("temperature", body.temperature, 1.0, 0, 2),
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k is None else max(0, within("top_k", body.top_k, -1, TOKENS_MAX)),
        min_p=_ranged("min_p", body.min_p, 0.0, 0, 1),
        presence_penalty=_ranged("presence_penalty", body.presence_penalty, 0.0, -2, 2),
        frequency_penalty=_ranged("frequency_penalty", body.frequency_penalty, 0.0, -2, 2),
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias) if body.logit_bias else {},
        seed=body.seed,
        stop=_stops(body.stop) if body.stop is not None else (),
        logprobs=_logprobs(body),
        ignore_eos=bool(body.ignore_eos),
        constraint=demand.constraint,
        min_tokens=_min_tokens(body, bound),
        stop_token_ids=_ids("stop_token_ids", body.stop_token_ids, STOP_IDS_MAX),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        allowed_token_ids=_allowed(body),
        skip_special_tokens=body.skip_special_tokens is not False,
        use_beam_search=bool(body.use_beam_search),
        length_penalty=_ranged("length_penalty", body.length_penalty, 1.0, -LENGTH_PENALTY_MAX, LENGTH_PENALTY_MAX),
        prompt_logprobs=prompt_logprobs,
    )


def named_ids(sampling: Sampling) -> list[tuple[str, tuple[int, ...]]]:
    """The fields that name tokens by their ids, but for `logit_bias`."""
    named = [("stop_token_ids", sampling.stop_token_ids), ("allowed_token_ids", sampling.allowed_token_ids or ())]
    return [(param, ids) for param, ids in named if ids]


def check_bias(bias: dict[int, float], vocab_size: int) -> None:
    """Raises RequestError where a token is outside of the vocabulary."""
    if max(bias) >= vocab_size:
        raise bad("logit_bias", f"'logit_bias' has a token id above {vocab_size - 1}")


def bad_words(words: list[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokens that it has at the beginning of a text, and behind a space."""
    head = len(tokenizer.encode(""))
    spelled = [prefix + word.lstrip() for word in words or () for prefix in ("", " ")]
    return tuple(dict.fromkeys(ids for text in spelled if (ids := tuple(tokenizer.encode(text)[head:]))))


def within(name: str, value: int, low: int, high: int) -> int:
    """`value`. Raises RequestError where it is outside of `low` .. `high`."""
    if not low <= value <= high:
        raise bad(name, f"'{name}' must be between {low} and {high}")
    return value


def _ranged(name: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise bad(name, f"'{name}' must be between {low} and {high}")
    return value


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    if len(given) > BIASES_MAX:
        raise bad("logit_bias", f"'logit_bias' takes at most {BIASES_MAX} tokens")
    bias: dict[int, float] = {}
    for token, value in given.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            raise bad("logit_bias", "'logit_bias' maps token ids (digits) to numbers")
        bias[int(token)] = _ranged("logit_bias", value, 0.0, -100, 100)
    return bias


def _stops(given: str | list[str]) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given)
    if len(stops) > STOPS_MAX:
        raise bad("stop", f"'stop' takes at most {STOPS_MAX} strings")
    if not all(0 < len(stop) <= STOP_CHARS_MAX for stop in stops):
        raise bad("stop", f"each 'stop' string must have 1 to {STOP_CHARS_MAX} characters")
    return stops


def _min_tokens(body: ChatBody | CompletionBody, bound: int | None) -> int:
    least = 0 if body.min_tokens is None else within("min_tokens", body.min_tokens, 0, TOKENS_MAX)
    if bound is not None and least > bound:
        raise bad("min_tokens", f"'min_tokens' must not be above the most tokens, {bound}")
    return least


def _ids(name: str, given: list[int] | None, most: int) -> tuple[int, ...]:
    if given is not None and len(given) > most:
        raise bad(name, f"'{name}' takes at most {most} token ids")
    return tuple(dict.fromkeys(given or ()))


def _allowed(body: ChatBody | CompletionBody) -> tuple[int, ...] | None:
    if body.allowed_token_ids is None:
        return None
    if not body.allowed_token_ids:
        raise bad("allowed_token_ids", "'allowed_token_ids' must not be empty")
    return _ids("allowed_token_ids", body.allowed_token_ids, ALLOWED_IDS_MAX)


def _check_words(words: list[str]) -> None:
    if len(words) > BAD_WORDS_MAX:
        raise bad("bad_words", f"'bad_words' takes at most {BAD_WORDS_MAX} strings")
    if not all(word.strip() and len(word) <= BAD_WORD_CHARS_MAX for word in words):
        raise bad("bad_words", f"each of 'bad_words' must have 1 to {BAD_WORD_CHARS_MAX} characters, not only spaces")


def _check_beams(body: ChatBody | CompletionBody, demand: Demand) -> None:
    """Beams are ranked by what the model says and nothing else."""
    if not body.use_beam_search:
        if body.length_penalty is not None:
            raise bad("length_penalty", "'length_penalty' needs 'use_beam_search': true")
        return
    if demand.constraint is not None:
        raise bad("use_beam_search", f"'use_beam_search' cannot go with '{demand.param}'")
    for name in _NOT_WITH_BEAMS:
        neutral = 1.0 if name == "repetition_penalty" else 0
        if (value := getattr(body, name)) is not None and value != neutral:
            raise bad(name, f"'{name}' cannot go with 'use_beam_search'")


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        return None if body.logprobs is None else within("logprobs", body.logprobs, 0, TOP_LOGPROBS_COMPLETION_MAX)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise bad("top_logprobs", "'top_logprobs' needs 'logprobs': true")
        return within("top_logprobs", body.top_logprobs, 0, TOP_LOGPROBS_CHAT_MAX)
    return 0 if body.logprobs else None
