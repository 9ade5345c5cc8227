"""Whatever stands in a body, the answer is one that the API documents: no field, alone or beside others, makes a 500."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from unit.gateway_rig import frames
from unit.test_gateway_embeddings import running_embed

BODIES = 150
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "é"]}}, "required": ["a"], "additionalProperties": False}
CITY = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}]}
USER = {"role": "user", "content": "hi"}
# Each field with values that are served (often), at the edge of what is, or beyond it.
FIELDS: dict[str, list[Any]] = {
    "model": ["small", "small", "auto", "large", "nope", "", "a\u0000b"],
    "messages": [
        [USER],
        [USER, CALLED, {"role": "tool", "tool_call_id": "c", "content": "x"}],
        [CALLED],
        [{"role": "x"}],
    ],
    "prompt": ["hi", ["hi"], [1, 2], [[3]], [70_000], "", "\u0000", ["a", "b"]],
    "input": ["hi", ["a", "b"], [1, 2], [[1], [2]], "", [[]], [1, "a"], ["a"] * 30],
    "encoding_format": ["float", "base64", "hex"],
    "dimensions": [384, 1],
    "truncate_prompt_tokens": [-1, 1, 10**9],
    "max_tokens": [1, 3, 5, 10**30, 0],
    "min_tokens": [0, 1, 3, 9],
    "temperature": [0, 1, 2, 1e-300, 3],
    "top_p": [1, 0.5, 1e-300, 0],
    "top_k": [-1, 0, 1, 2**31 - 1, 2**31],
    "min_p": [0, 1, 2],
    "seed": [0, -1, 2**63 - 1, -(2**63), 2**80],
    "n": [1, 2, 8, 9],
    "best_of": [1, 2, 8],
    "logprobs": [True, False, 0, 5, 6, None],
    "top_logprobs": [0, 20, 21],
    "echo": [True, False],
    "prompt_logprobs": [0, 1, 99, -1],
    "stop": ["a", ["a", "é"], [], "", ["x"] * 5],
    "stop_token_ids": [[1], [], [-1], [2**40]],
    "allowed_token_ids": [[1, 2], [], [-1]],
    "bad_words": [["a"], [" "], ["é" * 129]],
    "logit_bias": [{"1": 1}, {"1": -100}, {"x": 1}, {"1": 1e9}],
    "ignore_eos": [True, False],
    "use_beam_search": [True, False],
    "length_penalty": [1, 11],
    "repetition_penalty": [1, 1e-300, 0],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
        {"type": "text"},
    ],
    "structured_outputs": [
        {"choice": ["é", "a"]},
        {"regex": "(a+)+b"},
        {"regex": "("},
        {"grammar": "start: start"},
        {},
    ],
    "tools": [[CITY], [CITY, CITY], []],
    "tool_choice": ["auto", "required", "none", {"type": "function", "function": {"name": "f"}}, {}],
    "parallel_tool_calls": [True, False],
    "stream": [True, False, "yes"],
    "stream_options": [{"include_usage": True}, {}],
    "user": ["u", 5],
    "unheard_of": [1],
}
NEEDED = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input"}


def body(chance: random.Random, path: str) -> dict[str, Any]:
    """Mostly sound: a body with five bad fields would be refused for the first one only."""
    made: dict[str, Any] = {"model": "embed" if "embed" in path else "small", NEEDED[path]: FIELDS[NEEDED[path]][0]}
    for name in chance.sample(sorted(FIELDS), chance.randint(0, 7)):
        values = FIELDS[name]
        made[name] = chance.choice(values[:2] if chance.random() < 0.8 else [*values, None, {}, "junk"])
    return made


@pytest.mark.parametrize("seed", range(3))
async def test_no_body_makes_a_500(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    answered = 0
    async with running_embed(tmp_path) as rig:
        for _ in range(BODIES):
            path = chance.choice(PATHS)
            made = body(chance, path)
            answer = await rig.post(made, path)
            if answer.status_code == 200:
                answered += 1
                if made.get("stream"):
                    assert frames(answer.text)[-1] == "[DONE]", made
                continue
            error = answer.json()["error"]
            assert answer.status_code in (400, 404), (made, error)
            assert set(error) == {"message", "type", "param", "code"} and error["message"], made
            json.dumps(error["message"]).encode("ascii")
        assert answered > BODIES / 10, "too few sound bodies to say anything"
        assert rig.running() == 0 and rig.gateway.flights == {}
