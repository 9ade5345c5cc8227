"""Any mixture of what requests may demand, in one batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native_kit import VOCAB, make_core, random_model, run_all, work
from rungway.engine.constraint import DEAD_END
from rungway.engine.protocol import Constraint

PROMPT = [3, 1, 4, 1, 5]
YES = Constraint("choice", '["yes"]')


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("qwen2")


_TOKEN = st.integers(0, VOCAB - 1)
_ASKS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1e-6, 1.0, 2.0]), "seed": st.integers(0, 9)},
    optional={
        "top_k": st.integers(0, 3),
        "top_p": st.sampled_from([1e-12, 0.5]),
        "min_p": st.sampled_from([0.5, 1.0]),
        "repetition_penalty": st.sampled_from([1e-9, 10.0]),
        "frequency_penalty": st.sampled_from([-2.0, 2.0]),
        "logit_bias": st.dictionaries(_TOKEN, st.sampled_from([-100.0, 100.0]), max_size=3),
        "allowed_token_ids": st.lists(_TOKEN, min_size=1, max_size=3).map(tuple),
        "bad_words": st.lists(st.lists(_TOKEN, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
        "stop": st.sampled_from([("a",), ("\\n", "é")]),
        "stop_token_ids": st.lists(_TOKEN, max_size=2).map(tuple),
        "logprobs": st.sampled_from([0, 5, 64]),
        "constraint": st.sampled_from([YES, Constraint("regex", "[0-9]{2,4}"), Constraint("json_object")]),
        "skip_special_tokens": st.booleans(),
    },
)


@given(st.lists(_ASKS, min_size=1, max_size=5))
@settings(max_examples=15, deadline=None)
def test_whatever_is_asked_for_ends_well_or_as_its_own_mistake(model: Any, asks: list[dict[str, Any]]) -> None:
    """Together in one batch: no demand makes the engine fail, breaks a neighbour, or keeps a block."""
    core, scheduler = make_core(model)
    heard = run_all(
        core, [work(f"r{at}", PROMPT, max_tokens=6, ignore_eos=False, **ask) for at, ask in enumerate(asks)]
    )
    for at, ask in enumerate(asks):
        last = heard.last(f"r{at}")
        assert last.finish in ("stop", "length") or last.error == DEAD_END, (ask, last)
        allowed = ask.get("allowed_token_ids")
        assert allowed is None or set(heard.tokens(f"r{at}")) <= set(allowed)
    assert core.check() == [] and scheduler.pool.free == scheduler.pool.total
