"""Reading traces: each format from a few lines made here, and the public files where they are."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from rungway.simulate.errors import SimulationError
from rungway.simulate.traces import read_trace
from rungway.simulate.workload import Arrival, speed_up
from sim import kit

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0319600,3180,8\n"
)
TENANTS = "arrival_s,tenant,input_tokens,output_tokens\n0.5,b,7,3\n0.25,a,13,199\n"
SHAREGPT = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n290,905,1195,0.3\n"
MOONCAKE = [
    {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]},
]


def read(path: Path, text: str, **changes: float) -> list[Arrival]:
    path.write_text(text)
    return read_trace(path, Random(1), **changes)


def test_azure(tmp_path: Path) -> None:
    found = read(tmp_path / "AzureLLMInferenceTrace_code.csv", AZURE)
    assert [(a.tenant, a.input_tokens, a.output_tokens) for a in found] == [("code", 4808, 10), ("code", 3180, 8)]
    assert [a.at_s for a in found] == pytest.approx([0.0, 1.052])


def test_traces_with_tenants_come_out_in_order_of_time(tmp_path: Path) -> None:
    found = read(tmp_path / "t.csv", TENANTS)
    assert [(a.at_s, a.tenant, a.output_bound) for a in found] == [(0.25, "a", 256), (0.5, "b", 16)]


def test_mooncake_keeps_its_prefix_blocks(tmp_path: Path) -> None:
    found = read(tmp_path / "m.jsonl", "\n".join(map(json.dumps, MOONCAKE)))
    assert [(a.at_s, a.blocks) for a in found] == [(0.0, (0, 1, 2)), (1.5, (0, 9))]


def test_lengths_alone_get_arrivals_from_the_seed(tmp_path: Path) -> None:
    found = read(tmp_path / "s.csv", SHAREGPT)
    assert [(a.input_tokens, a.output_tokens) for a in found] == [(74, 918), (290, 905)]
    assert 0 < found[0].at_s < found[1].at_s
    assert found == read_trace(tmp_path / "s.csv", Random(1)) != read_trace(tmp_path / "s.csv", Random(2))


def test_servegen_draws_rates_and_lengths_per_client(tmp_path: Path) -> None:
    (tmp_path / "chunk-3-trace.csv").write_text("0,2.0,1.0,Gamma,0.5,1\n600,0,0,,0,0\n")
    tables = {"0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{7: 1.0}", "reason_ratio": "{}"}}
    (tmp_path / "chunk-3-dataset.json").write_text(json.dumps(tables))
    found = read_trace(tmp_path, Random(1))
    assert 1000 < len(found) < 1400 and found[-1].at_s < 600
    assert {a.tenant for a in found} == {"client-3"} and {a.output_tokens for a in found} == {7}
    assert Counter(a.input_tokens for a in found)[10] == pytest.approx(len(found) / 2, rel=0.15)


def test_a_piece_of_a_trace_starts_at_zero(tmp_path: Path) -> None:
    lines = "".join(f"{second},a,10,10\n" for second in range(10))
    found = read(tmp_path / "t.csv", TENANTS.splitlines()[0] + "\n" + lines, start_s=3, duration_s=4)
    assert [a.at_s for a in found] == [0.0, 1.0, 2.0, 3.0]
    assert [a.at_s for a in speed_up(found, 2.0, duration_s=1.0)] == [0.0, 0.5]


@pytest.mark.parametrize(
    "text", ["", "a,b,c\n1,2,3\n", TENANTS + "x,y,z,w\n", '{"timestamp": 0}\n', "\x00\x01", '{"broken\n']
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(SimulationError) as refused:
        read(tmp_path / "t.csv", text)
    assert "\n" not in str(refused.value) and "t.csv" in str(refused.value)


AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE_ROW = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}\n'


@pytest.mark.parametrize(
    "text",
    [
        TENANTS.splitlines()[0] + "\n0,a\n",
        *(
            TENANTS.splitlines()[0] + f"\n0,a,1,1\n{row}\n"
            for row in (
                "nan,a,1,1",
                "inf,a,1,1",
                "-1,a,1,1",
                "1e300,a,1,1",
                "1e8,a,1,1",
                "0,,1,1",
                "0,a,-1,1",
                "0,a,1.5,1",
            )
        ),
        TENANTS.splitlines()[0] + f"\n0,a,1,{10**30}\n",
        AZURE_HEAD + "2023-11-16 18:15:46.68\n",
        AZURE_HEAD + "2023-11-16 18:15:46.68,1,5\n2023-11-16 18:15:47+00:00,1,5\n",
        AZURE_HEAD + "2023-11-16 18:15:46.68,1,5\n2023-11-16 18:15:45.68,1,5\n",
        MOONCAKE_ROW + "[1]\n",
        MOONCAKE_ROW + "7\n",
        MOONCAKE_ROW.replace("[]", "null"),
        MOONCAKE_ROW.replace("[]", '["a"]'),
        MOONCAKE_ROW.replace("0,", '"x",'),
        MOONCAKE_ROW.replace("0,", "null,"),
    ],
)
def test_a_row_that_cannot_be_is_refused_in_one_line_and_none_is_left_out(tmp_path: Path, text: str) -> None:
    with pytest.raises(SimulationError) as refused:
        read(tmp_path / "t.csv", text)
    assert "\n" not in str(refused.value) and "t.csv" in str(refused.value)


LENGTHS = '{"0": {"input_tokens": "{10: 1.0}", "output_tokens": "{5: 1.0}"}}'


@pytest.mark.parametrize(
    ("windows", "lengths"),
    [
        ("0,1,1\n", None),
        ("x,y,z\n", LENGTHS),
        ("0\n", LENGTHS),
        ("0,nan,1\n", LENGTHS),
        ("0,1e9,1\n", LENGTHS),
        ("0,1,1e9\n", LENGTHS),
        ("0,1,-1\n", LENGTHS),
        ("0,1,1\n", "{"),
        ("0,1,1\n", "[]"),
        ("0,1,1\n", '{"0": {}}'),
        ("0,1,1\n", '{"0": 1}'),
        ("0,1,1\n", LENGTHS.replace("10: 1.0", "a: b")),
        ("0,1,1\n", LENGTHS.replace("10: 1.0", "10: 0.0")),
    ],
)
def test_a_broken_client_of_servegen_is_refused_in_one_line(tmp_path: Path, windows: str, lengths: str | None) -> None:
    (tmp_path / "chunk-1-trace.csv").write_text(windows)
    if lengths is not None:
        (tmp_path / "chunk-1-dataset.json").write_text(lengths)
    with pytest.raises(SimulationError) as refused:
        read_trace(tmp_path, Random(1))
    assert "\n" not in str(refused.value)


def test_a_missing_or_empty_place_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(SimulationError):
            read_trace(path, Random(1))


@pytest.mark.parametrize(
    ("name", "rows", "tenants", "mean_input"),
    [
        ("azure2023/AzureLLMInferenceTrace_code.csv", 8819, 1, 2047.8),
        ("azure2023/merged_two_tenant.csv", 28_185, 2, 1434.2),
        ("mooncake/conversation_trace.jsonl", 12_031, 1, 12_035.1),
        ("vtc/arena27_tenants.csv", 1500, 27, 136.2653),
        ("sharegpt/sharegpt_8k_filtered_stats_llama2_tokenizer.csv", 30_731, 1, 2340.0),
    ],
)
def test_public_traces_are_read_whole(name: str, rows: int, tenants: int, mean_input: float) -> None:
    found = read_trace(kit.trace(name), Random(0))
    assert len(found) == rows and len({a.tenant for a in found}) == tenants
    assert sum(a.input_tokens for a in found) / rows == pytest.approx(mean_input, rel=1e-4)
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(found))


def test_the_public_servegen_clients_keep_their_shares() -> None:
    folder = kit.trace("servegen/reason-deepseek-r1")
    found = read_trace(folder, Random(0), start_s=36_000, duration_s=1200)
    sizes = Counter(arrival.tenant for arrival in found).most_common()
    assert len(found) > 10_000 and len(sizes) > 15
    assert 0.5 < sum(count for _, count in sizes[:5]) / len(found) < 0.95, "a few clients are most of the load"
