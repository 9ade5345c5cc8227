"""Rates, gaps and verdicts of the engine benchmark, from timelines written by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rungway.chaos.bench.engines import judge
from rungway.chaos.bench.engines.prompts import text_ids
from rungway.chaos.bench.engines.timeline import (
    Event,
    Rate,
    Timeline,
    decode_rate,
    median,
    percentile,
    prefill_rate,
    starvation,
    tokens_beside,
)
from rungway.chaos.bench.engines.wire import Book
from rungway.chaos.bench.report import Report


def steady(stream: int, first_s: float, step_s: float, tokens: int) -> list[Event]:
    """One token every `step_s`; the processor is busy half of the time."""
    times = [first_s + step_s * at for at in range(tokens)]
    return [Event(stream, at_s, 1, 10 + at_s / 2) for at_s in times]


def line(*streams: list[Event], late_at_s: float = math.nan) -> Timeline:
    return Timeline(sorted((event for stream in streams for event in stream), key=lambda e: e.at_s), late_at_s)


def test_decode_counts_only_while_all_streams_decode() -> None:
    # stream 1 starts a second late: alone before, and stream 1 alone after stream 0 has ended
    found = decode_rate(line(steady(0, 0.0, 0.1, 21), steady(1, 1.05, 0.1, 21)), 2)
    assert found.clock == pytest.approx(19 / 0.95) and found.cpu == pytest.approx(2 * found.clock)


def test_tokens_that_arrive_together_all_count() -> None:
    events = [Event(0, 0.0, 1, 0.0), Event(0, 1.0, 5, 1.0), Event(0, 2.0, 5, 2.0)]
    assert decode_rate(Timeline(events), 1) == Rate(5.0, 5.0)


@pytest.mark.parametrize("events", [[], steady(0, 0.0, 0.1, 5), [Event(0, 0.0, 1, 0.0), Event(1, 0.0, 1, 0.0)]])
def test_a_silent_stream_or_no_time_is_no_rate(events: list[Event]) -> None:
    assert math.isnan(decode_rate(Timeline(events), 2).clock)


def test_prefill_is_all_prompt_tokens_until_the_last_first_token() -> None:
    events = [Event(0, 1.0, 1, 21.0), Event(1, 4.0, 1, 23.0), Event(0, 5.0, 1, 24.0)]
    assert prefill_rate(Timeline(events), [[1] * 300, [1] * 500], 20.0) == Rate(200.0, 800 / 3)
    assert math.isnan(prefill_rate(Timeline(events[:1]), [[1], [1]], 20.0).clock)


def test_starvation_compares_gaps_before_and_while_the_long_prompt_is_read() -> None:
    before, during = steady(0, 1.0, 0.1, 11), steady(0, 2.5, 0.5, 4)
    after = steady(0, 4.1, 9.0, 3)  # when the prompt has been read, nothing counts any more
    whole = line(before, during, after, [Event(1, 4.05, 1, 0.0)], late_at_s=2.0)
    # without the prompt: slower once it has as many tokens as it had when the prompt came
    alone = line(steady(0, 1.0, 0.1, 11), steady(0, 2.2, 0.2, 5))
    assert starvation(whole, alone, 1, 11) == pytest.approx((0.1, 0.5, 0.2))
    assert starvation(whole, alone, 1, 11, "cpu") == pytest.approx((0.05, 0.25, 0.1))
    assert math.isnan(starvation(whole, line(before), 1, 99).alone), (
        "a control that did not get that far proves nothing"
    )
    assert tokens_beside(whole, 1) == 15


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile(list(range(1, 101)), 0.99) == 99 and percentile([7.0], 0.99) == 7.0
    assert math.isnan(percentile([], 0.5)) and math.isnan(median([math.nan]))
    assert median([math.nan, 1.0, 3.0]) == 2.0


class Words:
    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_texts_have_the_asked_length_and_differ_by_seed() -> None:
    assert len(text_ids(Words(), 100, 1)) == 100
    assert text_ids(Words(), 100, 1) == text_ids(Words(), 100, 1) != text_ids(Words(), 100, 2)


def a_job(**more: Any) -> dict[str, Any]:
    return {"prompts": [[1], [2]], "late": [], "late_after": 0, **more}


def test_the_late_prompt_is_due_once_when_every_stream_is_far_enough() -> None:
    book = Book(a_job(late=[1, 2], late_after=2))
    book.got(0, 2)
    assert not book.late_due()
    book.got(1, 2)
    assert book.late_due() and not book.late_due() and not book.over
    book.got(2, 1)
    assert book.over and book.answer([])["late_at_s"] is not None
    assert not Book(a_job()).late_due() and Book(a_job()).answer([])["late_at_s"] is None


def a_round(ours: float = 150.0, vllm: float = 100.0, **rows: float) -> judge.Round:
    names = [judge.decode_row(streams, kind) for streams, kind in judge.rows_of("ours")]
    sides = {"ours": ours, "vllm": vllm}
    found = {side: {row: Rate(rate, 2 * rate) for row in (*names, "prefill")} for side, rate in sides.items()}
    found["ours"] |= {row: Rate(rate, rate) for row, rate in rows.items()}
    return found


def judged(rounds: list[judge.Round], sides: tuple[str, ...] = ("vllm",)) -> dict[str, tuple[float, bool]]:
    report = Report("engine")
    judge.judge_beside(report, rounds, sides, "clock")
    return {verdict.what: (verdict.measured, verdict.ok) for verdict in report.verdicts}


def test_the_lower_of_greedy_and_sampled_is_judged() -> None:
    found = judged([a_round(**{"decode 8 sampled": 110.0})])
    assert found["decode tokens/s at 8 / vLLM CPU"] == (1.1, False)
    assert found["decode tokens/s at 4 / vLLM CPU"] == (1.5, True)
    assert found["prefill tokens/s / vLLM CPU"] == (1.5, True)


def test_the_median_over_rounds_decides() -> None:
    slow, fast = a_round(ours=90.0), a_round(ours=200.0)
    assert judged([slow, fast, fast])["decode tokens/s at 1 / vLLM CPU"] == (2.0, True)
    assert judged([slow, slow, fast])["decode tokens/s at 1 / vLLM CPU"] == (0.9, False)


def test_a_side_that_is_not_there_misses_its_bars() -> None:
    found = judged([a_round()], ("llama", "transformers"))
    assert len(found) == 4 and not any(ok for _, ok in found.values())
    assert all(math.isnan(measured) for measured, _ in found.values())


def test_bandwidth_is_weight_bytes_a_token_over_what_was_read_in_the_same_round() -> None:
    report = Report("engine")
    row = judge.decode_row(1, "greedy")
    rounds = [a_round(**{row: 50.0, "bandwidth": 1e10}), a_round(**{row: 20.0, "bandwidth": 1e10})]
    judge.judge_bandwidth(report, rounds[:1], 1.4e8, "int8", "clock")
    judge.judge_bandwidth(report, rounds, 1.4e8, "int8", "clock")
    judge.judge_bandwidth(report, [a_round()], 1.4e8, "int8", "clock")
    assert [(verdict.measured, verdict.ok) for verdict in report.verdicts[:2]] == [(0.7, True), (0.49, False)]
    assert not report.verdicts[2].ok


def test_prefix_and_starvation_bars() -> None:
    report = Report("engine")
    judge.judge_prefix(report, [Rate(0.1, 0.2), Rate(0.3, 0.2)], [Rate(1.0, 1.0), Rate(1.0, 1.0)], "clock")
    judge.judge_starvation(report, [{"prompt_tokens": 8000, "ratio": 2.9}])
    judge.judge_starvation(report, [])
    assert [verdict.ok for verdict in report.verdicts] == [False, True, False]
