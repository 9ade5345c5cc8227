"""`prompt_logprobs`, and `echo` with `logprobs` and without: shapes, streams, bounds, bills, and a replica that is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from engine.tiny_model import save_tiny_llama
from rungway.contracts import GatewaySpec, Platform, Version
from rungway.engine.fake_script import prompt_tokens
from rungway.engine.protocol import PromptToken, Sampling, Work
from unit.gateway_rig import KEY, Rig, frames, listening, platform, running, until, version

TEXT = "score  these words\nplease [[tokens=3]]"
BODY: dict[str, Any] = {"model": "small", "prompt": TEXT, "temperature": 0, "seed": 1}
COMPLETIONS = "/v1/completions"


def told(prompt: str | list[int] = TEXT, tops: int = 2) -> list[PromptToken]:
    """What the fake engine says of a prompt."""
    ids = prompt if isinstance(prompt, list) else []
    text = prompt if isinstance(prompt, str) else ""
    sampling = Sampling(max_tokens=1, prompt_logprobs=tops)
    return prompt_tokens(Work(request_id="r", attempt=1, prompt_ids=ids, prompt_text=text, sampling=sampling))


async def complete(rig: Rig, **more: Any) -> dict[str, Any]:
    answer = await rig.post(BODY | more, COMPLETIONS)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


async def events_of(rig: Rig, path: str, **body: Any) -> list[Any]:
    events = frames((await rig.post(body | {"stream": True}, path)).text)
    assert events.pop() == "[DONE]"
    return events


def check_listed(listed: list[Any], tokens: list[PromptToken], tops: int) -> None:
    assert listed[0] is None and len(listed) == len(tokens)
    for entry, token in zip(listed[1:], tokens[1:], strict=True):
        own = next(iter(entry.items()))
        assert own == (
            str(token.id),
            {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.data.decode()},
        )
        assert len(entry) == tops + (token.rank > tops)
        for rank, (id_, data, logprob) in enumerate(token.top[:tops], 1):
            assert entry[str(id_)] == {"logprob": logprob, "rank": rank, "decoded_token": data.decode()}


async def test_a_completion_lists_them_in_every_choice_and_a_chat_once(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        shape = await complete(rig, prompt_logprobs=2, n=2)
        for choice in shape["choices"]:
            check_listed(choice["prompt_logprobs"], told(), 2)
            assert choice["logprobs"] is None and not choice["text"].startswith("score")
        chat = (await rig.chat(TEXT, prompt_logprobs=0)).json()
        check_listed(chat["prompt_logprobs"], told(f"user: {TEXT}\n", 0), 0)
        assert "prompt_logprobs" not in chat["choices"][0]
        plain = await complete(rig)
        assert "prompt_logprobs" not in plain["choices"][0]
        assert plain["usage"] == (await complete(rig, prompt_logprobs=2))["usage"], "the bill is that of the tokens"


async def test_an_echo_puts_the_prompt_before_the_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        plain = (await complete(rig, logprobs=1))["choices"][0]
        echo = (await complete(rig, echo=True))["choices"][0]
        assert echo["text"] == TEXT + plain["text"] and echo["logprobs"] is None
        scored = (await complete(rig, echo=True, logprobs=1))["choices"][0]
        assert scored["text"] == TEXT + plain["text"]
        shape, words = scored["logprobs"], told(tops=1)
        own = len(words)
        assert "".join(shape["tokens"]) == scored["text"]
        assert shape["token_logprobs"] == [word.logprob for word in words] + plain["logprobs"]["token_logprobs"]
        assert shape["token_logprobs"][0] is None and shape["top_logprobs"][0] is None
        for word, top in zip(words[1:], shape["top_logprobs"][1:own], strict=True):
            assert top == {word.top[0][1].decode(): word.top[0][2]}
        assert shape["top_logprobs"][own:] == plain["logprobs"]["top_logprobs"]
        starts = shape["text_offset"]
        assert [scored["text"][at:].startswith(t) for at, t in zip(starts, shape["tokens"], strict=True)]
        assert starts == sorted(starts) and starts[own] == len(TEXT)


@pytest.mark.parametrize("prompt", [[5, 6, 7, 8], [[5, 6, 7, 8]]])
async def test_prompts_of_ids_are_echoed_as_their_text(tmp_path: Path, prompt: Any) -> None:
    async with running(tmp_path) as rig:
        plain = (await complete(rig, prompt=prompt))["choices"][0]["text"]
        bare = (await complete(rig, prompt=prompt, echo=True))["choices"][0]
        assert bare["text"] == "5 6 7 8" + plain and bare["logprobs"] is None
        scored = (await complete(rig, prompt=prompt, echo=True, logprobs=1, max_tokens=1))["choices"][0]
        assert scored["logprobs"]["tokens"][:4] == ["5", " 6", " 7", " 8"]
        assert scored["logprobs"]["token_logprobs"][:4] == [token.logprob for token in told([5, 6, 7, 8], 1)]


async def test_scoring_needs_no_token(tmp_path: Path) -> None:
    """As evaluation harnesses ask: nothing is said, nothing but the prompt is billed."""
    async with running(tmp_path) as rig:
        shape = await complete(rig, echo=True, logprobs=1, max_tokens=0)
        [choice] = shape["choices"]
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
        assert choice["logprobs"]["token_logprobs"] == [word.logprob for word in told()]
        assert shape["usage"]["completion_tokens"] == 0
        assert shape["usage"]["prompt_tokens"] == shape["usage"]["total_tokens"] == len(told())
        await until(lambda: rig.controller.ends)
        assert rig.controller.ends[0].usage.output_tokens == 0
        [ask] = rig.controller.asks
        assert (ask.output_bound, ask.prefix_keys, ask.constrained) == (0, {}, True)
        bare = await complete(rig, echo=True, max_tokens=0)
        assert (bare["choices"][0]["text"], bare["choices"][0]["logprobs"]) == (TEXT, None)
        for body in ({"max_tokens": 0}, {"max_tokens": 0, "prompt_logprobs": 1}, {"max_tokens": -1, "echo": True}):
            answer = await rig.post(BODY | body, COMPLETIONS)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens"), body


async def test_a_stream_tells_them_once_in_its_first_chunk_and_says_what_a_whole_answer_says(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        whole = (await complete(rig, echo=True, logprobs=2, prompt_logprobs=1, n=2))["choices"]
        events = await events_of(rig, COMPLETIONS, **BODY, echo=True, logprobs=2, prompt_logprobs=1, n=2)
        chunks = [choice for event in events for choice in event["choices"]]
        assert ["prompt_logprobs" in choice for choice in chunks] == [True] + [False] * (len(chunks) - 1)
        assert chunks[0]["prompt_logprobs"] == whole[0]["prompt_logprobs"]
        for index in (0, 1):
            own = [choice for choice in chunks if choice["index"] == index]
            assert "".join(choice["text"] for choice in own) == whole[index]["text"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [value for choice in own if choice["logprobs"] for value in choice["logprobs"][name]]
                assert joined == whole[index]["logprobs"][name], name
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
        messages = [{"role": "user", "content": TEXT}]
        for more in ({}, {"tools": tools}):
            asked = {"model": "small", "messages": messages, "prompt_logprobs": 1} | more
            want = (await rig.post(asked)).json()["prompt_logprobs"]
            events = await events_of(rig, "/v1/chat/completions", **asked)
            assert ["prompt_logprobs" in event for event in events] == [True] + [False] * (len(events) - 1)
            assert events[0]["prompt_logprobs"] == want


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 4}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 3, "prompt": "w " * 30}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 4}, "logprobs"),
    ({"echo": True, "logprobs": 3, "prompt": "w " * 30}, "echo"),
    ({"echo": 1}, "echo"),
]


async def test_what_is_beyond_the_configured_bounds_is_refused_before_it_costs_anything(tmp_path: Path) -> None:
    spec = GatewaySpec(prompt_logprobs_max=3, prompt_logprobs_values_max=100)
    async with running(tmp_path, msgspec.structs.replace(platform(), gateway=spec)) as rig:
        for change, param in BAD:
            answer = await rig.post(BODY | change, COMPLETIONS)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), change
        assert rig.controller.asks == []
        await complete(rig, prompt="w " * 25, prompt_logprobs=3)
        await complete(rig, prompt="w " * 30, echo=True)


@pytest.mark.parametrize("where", [0, 4])
async def test_a_lost_replica_changes_nothing_and_tells_nothing_twice(tmp_path: Path, where: int) -> None:
    """Lost before the prompt was computed, and in the middle of the answer: a try that has them already computes none."""
    small = version("small", "v1")
    two = {"small-1": small, "small-2": small, "large-1": version("large", "v1")}
    async with running(tmp_path, replicas=two) as rig:
        pace = "[[ttft_ms=80]]" if where == 0 else "[[tpot_ms=50]]"
        body = {"model": "small", "prompt": f"some words {pace}", "max_tokens": 20, "seed": 2}
        asked = body | {"echo": True, "logprobs": 1, "prompt_logprobs": 1}
        want = (await rig.post(asked, COMPLETIONS)).json()["choices"][0]
        task = asyncio.create_task(rig.post(asked | {"stream": True}, COMPLETIONS))
        await until(lambda: rig.running())
        flight = await until_flight(rig)
        await until(lambda: flight.progress.tokens >= where)
        await rig.replicas["small-1"]._server.stop()
        events = frames((await task).text)
        assert events.pop() == "[DONE]"
        assert [retry.why for retry in rig.controller.retries] == ["replica_lost"]
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == want["text"]
        assert [choice["prompt_logprobs"] for choice in choices if "prompt_logprobs" in choice] == [
            want["prompt_logprobs"]
        ]
        values = [v for choice in choices if choice["logprobs"] for v in choice["logprobs"]["token_logprobs"]]
        assert values == want["logprobs"]["token_logprobs"]


async def until_flight(rig: Rig) -> Any:
    await until(lambda: rig.gateway.flights)
    return next(iter(rig.gateway.flights.values()))


async def test_a_repeat_gets_the_same_from_the_cache(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        asked = BODY | {"echo": True, "logprobs": 1, "prompt_logprobs": 1}
        first = await rig.post(asked, COMPLETIONS, idempotency_key="k")
        for stream in (False, True):
            again = await rig.post(asked | {"stream": stream}, COMPLETIONS, idempotency_key="k")
            assert again.headers["x-rungway-idempotent-replay"] == "true"
            want = first.json()["choices"][0]
            if stream:
                [event] = [event for event in frames(again.text) if event != "[DONE]"]
                assert event["choices"][0] == want
            else:
                assert again.json()["choices"] == first.json()["choices"]
        assert len(rig.controller.asks) == 1


async def test_an_echo_is_no_part_of_what_has_to_fit_a_form(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for prompt in ("say {", [5, 6]):
            form = {"prompt": prompt, "structured_outputs": {"choice": ["yes", "no"]}, "echo": True}
            text = (await complete(rig, **form))["choices"][0]["text"]
            assert text.removeprefix("say {" if isinstance(prompt, str) else "5 6") in ("yes", "no")
        assert not any(name == "structured_output_failures_total" for name, _ in rig.controller.counts)


async def test_the_official_client_reads_them(tmp_path: Path) -> None:
    async with running(tmp_path) as rig, listening(rig) as port:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
        async with client:
            answer = await client.completions.create(**BODY, echo=True, logprobs=1, max_tokens=0)
            assert answer.choices[0].logprobs is not None
            assert answer.choices[0].logprobs.token_logprobs == [word.logprob for word in told()]


async def test_a_model_scores_its_prompt_as_transformers_does(tmp_path: Path) -> None:
    """The native engine behind HTTP, for a prompt as text and as ids; every byte is a token of this model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = save_tiny_llama(tmp_path / "model")
    text = "The quick brown fox – and ☂."
    ids = list(text.encode())
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([ids])).logits[0, :-1]
    want = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    native = {
        "model": f"path:{model}",
        "backend": "native",
        "dtype": "float32",
        "fake": None,
        "max_num_batched_tokens": 16,
    }
    small = version("small", "v1", **native)
    both = {"small-1": small, "large-1": version("large", "v1")}
    async with running(tmp_path, platform_of(small), both) as rig:
        for prompt in (text, ids, [ids]):
            for more in ({"max_tokens": 0}, {"max_tokens": 1}):
                body = {"prompt": prompt, "temperature": 0.0, "echo": True, "logprobs": 1} | more
                shape = await complete(rig, **body)
                scored = shape["choices"][0]["logprobs"]
                assert scored["token_logprobs"][0] is None
                assert scored["token_logprobs"][1 : len(ids)] == pytest.approx(want, abs=1e-4)
                assert len(scored["token_logprobs"]) == len(ids) + more["max_tokens"]
                assert shape["choices"][0]["text"].startswith(text)
                assert shape["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def platform_of(small: Version) -> Platform:
    """The usual one, with this version in tier small."""
    usual = platform()
    tiers = tuple(
        msgspec.structs.replace(tier, versions=(small,)) if tier.name == "small" else tier for tier in usual.tiers
    )
    return msgspec.structs.replace(usual, tiers=tiers)
