"""Structured answers and tool calls with the official OpenAI SDK, unmodified, against a running platform."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from serve.test_sdk import HELLO, client, sdk  # noqa: F401 - `client` is a fixture
from support.case_platform import CasePlatform

pytestmark = pytest.mark.serve


class Step(BaseModel):
    what: str
    minutes: int


class Recipe(BaseModel):
    """Nested, with a reference, an enumeration and an optional member."""

    title: str
    level: Literal["easy", "hard"]
    steps: list[Step]
    note: str | None


class Weather(BaseModel):
    """How the weather is."""

    city: str
    days: int


TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
CALLS: Any = [{"role": "user", "content": "hello [[calls=2]]"}]


def test_response_format(client: OpenAI) -> None:  # noqa: F811
    answer = client.chat.completions.create(
        model="small",
        messages=HELLO,
        max_tokens=400,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": Weather.model_json_schema(), "strict": True},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    Weather.model_validate_json(answer.choices[0].message.content or "")
    free = client.chat.completions.create(
        model="small", messages=HELLO, max_tokens=400, response_format={"type": "json_object"}
    )
    assert isinstance(json.loads(free.choices[0].message.content or ""), dict)


def test_parse_gives_the_model(client: OpenAI) -> None:  # noqa: F811
    answer = client.chat.completions.parse(model="small", messages=HELLO, max_tokens=400, response_format=Recipe)
    recipe = answer.choices[0].message.parsed
    assert isinstance(recipe, Recipe) and recipe.level in ("easy", "hard")


def test_parse_raises_its_own_error_for_a_cut_answer(client: OpenAI) -> None:  # noqa: F811
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="small", messages=HELLO, max_tokens=3, response_format=Recipe)


def test_a_streamed_model(client: OpenAI) -> None:  # noqa: F811
    with client.chat.completions.stream(
        model="small", messages=HELLO, max_tokens=400, response_format=Recipe
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Recipe) and "content.delta" in kinds


def test_tools(client: OpenAI) -> None:  # noqa: F811
    answer = client.chat.completions.create(
        model="small", messages=HELLO, max_tokens=400, tools=[TOOL], tool_choice="required"
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function" and call.function.name == "weather"
    Weather.model_validate_json(call.function.arguments)
    history: Any = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    after = client.chat.completions.create(model="small", messages=history, max_tokens=5, tools=[TOOL])
    assert after.choices[0].message.content and after.choices[0].message.tool_calls is None
    assert (
        answer.usage is not None and after.usage is not None and after.usage.prompt_tokens > answer.usage.prompt_tokens
    )


def test_streamed_tools(client: OpenAI) -> None:  # noqa: F811
    chunks = client.chat.completions.create(model="small", messages=CALLS, max_tokens=800, tools=[TOOL], stream=True)
    arguments: dict[int, str] = {}
    names: dict[int, str] = {}
    finish = None
    for chunk in chunks:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                if piece.function.name:
                    names[piece.index] = piece.function.name
                arguments[piece.index] = arguments.get(piece.index, "") + (piece.function.arguments or "")
    assert names == {0: "weather", 1: "weather"} and finish == "tool_calls"
    for text in arguments.values():
        Weather.model_validate_json(text)
    with client.chat.completions.stream(model="small", messages=CALLS, max_tokens=800, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert [call.function.arguments for call in final.message.tool_calls or ()] == [arguments[0], arguments[1]]


def test_parsed_tools(client: OpenAI) -> None:  # noqa: F811
    tool = openai.pydantic_function_tool(Weather, name="weather")
    answer = client.chat.completions.parse(
        model="small", messages=HELLO, max_tokens=400, tools=[tool], tool_choice="required"
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)


def test_structured_outputs_as_an_extra(client: OpenAI) -> None:  # noqa: F811
    answer = client.completions.create(
        model="small", prompt="hi", max_tokens=50, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].text in ("yes", "no")


def test_errors_are_its_own(client: OpenAI, cases: CasePlatform) -> None:  # noqa: F811
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}
    with sdk(cases) as other, pytest.raises(openai.BadRequestError) as wrong:
        other.chat.completions.create(model="small", messages=HELLO, response_format=bad)
    assert (wrong.value.code, wrong.value.param) == ("invalid_schema", "response_format")
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model="small", messages=HELLO, extra_body={"guided_json": {}})
    assert unknown.value.param == "guided_json"
