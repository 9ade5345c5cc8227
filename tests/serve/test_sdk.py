"""The official OpenAI SDK, unmodified, against a running platform."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI

from support.case_platform import CasePlatform, eventually

pytestmark = pytest.mark.serve

HELLO = [{"role": "user", "content": "hello"}]


def sdk(cases: CasePlatform, tenant: str = "sdk", *, key: str | None = None, retries: int = 0) -> OpenAI:
    return OpenAI(
        base_url=f"{cases.process.url}/v1", api_key=key or cases.keys[tenant], max_retries=retries, timeout=60.0
    )


@pytest.fixture
def client(cases: CasePlatform) -> Iterator[OpenAI]:
    with sdk(cases) as made:
        yield made


def test_a_chat_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="auto", messages=HELLO, max_tokens=5)
    assert answer.object == "chat.completion" and answer.model == "auto"
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and len((choice.message.content or "").split()) == 5
    assert choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 5


def test_a_streamed_answer_is_the_same_text(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="small", messages=HELLO, max_tokens=12, seed=3)
    stream = client.chat.completions.create(
        model="small", messages=HELLO, max_tokens=12, seed=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model="small", prompt="once upon a time", max_tokens=4)
    assert answer.object == "text_completion" and len(answer.choices[0].text.split()) == 4
    chunks = list(client.completions.create(model="small", prompt="once upon a time", max_tokens=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_several_prompts(client: OpenAI, cases: CasePlatform) -> None:
    """As one by one, with a bill for each."""
    before = cases.usage("sdk")
    prompts = ["once upon a time", "call me", "it was"]
    batch = client.completions.create(model="small", prompt=prompts, max_tokens=4, n=2)
    singles = [client.completions.create(model="small", prompt=prompt, max_tokens=4, n=2) for prompt in prompts]
    assert [choice.index for choice in batch.choices] == list(range(6))
    assert [choice.text for choice in batch.choices] == [choice.text for one in singles for choice in one.choices]
    assert batch.usage is not None and (batch.usage.prompt_tokens, batch.usage.completion_tokens) == (8, 24)
    eventually(lambda: cases.usage("sdk")["requests"] == before["requests"] + 6, "each prompt has its row")
    after = cases.usage("sdk")
    assert after["output_tokens"] == before["output_tokens"] + 48
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="small", prompt=["a", ""])
    assert wrong.value.param == "prompt[1]"


def test_several_choices(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="small", messages=HELLO, max_tokens=4, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None and answer.usage.completion_tokens == 12


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="small", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 3
    for token in logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 2
    assert "".join(token.token for token in logprobs.content) == answer.choices[0].message.content


def test_stop(client: OpenAI) -> None:
    full = client.chat.completions.create(model="small", messages=HELLO, max_tokens=8).choices[0].message.content or ""
    third = full.split()[2]
    cut = client.chat.completions.create(model="small", messages=HELLO, max_tokens=8, stop=third).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == full[: full.index(third)]


def test_models(client: OpenAI, cases: CasePlatform) -> None:
    assert {model.id for model in client.models.list()} == {"auto", "small", "large", "embed"}
    assert client.models.retrieve("small").id == "small"
    with sdk(cases, "sdk-small") as other:
        assert {model.id for model in other.models.list()} == {"small"}


def test_errors_are_its_own_exceptions(cases: CasePlatform, client: OpenAI) -> None:
    with sdk(cases, key="rw_sdk_nothing") as stranger, pytest.raises(openai.AuthenticationError) as unknown:
        stranger.chat.completions.create(model="small", messages=HELLO)
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="small", messages=HELLO, temperature=5)
    assert wrong.value.param == "temperature"
    with sdk(cases, "sdk-small") as small, pytest.raises(openai.PermissionDeniedError) as denied:
        small.chat.completions.create(model="large", messages=HELLO)
    assert denied.value.code == "model_not_allowed"
    with sdk(cases, "sdk-poor") as poor, pytest.raises(openai.RateLimitError) as spent:
        poor.chat.completions.create(model="small", messages=HELLO)
    assert (spent.value.code, spent.value.type) == ("budget_exhausted", "insufficient_quota")


def test_errors_before_a_stream_are_raised_at_once(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="small", messages=[], stream=True)


def test_a_spent_budget_is_not_retried(cases: CasePlatform) -> None:
    before = cases.usage("sdk-poor")["requests"]
    with sdk(cases, "sdk-poor", retries=2) as poor, pytest.raises(openai.RateLimitError):
        poor.chat.completions.create(model="small", messages=HELLO)
    assert cases.usage("sdk-poor")["requests"] == before + 1


def test_its_retries_wait_as_long_as_they_were_told(cases: CasePlatform) -> None:
    with sdk(cases, "sdk-rpm") as client:
        try:
            while True:
                client.chat.completions.create(model="small", messages=HELLO, max_tokens=1)
        except openai.RateLimitError as refused:
            wait_s = int(refused.response.headers["retry-after"])
    started = time.monotonic()
    with sdk(cases, "sdk-rpm", retries=2) as patient:
        answer = patient.chat.completions.create(model="small", messages=HELLO, max_tokens=1)
    assert answer.choices[0].message.content
    assert time.monotonic() - started >= min(wait_s, 1) * 0.5, "it waited, it did not hammer"


def test_headers_reach_the_caller(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="small", messages=HELLO, max_tokens=2)
    assert raw.headers["x-request-id"].startswith("req_")
    assert raw.headers["x-rungway-degraded"] == "none"
    assert raw.parse().choices[0].finish_reason == "length"
    assert httpx.Headers(raw.headers)["x-rungway-model-served"] == "small/fake"


def test_embeddings(client: OpenAI, cases: CasePlatform) -> None:
    """Both encodings say the same; the SDK asks for base64 where nothing is said."""
    before = cases.usage("sdk")
    texts = ["a cat on a mat", "revenue grew", "a cat on a mat"]
    plain = client.embeddings.create(model="embed", input=texts, encoding_format="float")
    packed = client.embeddings.create(model="embed", input=texts)
    assert [one.index for one in plain.data] == [0, 1, 2] and len(plain.data[0].embedding) == 384
    for one, other in zip(plain.data, packed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
    assert plain.data[0].embedding == plain.data[2].embedding != plain.data[1].embedding
    assert sum(value**2 for value in plain.data[0].embedding) == pytest.approx(1.0, abs=1e-5)
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens, plain.model) == (12, 12, "embed")
    eventually(lambda: cases.usage("sdk")["requests"] == before["requests"] + 2, "both requests are in the ledger")
    after = cases.usage("sdk")
    assert after["input_tokens"] == before["input_tokens"] + 24 and after["output_tokens"] == before["output_tokens"]
    with pytest.raises(openai.BadRequestError) as wrong:
        client.embeddings.create(model="small", input="x")
    assert wrong.value.param == "model"
    with pytest.raises(openai.BadRequestError) as empty:
        client.embeddings.create(model="embed", input=[])
    assert empty.value.param == "input"
