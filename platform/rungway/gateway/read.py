"""From an HTTP request to an Ask: decode once, check every range, count tokens for every tier that may serve it.

Every refusal here names the field (`error.param`) and costs no engine work. Ranges follow the OpenAI API where it has one.
"""

from __future__ import annotations

from dataclasses import dataclass

from rungway.contracts import Tenant, TierKind
from rungway.engine.protocol import Sampling
from rungway.errors import RequestError
from rungway.gateway.call import Call
from rungway.gateway.catalogue import Catalogue, Plan
from rungway.gateway.constrain import Demand, demand_of
from rungway.gateway.directives import Directives, read_directives
from rungway.gateway.identify import Caller
from rungway.gateway.inputs import Inputs
from rungway.gateway.prefixes import prefix_keys
from rungway.gateway.prompts import Prompt, measure
from rungway.gateway.schema import ChatBody, CompletionBody, EmbeddingBody, bad, decode_chat, decode_completion, shown
from rungway.gateway.turns import chat_prompt
from rungway.outcomes import Code
from rungway.policies.features import features
from rungway.types import Ask, Offer

N_MAX = 8
STOPS_MAX = 4
STOP_CHARS_MAX = 512
BIASES_MAX = 300
TOP_LOGPROBS_CHAT_MAX = 20
TOP_LOGPROBS_COMPLETION_MAX = 5
SEED_BITS = 63
_TOKENS_MAX = 2**31 - 1


@dataclass(slots=True, kw_only=True)
class Reading:
    """A request that makes sense: what goes to the controller (`ask`), to the engine, and back to the client."""

    body: ChatBody | CompletionBody | EmbeddingBody
    ask: Ask
    plan: Plan
    prompt: Prompt | Inputs
    sampling: Sampling
    demand: Demand
    directives: Directives
    tenant: Tenant
    chat: bool
    stream: bool
    include_usage: bool

    @property
    def answers(self) -> int:
        """Choices or vectors that the client gets."""
        return len(self.prompt) if isinstance(self.prompt, Inputs) else self.ask.n

    def sequences(self, offer: Offer) -> int:
        """What the engine makes for it: samples, or vectors."""
        return len(self.prompt) if isinstance(self.prompt, Inputs) else max(offer.n, offer.best_of, self.ask.n)


async def read(call: Call, caller: Caller, catalogue: Catalogue) -> Reading:
    """Reads the body and the headers of `call`, a chat or a completion. Raises RequestError for everything that a client can do wrong, and
    ClientGone when it leaves before its body is here."""
    raw = await call.body(catalogue.gateway.body_bytes_max)
    chat = call.endpoint == "chat"
    body: ChatBody | CompletionBody = decode_chat(raw) if chat else decode_completion(raw)
    plan = plan_of(caller.tenant, body.model, catalogue, TierKind.TEXT)
    call.facts.model = plan.model
    directives = read_directives(call.headers, caller.tenant)
    stream = bool(body.stream)
    include_usage = _include_usage(body, stream)
    bound = _output_bound(body)
    n, best_of = _samples(body, stream)
    demand = demand_of(body)
    sampling = _sampling(body, bound, demand)
    prompt = chat_prompt(body.messages, demand.tools) if isinstance(body, ChatBody) else _completion_prompt(body)
    tokenizers = call.gateway.tokenizers
    if prompt.token_ids is not None:
        plan = _same_vocabulary(plan, prompt.token_ids, call, catalogue)
    if sampling.logit_bias:
        _check_bias(sampling.logit_bias, plan, call, catalogue)
    await call.gateway.checks.check(demand, catalogue.gateway)
    lengths = await measure(prompt, plan, tokenizers, catalogue)
    ask = Ask(
        request_id=call.id,
        gateway_id=call.gateway.gateway_id,
        tenant=caller.tenant.name,
        key_id=caller.key.id,
        tenant_class=directives.tenant_class,
        model=plan.model,
        tiers=plan.tiers,
        prompt_tokens=lengths.whole,
        trimmed_tokens=lengths.trimmed,
        output_bound=bound,
        received_wall_ns=call.received_wall_ns,
        endpoint=call.endpoint,
        stream=stream,
        risk=directives.risk,
        action=directives.action,
        n=n,
        best_of=best_of,
        deadline_ms=directives.deadline_ms,
        session=directives.session,
        constrained=demand.constraint is not None,
        prefix_keys=prefix_keys(prompt, plan, tokenizers, catalogue, caller.tenant.name),
        features=features(prompt.written, turns=prompt.turns, max_tokens=bound),
    )
    return Reading(
        body=body,
        ask=ask,
        plan=plan,
        prompt=prompt,
        sampling=sampling,
        demand=demand,
        directives=directives,
        tenant=caller.tenant,
        chat=chat,
        stream=stream,
        include_usage=include_usage,
    )


