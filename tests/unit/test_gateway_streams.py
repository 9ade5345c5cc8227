"""Server-sent events: framing, usage, characters, and the official SDK as the reader."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rungway.engine.protocol import Delta, TokenLogprob
from rungway.gateway.answer import Facts, text_logprobs
from rungway.gateway.sse import Frames
from unit.gateway_rig import KEY, WAIT_S, frames, listening, running, said

TEXT = "ďábel 日本語 👩‍👩‍👧 🔥\r\n\u2028end"
MODELS = ["small", "auto"]


@given(st.text(alphabet=st.sampled_from("aé日😀\ufffd "), min_size=1, max_size=12), st.data())
def test_completions_tell_pieces_of_characters_apart(text: str, data: st.DataObject) -> None:
    """Alternatives that all read alike must not fall together, and offsets are those of characters in the text."""
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1)))) if len(raw) > 1 else []
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    top = [(piece.decode("utf-8", "replace"), piece, -1.0) for piece in dict.fromkeys(pieces)]
    tokens = [TokenLogprob(piece.decode("utf-8", "replace"), piece, -1.0, top) for piece in pieces]
    shape = json.loads(text_logprobs(tokens, 5))
    assert {len(listed) for listed in shape["top_logprobs"]} == {len(top)}
    assert dict(zip(pieces, shape["tokens"], strict=True)).keys() == set(pieces)
    assert len(set(shape["tokens"])) == len(set(pieces))
    ends = [sum(map(len, pieces[:at])) for at in range(len(pieces))]
    begun = [sum(1 for k in range(len(text)) if len(text[:k].encode()) < end) for end in ends]
    assert shape["text_offset"] == [5 + count for count in begun]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_comes_only_when_asked_for_and_then_last(tmp_path: Path, model: str, path: str) -> None:
    ask: dict[str, Any] = {"model": model, "max_tokens": 8}
    if path == "/v1/completions":
        ask["prompt"] = "one two three"
    else:
        ask["messages"] = [{"role": "user", "content": "one two three"}]
    async with running(tmp_path) as rig:
        whole = (await rig.post(ask, path)).json()
        variants: list[dict[str, Any]] = [{}] + [
            {"stream_options": options} for options in ({}, None, {"include_usage": False}, {"include_usage": True})
        ]
        for variant in variants:
            events = frames((await rig.post(ask | {"stream": True} | variant, path)).text)
            assert events.pop() == "[DONE]"
            wanted = variant.get("stream_options") == {"include_usage": True}
            if wanted:
                last = events.pop()
                assert last["choices"] == []
                assert last["usage"] == whole["usage"]
                assert last["usage"]["completion_tokens"] == 8
            assert all(event.get("usage") is None and event["choices"] for event in events)
            assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
        finishes = await rig.settled(6)
        assert {(f.outcome, tuple(f.delivered.items())) for f in finishes} == {("length", ((1, 8),))}
        await asyncio.wait_for(_ends(rig, 6), WAIT_S)
        assert {end.usage.output_tokens for end in rig.controller.ends} == {8}


async def _ends(rig: Any, count: int) -> None:
    while len(rig.controller.ends) < count:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("n", [1, 3])
async def test_usage_of_a_stream_is_that_of_the_whole_answer_over_all_its_choices(tmp_path: Path, n: int) -> None:
    async with running(tmp_path) as rig:
        ask: dict[str, Any] = {"n": n, "max_tokens": 7}
        whole = (await rig.chat("one two three", **ask)).json()
        events = frames(
            (await rig.chat("one two three", stream=True, stream_options={"include_usage": True}, **ask)).text
        )
        assert events[-2]["usage"] == whole["usage"]
        assert whole["usage"]["completion_tokens"] == 7 * n
        assert [event for event in events[:-2] if event.get("usage")] == []


async def test_a_stream_and_a_whole_answer_say_the_same_characters(tmp_path: Path) -> None:
    prompt = f"[[emit={quote_from_bytes(TEXT.encode())}]]"
    total = len(TEXT.encode())
    async with running(tmp_path) as rig:
        whole = (await rig.chat(prompt, max_tokens=200)).json()
        assert whole["choices"][0]["message"]["content"] == TEXT
        assert whole["choices"][0]["finish_reason"] == "stop"
        both = await asyncio.gather(*[rig.chat(prompt, max_tokens=200, stream=True) for _ in range(2)])
        for answer in both:
            assert answer.text.isascii()
            assert len(answer.text.splitlines()) == answer.text.count("\n")
            assert "\\ufffd" not in answer.text
            assert said(frames(answer.text)) == TEXT
        assert whole["usage"]["completion_tokens"] == total


async def test_a_cut_inside_a_character_ends_the_same_way_in_both_modes(tmp_path: Path) -> None:
    prompt = f"[[emit={quote_from_bytes(TEXT.encode())}]]"
    cut = len(TEXT[: TEXT.index("🔥")].encode()) + 2
    async with running(tmp_path) as rig:
        whole = (await rig.chat(prompt, max_tokens=cut)).json()
        options = {"include_usage": True}
        events = frames((await rig.chat(prompt, max_tokens=cut, stream=True, stream_options=options)).text)
        content = whole["choices"][0]["message"]["content"]
        assert said(events) == content
        assert content.rstrip("\ufffd") == TEXT[: TEXT.index("🔥")]
        assert whole["choices"][0]["finish_reason"] == "length"
        assert [e["choices"][0]["finish_reason"] for e in events[:-2]].count("length") == 1
        assert whole["usage"]["completion_tokens"] == events[-2]["usage"]["completion_tokens"] == cut


async def test_each_choice_has_one_role_and_one_finish_reason(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        whole = (await rig.chat("go [[tokens=6]]", n=3)).json()
        events = frames((await rig.chat("go [[tokens=6]]", n=3, stream=True)).text)[:-1]
        for index in range(3):
            chunks = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
            assert [c["delta"].get("role") for c in chunks].count("assistant") == 1
            assert chunks[0]["delta"]["role"] == "assistant"
            assert [c["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
            assert said(events, index) == whole["choices"][index]["message"]["content"]


async def test_stop_strings_and_logprobs_in_a_stream(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        text = (await rig.chat("x [[tokens=9]]")).json()["choices"][0]["message"]["content"]
        word = text.split()[4]
        events = frames((await rig.chat("x [[tokens=9]]", stop=word, stream=True)).text)
        assert said(events) == text[: text.index(word)]
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        events = frames((await rig.chat("x [[tokens=4]]", stream=True, logprobs=True, top_logprobs=1)).text)[:-1]
        tokens = [t for e in events if e["choices"][0]["logprobs"] for t in e["choices"][0]["logprobs"]["content"]]
        assert "".join(t["token"] for t in tokens) == said(events)
        ask = {"model": "small", "prompt": "x [[tokens=4]]", "logprobs": 1}
        whole = (await rig.post(ask, "/v1/completions")).json()["choices"][0]
        events = frames((await rig.post(ask | {"stream": True}, "/v1/completions")).text)[:-1]
        parts = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [value for part in parts for value in part[name]] == whole["logprobs"][name]


def test_minus_infinity_never_reaches_json() -> None:
    token = TokenLogprob("a", b"a", float("-inf"), [("a", b"a", float("-inf"))])
    for chat in (True, False):
        frame = Frames(Facts("req_1", "m"), 1, chat).frame(Delta("req_1", 1, 0, "a", [1], [token]))
        assert "-9999.0" in frame
        json.loads(frame[6:], parse_constant=lambda name: pytest.fail(name))


def test_deltas_without_news_make_no_frame() -> None:
    made = Frames(Facts("req_1", "m"), 1, True)
    assert made.frame(Delta("req_1", 1, 0, "", [1])) == ""
    assert '"role":"assistant"' in made.frame(Delta("req_1", 1, 0, "x", [2]))
    assert made.frame(Delta("req_1", 1, 0, "", [3])) == ""
    assert '"delta":{}' in made.frame(Delta("req_1", 1, 0, "", [], None, "stop"))


async def test_the_official_sdk_reads_answers_streams_and_errors(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        transport = httpx.ASGITransport(app=rig.app)
        http = httpx.AsyncClient(transport=transport)
        async with openai.AsyncOpenAI(
            api_key=KEY, base_url="http://gateway/v1", http_client=http, max_retries=0
        ) as sdk:
            hello: Any = [{"role": "user", "content": "hello [[tokens=6]]"}]
            whole = await sdk.chat.completions.create(model="small", messages=hello)
            stream = await sdk.chat.completions.create(
                model="small", messages=hello, stream=True, stream_options={"include_usage": True}
            )
            text, usage = "", None
            async for chunk in stream:
                usage = chunk.usage or usage
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            assert text == whole.choices[0].message.content
            assert usage is not None and usage == whole.usage
            finished = None
            async with sdk.chat.completions.stream(model="small", messages=hello) as events:
                async for _ in events:
                    pass
                finished = await events.get_final_completion()
            assert finished.choices[0].message.content == text
            legacy = await sdk.completions.create(model="small", prompt="hello [[tokens=6]]", logprobs=2)
            assert legacy.choices[0].logprobs is not None and len(legacy.choices[0].logprobs.tokens or []) == 6
            assert [model.id async for model in await sdk.models.list()] == ["auto", "small", "large"]
            with pytest.raises(openai.NotFoundError) as missing:
                await sdk.chat.completions.create(model="nope", messages=hello, stream=True)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.AuthenticationError):
                await sdk.with_options(api_key="rw_wrong").models.list()


async def test_tokens_that_gathered_leave_in_one_message(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        sizes: list[int] = []
        gate = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sizes.append(message["body"].count(b"data: "))
                if len(sizes) == 1:
                    await gate.wait()

        task = asyncio.create_task(rig.app(_scope(), _receive("[[tokens=60]]", stream=True), send))
        await asyncio.wait_for(_ends(rig, 1), WAIT_S)
        gate.set()
        await asyncio.wait_for(task, WAIT_S)
        # The first message, then all the rest of the deltas at once, then [DONE].
        assert len(sizes) == 3
        assert sizes[1] > 3


def _scope() -> dict[str, Any]:
    headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}


def _receive(content: str, **body: Any) -> Any:
    raw = json.dumps({"model": "small", "messages": [{"role": "user", "content": content}], "max_tokens": 100, **body})
    messages = [{"type": "http.request", "body": raw.encode()}]
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


async def test_errors_before_the_first_token_leave_the_connection_usable(tmp_path: Path) -> None:
    async with running(tmp_path) as rig, listening(rig) as port:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with httpx.AsyncClient(headers=rig.headers, limits=limits, timeout=WAIT_S) as http:
            for content, status in [(b"{", 400), (b"x" * 300_000, 413), (b'{"model":"nope","messages":[]}', 404)]:
                answer = await http.post(url, content=content, headers={"content-type": "application/json"})
                assert answer.status_code == status
            messages = [{"role": "user", "content": "hi [[tokens=3]]"}]
            good = await http.post(url, json={"model": "small", "stream": True, "messages": messages})
            assert frames(good.text)[-1] == "[DONE]"
