"""The parts of the gateway that need no network: prompts and their trimming, the catalogue, the idempotency map."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungway.clock import NS_PER_S, monotonic_ns
from rungway.contracts import ChannelSpec, GatewaySpec, LadderSpec, LadderTerms, RungSpec, Tenant, Tier
from rungway.engine.chain import chain_keys, word_ids
from rungway.engine.errors import PromptError
from rungway.engine.protocol import Sampling, Work
from rungway.engine.tokenizer import WordTokenizer
from rungway.errors import RequestError
from rungway.gateway.catalogue import Catalogue, Plan
from rungway.gateway.idempotency import PER_TENANT_MIN, Idempotency
from rungway.gateway.identify import KeyRing
from rungway.gateway.links import Links
from rungway.gateway.prefixes import prefix_keys
from rungway.gateway.prompts import Lexer, Prompt, Tokenizers
from rungway.gateway.schema import shown
from rungway.messages import ReplicaInfo, Start
from rungway.outcomes import Code
from rungway.types import Billing
from unit.gateway_rig import CHANNEL, PRICE, RUNGS, api_key, platform, running, tenant, until, version

WORDS = Lexer(WordTokenizer(), True)


class Letters:
    """One token per character; refuses a conversation that does not begin with a user, as strict templates do."""

    vocab_size = 1 << 21
    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def count(self, text: str) -> int:
        return len(text)

    def render_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        roles = [message["role"] for message in messages if message["role"] != "system"]
        if roles[0] != "user":
            raise PromptError("conversation must begin with a user")
        return "".join(message["content"] for message in messages)


def chat(*turns: tuple[str, str]) -> Prompt:
    return Prompt(messages=[{"role": role, "content": content} for role, content in turns])


def test_a_prompt_is_ids_for_real_tokenizers_and_text_for_engines_that_count_words() -> None:
    prompt = chat(("user", "ab cd"))
    rendered = prompt.whole(Lexer(Letters(), False))
    assert (rendered.ids, rendered.tokens) == ([ord(c) for c in "ab cd"], 5)
    assert (prompt.whole(WORDS).ids, prompt.whole(WORDS).tokens) == ([], 3)
    assert Prompt(text="").whole(WORDS).tokens == 1
    assert Prompt(ids=[4, 5]).whole(Lexer(Letters(), False)) == ("", [4, 5], 2)


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.integers(1, 9)), min_size=1, max_size=9),
    st.integers(0, 60),
)
def test_trimming_keeps_system_and_the_last_message_and_drops_no_more_than_needed(
    shape: list[tuple[str, int]], limit: int
) -> None:
    turns = [("system", "S"), *((role, "S" * size if role == "system" else "x" * size) for role, size in shape)]
    turns = [turns[0], ("user", "u"), *turns[1:], ("user", "last")]
    lexer = Lexer(Letters(), False)
    prompt = chat(*turns)
    whole, cut = prompt.whole(lexer), prompt.trimmed(lexer, limit)
    if whole.tokens <= limit:
        assert cut == whole
        return
    assert cut.tokens <= whole.tokens
    assert cut.text.endswith("last")
    assert cut.text.count("S") == whole.text.count("S")
    fitting = []
    for dropped in range(1, len(turns)):
        kept, left = [], dropped
        for role, content in turns[:-1]:
            if role != "system" and left:
                left -= 1
            else:
                kept.append((role, content))
        first = next((role for role, _ in kept if role != "system"), "user")
        size = sum(len(content) for _, content in [*kept, turns[-1]])
        if first == "user" and not left and size <= limit:
            fitting.append(size)
    assert cut.tokens == max(fitting) if fitting else cut.tokens > limit


async def test_a_template_that_refuses_the_messages_is_the_callers_mistake(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        found = rig.gateway.known().versions[("small", "v1")]
        rig.gateway.tokenizers.keep(found, Lexer(Letters(), False))
        answer = await rig.post({"model": "small", "messages": [{"role": "assistant", "content": "x"}]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert "begin with a user" in answer.json()["error"]["message"]
        long = await rig.post({"model": "small", "max_tokens": 2, "messages": [{"role": "user", "content": "x" * 400}]})
        assert long.json()["usage"]["prompt_tokens"] == 400
        # Above the inline bound the same count is made on a thread.
        huge = await rig.post({"model": "small", "messages": [{"role": "user", "content": "x" * 9000}]})
        assert huge.json()["error"]["code"] == "context_length_exceeded"
        assert "9000" in huge.json()["error"]["message"] and "512" in huge.json()["error"]["message"]


async def test_a_tokenizer_that_is_not_there_yet_is_a_503(tmp_path: Path) -> None:
    tokenizers = Tokenizers(tmp_path)
    one = version("small", "v1", backend="native", model="path:" + str(tmp_path / "missing"))
    catalogue = Catalogue(1, platform(tiers=(Tier(name="small", rank=0, price=PRICE, versions=(one,)),), models=()))
    assert await tokenizers.load([one]) is False
    assert tokenizers.lacking([one]) == [one.model]
    with pytest.raises(RequestError) as error:
        tokenizers.of_tier(catalogue, "small")
    assert (error.value.code, error.value.retry_after_s) == (Code.STARTING, 2)


def plan_of(one: Tenant, model: str) -> Any:
    ladder = LadderSpec(rungs=tuple(RungSpec(index=i, name=name, enter=1.0 + i) for i, name in enumerate(RUNGS)))
    return Catalogue(1, platform(tenants=(one,), ladder=ladder)).plan(one, model)


@pytest.mark.parametrize(
    ("terms", "candidates", "may_trim"),
    [
        (LadderTerms(), ("large", "small"), True),
        (LadderTerms(floor="small_tier"), ("large", "small"), True),
        (LadderTerms(floor="context_trim"), ("large",), True),
        (LadderTerms(floor="best_of_1"), ("large",), False),
        (LadderTerms(opt_out=("small_tier",)), ("large",), True),
        (LadderTerms(opt_out=("context_trim",)), ("large", "small"), False),
    ],
)
def test_lower_tiers_are_candidates_only_where_the_terms_let_the_ladder_use_them(
    terms: LadderTerms, candidates: tuple[str, ...], may_trim: bool
) -> None:
    plan = plan_of(tenant("acme", ladder=terms), "large")
    assert (plan.candidates, plan.may_trim) == (candidates, may_trim)


def test_a_contract_without_the_lower_tier_does_not_get_it() -> None:
    assert plan_of(tenant("acme", models=("large",)), "large").candidates == ("large",)
    assert plan_of(tenant("acme", models=("large",)), "small") is None


def test_keys_expire_by_wall_clock() -> None:
    ring = KeyRing([tenant("acme", api_key("k", "secret", expires_ns=1000))])
    assert ring.identify(b"bearer secret", 999).key.id == "k"
    with pytest.raises(RequestError) as error:
        ring.identify(b"Bearer secret", 1000)
    assert error.value.code is Code.KEY_EXPIRED


def test_idempotent_answers_live_for_their_time_within_the_tenants_own_bound() -> None:
    slots: Idempotency[str] = Idempotency()
    slots.configure(["acme", "beta"], 0, 10.0)
    first = slots.claim("acme", "k0", b"d", 0)
    slots.complete("acme", "k0", first, "answer", 0)
    assert slots.claim("acme", "k0", b"d", 10 * NS_PER_S - 1).answer == "answer"
    assert slots.claim("acme", "k0", b"other", 10 * NS_PER_S).answer is None
    for i in range(1, PER_TENANT_MIN):
        slots.claim("acme", f"k{i}", b"d", 0)
    with pytest.raises(RequestError) as error:
        slots.claim("acme", "one-more", b"d", 0)
    assert error.value.code is Code.OVERLOADED
    assert slots.claim("beta", "k", b"d", 0).answer is None
    done = slots.claim("beta", "done", b"d", 0)
    slots.complete("beta", "done", done, "answer", 0)
    slots.expire(10 * NS_PER_S)
    assert slots.size("beta") == 1


def test_room_is_made_from_finished_answers_oldest_first() -> None:
    slots: Idempotency[str] = Idempotency()
    slots.configure(["acme"], 0, 10.0)
    for i in range(PER_TENANT_MIN):
        slots.complete("acme", f"k{i}", slots.claim("acme", f"k{i}", b"d", i), "answer", i)
    slots.claim("acme", "new", b"d", 99)
    assert slots.claim("acme", "k1", b"d", 99).answer == "answer"
    assert slots.size("acme") == PER_TENANT_MIN
    # A late completion of a slot that is no longer there changes nothing.
    lost = slots.claim("acme", "k0", b"d", 99)
    slots.release("acme", "k0", lost)
    slots.complete("acme", "k0", lost, "late", 99)
    assert slots.claim("acme", "k0", b"d", 99).answer is None


async def test_a_start_that_waits_for_its_channel_can_be_taken_back_and_is_given_up_in_time() -> None:
    lost: list[tuple[str, list[str] | None]] = []
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: nobody answers
        links = Links("g", ChannelSpec(lost_after_ms=1000), lambda deltas: None, lambda *what: lost.append(what))
        links.update([ReplicaInfo("r", f"tcp://127.0.0.1:{closed.getsockname()[1]}", "small", "v1", 1, 1)])
        try:
            assert links.start("r", start("req_1"))
            assert links.start("r", start("req_2"))
            assert not links.start("unknown", start("req_3"))
            links.cancel("r", "req_1")
            links.tick(monotonic_ns())
            assert lost == []
            links.tick(monotonic_ns() + 2 * NS_PER_S)
            assert lost == [("r", ["req_2"])]
            assert links.tiers_up() == set()
        finally:
            await links.stop()


async def test_a_start_taken_back_before_its_channel_is_up_reaches_no_engine(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        links = Links("g2", CHANNEL, lambda deltas: None, lambda *what: None)
        links.update(list(rig.controller.replicas.values()))
        try:
            assert links.start("small-1", start("req_1"))
            links.cancel("small-1", "req_1")
            assert links.start("small-1", start("req_2"))
            await until(lambda: rig.controller.ends)
            # Neither a run nor a ban: the same id may come again.
            assert links.start("small-1", start("req_1"))
            await until(lambda: len(rig.controller.ends) == 2)
            assert [(end.request_id, end.finish) for end in rig.controller.ends] == [
                ("req_2", "length"),
                ("req_1", "length"),
            ]
        finally:
            await links.stop()


async def test_a_list_that_comes_after_the_end_opens_nothing(tmp_path: Path) -> None:
    """The controller may see a replica go while the gateway says goodbye."""
    async with running(tmp_path) as rig:
        links = Links("g2", CHANNEL, lambda deltas: None, lambda *what: None)
        links.update(list(rig.controller.replicas.values()))
        await until(lambda: len(links.reachable()) == 2)
        await links.stop()
        links.update(list(rig.controller.replicas.values()))
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "channel-g2"]


def start(request_id: str) -> Start:
    work = Work(request_id=request_id, attempt=1, prompt_ids=[], prompt_text="hi", sampling=Sampling(max_tokens=2))
    billing = Billing(
        tenant="acme",
        key_id="k",
        tenant_class="standard",
        risk="normal",
        action="read",
        model="small",
        tier="small",
        version="v1",
        rung=0,
        degraded=(),
        reason="",
        price=PRICE,
        gateway_id="g2",
        received_wall_ns=0,
    )
    return Start(work, billing)


def test_what_is_quoted_from_a_client_is_short_and_printable() -> None:
    assert shown("a\n\u2028b") == "a\\n\\u2028b"
    assert len(shown("x" * 10_000)) < 80


def test_the_keys_of_a_prompt_are_those_of_each_tiers_engine_and_of_the_tenant_alone() -> None:
    text = " ".join(f"word{at}" for at in range(100))
    catalogue = Catalogue(1, platform())
    tier = next(iter(catalogue.tiers))
    (only,) = {v.backend for v in catalogue.tiers[tier].versions}
    tokenizers = Tokenizers(Path())
    for each in catalogue.versions.values():
        tokenizers.keep(each, WORDS)
    plan = Plan("m", (tier,), (tier,), False)
    size = catalogue.tiers[tier].versions[0].cache_block_tokens
    found, steps = prefix_keys(Prompt(text=text), plan, tokenizers, catalogue, "acme")
    assert steps == {tier: size}
    assert only == "fake" and found == {tier: chain_keys("acme", word_ids(text), size)} and len(found[tier]) == 6
    assert not set(found[tier]) & set(prefix_keys(Prompt(text=text), plan, tokenizers, catalogue, "other")[0][tier])
    ids = list(range(7, 57))
    assert prefix_keys(Prompt(ids=ids), plan, tokenizers, catalogue, "acme")[0] == {tier: chain_keys("acme", ids, size)}
    assert prefix_keys(Prompt(text="short"), plan, tokenizers, catalogue, "acme") == ({}, {})


@pytest.mark.parametrize("bound", [0, 2])
def test_no_more_keys_are_named_than_the_bound_allows(bound: int) -> None:
    catalogue = Catalogue(1, platform(gateway=GatewaySpec(prefix_keys_max=bound)))
    tier = next(iter(catalogue.tiers))
    tokenizers = Tokenizers(Path())
    for each in catalogue.versions.values():
        tokenizers.keep(each, WORDS)
    prompt = Prompt(text="word " * 500)
    found, _ = prefix_keys(prompt, Plan("m", (tier,), (tier,), False), tokenizers, catalogue, "acme")
    assert [len(keys) for keys in found.values()] == ([bound] if bound else [])
