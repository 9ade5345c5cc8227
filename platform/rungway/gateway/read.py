"""From an HTTP request to an Ask: decode once, check every range, count tokens for every tier that may serve it.

Every refusal here names the field (`error.param`) and costs no engine work. Ranges follow the OpenAI API where it has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

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
from rungway.gateway.prompt_view import HIDDEN, View, view_of
from rungway.gateway.prompts import Prompt, measure
from rungway.gateway.sampling import TOKENS_MAX, check_bias, named_ids, sampling_of, within
from rungway.gateway.schema import ChatBody, CompletionBody, EmbeddingBody, bad, decode_chat, decode_completion, shown
from rungway.gateway.several import Several, several
from rungway.gateway.turns import chat_prompt
from rungway.outcomes import Code
from rungway.policies.features import features
from rungway.types import Ask, Offer, Risk

N_MAX = 8


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
    view: View = HIDDEN

    @property
    def answers(self) -> int:
        """Choices or vectors that the client gets."""
        return len(self.prompt) if isinstance(self.prompt, Inputs) else self.ask.n

    def sequences(self, offer: Offer) -> int:
        """What the engine makes for it: samples, or vectors."""
        return len(self.prompt) if isinstance(self.prompt, Inputs) else max(offer.n, offer.best_of, self.ask.n)


async def read(call: Call, caller: Caller, catalogue: Catalogue) -> Reading | Several:
    """Reads the body and the headers of `call`, a chat or a completion. Raises RequestError for everything that a client can do wrong, and
    ClientGone when it leaves before its body is here."""
    raw = await call.body(catalogue.gateway.body_bytes_max)
    chat = call.endpoint == "chat"
    body: ChatBody | CompletionBody = decode_chat(raw) if chat else decode_completion(raw)
    if isinstance(body, CompletionBody):
        prompts = several(body, raw, call.headers, catalogue.gateway)
        if prompts is not None:
            return prompts
    plan = plan_of(caller.tenant, body.model, catalogue, TierKind.TEXT)
    call.facts.model = plan.model
    directives = read_directives(call.headers, caller.tenant)
    _check_risk(plan, directives, caller.tenant, catalogue)
    stream = bool(body.stream)
    include_usage = _include_usage(body, stream)
    bound = _output_bound(body)
    n, best_of = _samples(body, stream)
    demand = demand_of(body)
    prompt = chat_prompt(body.messages, demand.tools) if isinstance(body, ChatBody) else _completion_prompt(body)
    view = view_of(body, prompt, catalogue.gateway)
    sampling = sampling_of(body, bound, demand, view.wanted)
    tokenizers = call.gateway.tokenizers
    plan = _understood(plan, prompt, sampling, call, catalogue)
    await call.gateway.checks.check(demand, catalogue.gateway)
    lengths = await measure(prompt, plan, tokenizers, catalogue)
    view.check(max(lengths.whole.values()), catalogue.gateway.prompt_logprobs_values_max)
    keys: dict[str, tuple[int, ...]] = {}
    key_tokens: dict[str, int] = {}
    if view.wanted is None:  # else every token is computed, whatever is cached
        keys, key_tokens = prefix_keys(prompt, plan, tokenizers, catalogue, caller.tenant.name)
    seen = features(prompt.written, turns=prompt.turns, max_tokens=bound)
    ask = msgspec.structs.replace(
        ask_of(call, caller, plan, directives, lengths.whole, bound, seen),
        trimmed_tokens=lengths.trimmed if view.wanted is None else lengths.whole,
        stream=stream,
        n=n,
        best_of=best_of,
        constrained=demand.constraint is not None or view.shows,
        prefix_keys=keys,
        key_tokens=key_tokens,
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
        view=view,
    )


def ask_of(
    call: Call,
    caller: Caller,
    plan: Plan,
    directives: Directives,
    prompt_tokens: dict[str, int],
    bound: int | None,
    seen: tuple[float, ...],
) -> Ask:
    """What requests of every kind say of themselves; `bound` = most output tokens, `seen` = the router's features."""
    return Ask(
        request_id=call.id,
        gateway_id=call.gateway.gateway_id,
        tenant=caller.tenant.name,
        key_id=caller.key.id,
        tenant_class=directives.tenant_class,
        model=plan.model,
        tiers=plan.tiers,
        prompt_tokens=prompt_tokens,
        trimmed_tokens={},
        output_bound=bound,
        received_wall_ns=call.received_wall_ns,
        endpoint=call.endpoint,
        risk=directives.risk,
        action=directives.action,
        deadline_ms=directives.deadline_ms,
        session=directives.session,
        features=seen,
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


def _check_risk(plan: Plan, directives: Directives, tenant: Tenant, catalogue: Catalogue) -> None:
    """Raises RequestError where the contract lets none of the model's tiers answer what is marked as high risk: waiting
    would not help."""
    least = catalogue.tiers.get(tenant.risk_high_tier_min or "")
    if directives.risk is not Risk.HIGH or least is None:
        return
    if all(catalogue.tiers[tier].rank < least.rank for tier in plan.tiers):
        raise RequestError(
            Code.MODEL_NOT_ALLOWED,
            f"model '{plan.model}' may not answer with x-rungway-risk: high: this tenant's contract demands at least '{least.name}'",
            param="model",
        )


def _include_usage(body: ChatBody | CompletionBody, stream: bool) -> bool:
    if body.stream_options is None:
        return False
    if not stream:
        raise bad("stream_options", "'stream_options' needs 'stream': true")
    return bool(body.stream_options.include_usage)


def _samples(body: ChatBody | CompletionBody, stream: bool) -> tuple[int, int]:
    """`n` and `best_of`."""
    n = 1 if body.n is None else within("n", body.n, 1, N_MAX)
    best_of = n if body.best_of is None else within("best_of", body.best_of, n, N_MAX)
    if stream and body.use_beam_search:
        raise bad("use_beam_search", "'use_beam_search' cannot be streamed")
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
    least = 0 if isinstance(body, CompletionBody) and body.echo else 1
    if bound < least:
        hint = "" if isinstance(body, ChatBody) or bound else ", or 0 with 'echo': true"
        raise bad(name, f"'{name}' must be at least {least}{hint}")
    return min(bound, TOKENS_MAX)


def _completion_prompt(body: CompletionBody) -> Prompt:
    given = body.prompt
    if isinstance(given, list):
        if given and all(isinstance(element, int) for element in given):
            return Prompt(ids=[element for element in given if isinstance(element, int)])
        if not given:
            raise bad("prompt", "'prompt' must not be empty")
        (only,) = given
        if isinstance(only, list):
            if not only:
                raise bad("prompt", "'prompt' must not be empty")
            return Prompt(ids=only)
        given = str(only)
    if not given:
        raise bad("prompt", "'prompt' must not be empty")
    return Prompt(text=given)


def _understood(plan: Plan, prompt: Prompt, sampling: Sampling, call: Call, catalogue: Catalogue) -> Plan:
    """The plan without tiers to which the request's token ids mean something else. Raises RequestError."""
    if prompt.token_ids is not None:
        plan = _same_vocabulary(plan, "prompt", prompt.token_ids, call, catalogue)
    for param, ids in named_ids(sampling):
        plan = _same_vocabulary(plan, param, ids, call, catalogue)
    if sampling.logit_bias:
        lexers = [lexer for tier in plan.tiers for lexer in call.gateway.tokenizers.of_tier(catalogue, tier)]
        check_bias(sampling.logit_bias, min(lexer.tokenizer.vocab_size for lexer in lexers))
    return plan


def _same_vocabulary(plan: Plan, param: str, ids: Sequence[int], call: Call, catalogue: Catalogue) -> Plan:
    """Token ids mean something to one tokenizer only: tiers with another one are no candidates for them."""
    lexers = {tier: call.gateway.tokenizers.of_tier(catalogue, tier) for tier in plan.candidates}
    first = lexers[plan.tiers[0]]
    if len(first) != 1:
        raise bad(param, f"versions of model '{plan.model}' differ in their tokenizer, so token ids mean nothing here")
    if min(ids) < 0 or max(ids) >= first[0].tokenizer.vocab_size:
        raise bad(param, f"'{param}': token ids must be between 0 and {first[0].tokenizer.vocab_size - 1}")

    def same(tiers: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(tier for tier in tiers if lexers[tier] == first)

    return plan._replace(tiers=same(plan.tiers), candidates=same(plan.candidates))