def plan_of(tenant: Tenant, model: str, catalogue: Catalogue, kind: TierKind) -> Plan:
    """What the tenant gets for `model`. Raises RequestError where there is no such model, where it is not the tenant's, or
    where it answers with something else than `kind`."""
    plan = catalogue.plan(tenant, model)
    if plan is not None:
        if catalogue.tiers[plan.tiers[0]].kind is kind:
            return plan
        other = "makes embeddings; send it to /v1/embeddings" if kind is TierKind.TEXT else "makes no embeddings"
        raise bad("model", f"model '{model}' {other}")
    if catalogue.exists(model):
        raise RequestError(Code.MODEL_NOT_ALLOWED, f"model '{model}' is not in this tenant's contract", param="model")
    raise RequestError(Code.MODEL_NOT_FOUND, f"there is no model '{shown(model)}'", param="model")


def _include_usage(body: ChatBody | CompletionBody, stream: bool) -> bool:
    if body.stream_options is None:
        return False
    if not stream:
        raise bad("stream_options", "'stream_options' needs 'stream': true")
    return bool(body.stream_options.include_usage)


def _samples(body: ChatBody | CompletionBody, stream: bool) -> tuple[int, int]:
    """`n` and `best_of`."""
    n = 1 if body.n is None else _within("n", body.n, 1, N_MAX)
    best_of = n if body.best_of is None else _within("best_of", body.best_of, n, N_MAX)
    if stream and best_of > n:
        raise bad("best_of", "'best_of' above 'n' cannot be streamed")
    return n, best_of


def _output_bound(body: ChatBody | CompletionBody) -> int | None:
    bound, name = body.max_tokens, "max_tokens"
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        if bound is not None and bound != body.max_completion_tokens:
            raise bad("max_completion_tokens", "'max_completion_tokens' and 'max_tokens' are both given and differ")
        bound, name = body.max_completion_tokens, "max_completion_tokens"
    if bound is None:
        return None
    if bound < 1:
        raise bad(name, f"'{name}' must be at least 1")
    return min(bound, _TOKENS_MAX)


def _sampling(body: ChatBody | CompletionBody, bound: int | None, demand: Demand) -> Sampling:
    """`max_tokens` here is the client's bound; the grant's own bound replaces it."""
    if body.seed is not None and body.seed.bit_length() > SEED_BITS:
        raise bad("seed", "'seed' must fit into 64 bits")
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise bad("top_p", "'top_p' must be above 0 and at most 1")
    if body.repetition_penalty is not None and not 0 < body.repetition_penalty <= 10:
        raise bad("repetition_penalty", "'repetition_penalty' must be above 0 and at most 10")
    return Sampling(
        max_tokens=bound or 1,
        temperature=_ranged("temperature", body.temperature, 1.0, 0, 2),
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k is None else max(0, _within("top_k", body.top_k, -1, _TOKENS_MAX)),
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
    )


def _within(name: str, value: int, low: int, high: int) -> int:
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


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        if body.echo:
            raise bad("echo", "'echo' is not supported in this version")
        return None if body.logprobs is None else _within("logprobs", body.logprobs, 0, TOP_LOGPROBS_COMPLETION_MAX)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise bad("top_logprobs", "'top_logprobs' needs 'logprobs': true")
        return _within("top_logprobs", body.top_logprobs, 0, TOP_LOGPROBS_CHAT_MAX)
    return 0 if body.logprobs else None


def _completion_prompt(body: CompletionBody) -> Prompt:
    given = body.prompt
    if isinstance(given, list):
        if given and all(isinstance(element, int) for element in given):
            return Prompt(ids=[element for element in given if isinstance(element, int)])
        if len(given) != 1:
            raise bad("prompt", "'prompt' takes one string or one list of token ids, not several prompts")
        only = given[0]
        if isinstance(only, list):
            if not only:
                raise bad("prompt", "'prompt' must not be empty")
            return Prompt(ids=only)
        given = str(only)
    if not given:
        raise bad("prompt", "'prompt' must not be empty")
    return Prompt(text=given)


def _same_vocabulary(plan: Plan, ids: list[int], call: Call, catalogue: Catalogue) -> Plan:
    """Token ids mean something to one tokenizer only: tiers with another one are no candidates for them."""
    lexers = {tier: call.gateway.tokenizers.of_tier(catalogue, tier) for tier in plan.candidates}
    first = lexers[plan.tiers[0]]
    if len(first) != 1:
        raise bad("prompt", f"versions of model '{plan.model}' differ in their tokenizer; send text, not token ids")
    if min(ids) < 0 or max(ids) >= first[0].tokenizer.vocab_size:
        raise bad("prompt", f"token ids must be between 0 and {first[0].tokenizer.vocab_size - 1}")

    def same(tiers: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(tier for tier in tiers if lexers[tier] == first)

    return plan._replace(tiers=same(plan.tiers), candidates=same(plan.candidates))


def _check_bias(bias: dict[int, float], plan: Plan, call: Call, catalogue: Catalogue) -> None:
    lexers = [lexer for tier in plan.tiers for lexer in call.gateway.tokenizers.of_tier(catalogue, tier)]
    size = min(lexer.tokenizer.vocab_size for lexer in lexers)
    if max(bias) >= size:
        raise bad("logit_bias", f"'logit_bias' has a token id above {size - 1}")
