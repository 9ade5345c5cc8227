"""The fields beyond OpenAI's that say which tokens may come: what reaches the engine, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rungway.engine.protocol import Sampling, Work
from rungway.gateway import sampling
from rungway.gateway.sampling import bad_words
from unit.gateway_rig import running

USER = [{"role": "user", "content": "hi [[tokens=3]]"}]
FIELDS: dict[str, Any] = {
    "min_tokens": 2,
    "stop_token_ids": [7, 9, 7],
    "include_stop_str_in_output": True,
    "allowed_token_ids": [1, 65535],
    "bad_words": [" worse", "bad"],
    "skip_special_tokens": False,
}


async def test_the_fields_reach_the_engine_on_both_routes(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        engine = rig.replicas["small-1"]._engine
        seen: list[Work] = []
        submit = engine.submit
        engine.submit = lambda work: (seen.append(work), submit(work))[1]  # type: ignore[method-assign,func-returns-value]
        for path, prompt in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "x"})):
            answer = await rig.post({"model": "small", "max_tokens": 3, **prompt, **FIELDS}, path)
            assert answer.status_code == 200, answer.text
            free = await rig.post({"model": "small", "max_tokens": 3, **prompt, **dict.fromkeys(FIELDS)}, path)
            assert free.status_code == 200, "null is the same as leaving a field out"
        for work, plain in (seen[:2], seen[2:]):
            ask = work.sampling
            assert (ask.min_tokens, ask.stop_token_ids, ask.allowed_token_ids) == (2, (7, 9), (1, 65535))
            assert ask.include_stop_str_in_output and not ask.skip_special_tokens
            assert plain.sampling == Sampling(max_tokens=3)


async def test_what_makes_no_sense_is_a_400_that_names_the_field(tmp_path: Path) -> None:
    wrong: list[tuple[str, Any]] = [
        ("min_tokens", -1),
        ("min_tokens", 4),
        ("min_tokens", True),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [1] * (sampling.STOP_IDS_MAX + 1)),
        ("stop_token_ids", 5),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [65536]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [0] * (sampling.ALLOWED_IDS_MAX + 1)),
        ("logit_bias", {"65536": 1}),
        ("bad_words", [""]),
        ("bad_words", ["  "]),
        ("bad_words", ["x" * (sampling.BAD_WORD_CHARS_MAX + 1)]),
        ("bad_words", ["x"] * (sampling.BAD_WORDS_MAX + 1)),
        ("bad_words", "x"),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", 1),
    ]
    async with running(tmp_path) as rig:
        for name, value in wrong:
            answer = await rig.post({"model": "small", "messages": USER, "max_tokens": 3, name: value})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["code"] == "invalid_request", (name, value)
            assert error["param"].startswith(name) and name in error["message"], (name, value)
        form = {"structured_outputs": {"regex": "a+"}, "min_tokens": 1}
        answer = await rig.post({"model": "small", "messages": USER, "max_tokens": 3, **form})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "min_tokens"
        assert rig.controller.asks == [], "a refusal asks nobody"


async def test_min_tokens_gives_way_to_what_was_granted(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        answer = await rig.post({"model": "small", "messages": USER, "min_tokens": 2**31 - 1})
        assert answer.status_code == 200, answer.text


class Letters:
    """A token per character behind a beginning token, spaces joined to what follows."""

    vocab_size = 1 << 16
    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [1, *(ord(letter) + 1000 * (at > 0 and text[at - 1] == " ") for at, letter in enumerate(text) if letter != " ")]  # fmt: skip

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def render_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        return ""


def test_bad_words_are_spelled_with_and_without_a_space_before_them() -> None:
    assert bad_words(["ab", " b"], Letters()) == ((97, 98), (1097, 98), (98,), (1098,))
    assert bad_words(None, Letters()) == bad_words([], Letters()) == ()


async def test_beams_come_whole_in_their_own_order_and_are_all_billed(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        engine = rig.replicas["small-1"]._engine
        seen: list[Work] = []
        submit = engine.submit
        engine.submit = lambda work: (seen.append(work), submit(work))[1]  # type: ignore[method-assign,func-returns-value]
        base = {"model": "small", "messages": USER, "max_tokens": 3}
        plain = (await rig.post(base | {"n": 3})).json()
        search = (await rig.post(base | {"n": 2, "best_of": 3, "use_beam_search": True, "length_penalty": 0.5})).json()
        more = {"use_beam_search": True, "stop": ["x"], "logprobs": True, "top_logprobs": 2}
        assert len((await rig.post(base | more)).json()["choices"][0]["logprobs"]["content"]) == 3
        assert (seen[1].sampling.use_beam_search, seen[1].sampling.length_penalty, seen[1].sequences) == (True, 0.5, 3)
        texts = [choice["message"]["content"] for choice in plain["choices"]]
        assert [choice["message"]["content"] for choice in search["choices"]] == texts[:2], "the engine has ranked them"
        assert search["usage"]["completion_tokens"] == 9


async def test_what_beams_cannot_go_with_is_refused_by_name(tmp_path: Path) -> None:
    wrong: list[tuple[str, Any]] = [
        ("logit_bias", {"1": 1}),
        ("presence_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("min_tokens", 1),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("length_penalty", 11),
    ]
    async with running(tmp_path) as rig:
        base = {"model": "small", "messages": USER, "max_tokens": 3, "use_beam_search": True}
        for name, value in wrong:
            answer = await rig.post(base | {name: value})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name, name
        for change in ({"stream": True}, {"structured_outputs": {"choice": ["a"]}}):
            answer = await rig.post(base | change)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "use_beam_search"
        alone = await rig.post({"model": "small", "messages": USER, "length_penalty": 0.5})
        assert alone.status_code == 400 and alone.json()["error"]["param"] == "length_penalty"
        neutral = {"presence_penalty": 0, "repetition_penalty": 1, "logprobs": False, "min_tokens": 0}
        assert (await rig.post(base | neutral)).status_code == 200
