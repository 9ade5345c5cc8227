"""What an engine is. The native engine, the fake one and later back ends implement `Engine`; one conformance suite
runs over all of them. Nothing here knows tenants' contracts, HTTP or Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import msgspec

ConstraintKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "tools"]
WorkKind = Literal["generate", "embed"]

REFUSED = "refused: "
"""Begins the `error` of a request that an engine finds impossible: no other engine would run it either."""


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """What a whole answer must look like. `text`: the schema (json_schema), nothing (json_object), the expression that the
    whole answer must match (regex), a JSON list of strings (choice), a Lark grammar (grammar), or the callable tools as
    constraint.Tools in JSON (tools)."""

    kind: ConstraintKind
    text: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How to choose tokens. Order of processing: allowed tokens, bad words, least length, logit bias, penalties (repetition,
    frequency, presence), constraint, greedy branch (temperature 0), temperature, min-p, top-k, top-p, sample. `top_k` 0 =
    off. `logprobs` = number of alternatives per position (0 = only the chosen token), None = off; they are of the raw
    logits. `seed` None = the engine draws one. `stop` strings, and tokens of `stop_token_ids`, end the sequence and are cut
    from the text unless `include_stop_str_in_output`. The first `min_tokens` tokens hold neither an end of the model nor one
    of `stop_token_ids`, and stop strings are looked for behind them. `allowed_token_ids`: no others may come.
    `bad_words`: as tokens; the last token of one may not come behind the others. `skip_special_tokens` False: the text names
    special tokens. `use_beam_search`: the sequences of a Work are its beams; nothing is said before the search is over, then
    they are its results, best first by total log-probability / length ** `length_penalty` (beams.py). `prompt_logprobs` = number
    of alternatives for each token of the prompt, None = off. `max_tokens` 0: the prompt is computed and nothing said."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    constraint: Constraint | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    use_beam_search: bool = False
    length_penalty: float = 1.0
    prompt_logprobs: int | None = None


class EmbedInput(msgspec.Struct, frozen=True, array_like=True):
    """One text to embed, as `Work` has its prompt: token ids (native) or text (fake). Truncation is done."""

    ids: list[int]
    text: str = ""


class Work(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One attempt at a request: `sequences` samples of one prompt, numbered from 0.

    `prompt_ids` are the tokens (native); `prompt_text` is the rendered prompt for engines that count words (fake).
    `resume[i]` = tokens that sequence i has already emitted on another replica: they are context, count neither as
    output nor against a second bill, but do count against `sampling.max_tokens`. `share` is the opaque name under
    which fairness and cache salt are kept (the tenant), `priority` 0 is the most urgent band.

    `kind` "embed": one vector for each of `inputs`, which are numbered from 0 like samples; `sequences` is their number,
    prompt and sampling do not count.
    """

    request_id: str
    attempt: int
    prompt_ids: list[int]
    prompt_text: str
    sampling: Sampling
    sequences: int = 1
    resume: list[list[int]] = []
    share: str = ""
    weight: float = 1.0
    priority: int = 0
    kind: WorkKind = "generate"
    inputs: list[EmbedInput] = []


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """`top`: alternatives as (token text, bytes of it, logprob), best first. `logprob` is None only for the first token of a
    prompt, which nothing precedes."""

    token: str
    data: bytes
    logprob: float | None
    top: list[tuple[str, bytes, float]]


class PromptToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of the prompt, given all before it, by the raw logits. `rank`: 1 + how many are more probable. `top`:
    alternatives as (id, bytes of it, logprob), best first. The first token has None, 0 and nothing: nothing precedes it."""

    id: int
    data: bytes
    logprob: float | None
    rank: int
    top: list[tuple[int, bytes, float]]


class EngineUsage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one attempt. `prompt_tokens` counts the prompt once (without resumed tokens), `cached_tokens` the part
    of it that came from the prefix cache, `output_tokens` the tokens sampled by this attempt over all sequences. Of an
    embedding the prompt is the tokens of all inputs that have their vector."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """News of one sequence of one attempt.

    `text` never ends inside a UTF-8 character or inside a possible stop string. `finish` is None until the sequence
    ends: stop | length | cancelled | error. `usage` is set on the last delta of the attempt (all sequences ended),
    exactly once. `cum_logprob` is set with `finish`. `vector`: the embedding of input `index` as little-endian float32 of
    length 1, whole in one delta, which ends that input with "stop". `prompt_logprobs`: where they were asked for, all
    tokens of the prompt, once, on the first delta that the attempt gives after computing it.
    """

    request_id: str
    attempt: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish: str | None = None
    error: str | None = None
    cum_logprob: float = 0.0
    usage: EngineUsage | None = None
    vector: bytes | None = None
    prompt_logprobs: list[PromptToken] | None = None


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Where the engine stands now. `step_ms` and `decode_tokens_per_s` are moving averages; `prefill_tokens_per_s` is what further
    tokens of a prompt cost, as a rate.
    `drafted_tokens` and `accepted_tokens` count speculative decoding since the start; `draft_length` is a moving average of
    the drafts of a sequence in a step, near 0 where they do not pay. `path`: what computes a native engine's steps, and in
    which numbers: `native int8` = our own CPU kernels, `torch bfloat16` = torch's operations; empty for other engines."""

    running: int
    waiting: int
    tokens_in_flight: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_cached: int
    step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_length: float = 0.0
    path: str = ""


class PrefixNews(msgspec.Struct, frozen=True, array_like=True):
    """Keys of prefix blocks (chain.py) that an engine holds: all of them if `full`, else what changed since the last."""

    full: bool
    added: list[int]
    removed: list[int]


OnDeltas = Callable[[list[Delta]], None]


class Engine(Protocol):
    """Life: `start`, any number of `submit`/`cancel`, `stop`. All methods are called on one event loop.

    `on_deltas` is called on that loop once per engine step with everything the step produced. After `cancel` the
    attempt's blocks are free within one step and a last delta (finish "cancelled", with usage) still arrives; cancel
    of an unknown or ended request does nothing. A request that cannot run (prompt too long, bad logit_bias id) ends
    with finish "error" and `error` set; it never breaks others. `check` recounts every block and returns what is
    inconsistent (empty = sound).
    """

    max_num_seqs: int
    kv_tokens: int

    async def start(self, on_deltas: OnDeltas) -> None: ...

    def submit(self, work: Work) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...

    def check(self) -> list[str]: ...

    async def stop(self) -> None: ...


@runtime_checkable
class HoldsPrefixes(Protocol):
    """An engine with a prefix cache that says what is in it. `prefix_news(full=True)` starts anew, for a listener that
    knows nothing; any thread may call it, one listener only."""

    def prefix_news(self, *, full: bool) -> PrefixNews: ...
