"""`rungway plan` as a person runs it, and the config.json files it reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rungway.cli import app, main
from rungway.simulate.errors import SimulationError
from rungway.simulate.shapes import MODELS, read_shape, shape_of

runner = CliRunner()


def run(*words: str) -> dict[str, Any]:
    result = runner.invoke(app, ["plan", *words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)
    return made


def exit_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["rungway", "plan", *words])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code


def test_json_holds_the_figures() -> None:
    made = run("--model", "Llama-3-70B", "--hardware", "H100", "--context", "131072")
    assert made["memory"]["kv_gib_per_session"] == 40.0 and made["devices_per_replica"] == 4
    assert made["fleet"] is made["cost"] is made["rollback"] is made["problem"] is None
    assert run("--model", "smollm2-135m", "--hardware", "cpu")["context"] == 8192


def test_a_config_json_is_read_by_its_path_or_folder(tmp_path: Path) -> None:
    config = MODELS["llama-3-8b"] | {"max_position_embeddings": 4096, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    made = run("--model", str(tmp_path), "--hardware", "a100")
    assert made["context"] == 4096 and made["memory"]["kv_bytes_per_token"] == 65_536
    assert made == run("--model", str(tmp_path / "config.json"), "--hardware", "a100") | {"model": made["model"]}


def test_a_trace_is_a_load(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{number / 4},a,500,50\n" for number in range(400))
    trace.write_text("arrival_s,tenant,input_tokens,output_tokens\n" + rows)
    made = run("--model", "llama-3-8b", "--hardware", "a100", "--trace", str(trace))
    assert made["load"]["peak_per_s"] == pytest.approx(4.0, rel=0.02) and made["fleet"]["replicas"] >= 1


def test_the_table_says_it_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model llama-3-70b --hardware h100 --requests-per-s 20 --prompt-tokens 1500 --output-tokens 300"
    assert exit_of(monkeypatch, *words.split(), "--gpu-usd-per-hour", "2.5", "--tenants", "3") == 0
    output = capsys.readouterr().out
    for part in ("2.5 GiB (2.68 GB)", "4 (tensor parallel)", "per device", "TTFT p99", "kept warm", "USD", "tenant"):
        assert part in output
    assert exit_of(monkeypatch, "--model", "llama-3-8b", "--hardware", "h100") == 0
    assert "need a load" in capsys.readouterr().out


BASE = ("--model", "llama-3-8b", "--hardware", "h100")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "gpt-9", "--hardware", "h100"), "there is no model or file 'gpt-9'"),
        (("--model", "llama-3-8b", "--hardware", "abacus"), "there is no hardware 'abacus'"),
        ((*BASE, "--context", "200000"), "reads at most 131072"),
        ((*BASE, "--context", "0"), "above 0"),
        ((*BASE, "--tpot-ms", "nan"), "--tpot-ms must be a number above 0"),
        ((*BASE, "--devices", "0"), "--devices must be"),
        ((*BASE, "--reserve", "1"), "--reserve must be"),
        ((*BASE, "--headroom", "-1"), "--headroom must be"),
        ((*BASE, "--efficiency", "2"), "--efficiency must be"),
        ((*BASE, "--dtype", "fp7"), "--dtype is one of"),
        ((*BASE, "--kv-dtype", "int4"), "--kv-dtype is one of bf16, fp8"),
        ((*BASE, "--requests-per-s", "3"), "a load needs all of"),
        ((*BASE, "--trace", "x.csv", "--requests-per-s", "3"), "not both"),
        ((*BASE, "--trace", "nowhere.csv"), "there is no trace"),
        ((*BASE, "--requests-per-s", "inf", "--prompt-tokens", "9", "--output-tokens", "9"), "--requests-per-s must"),
        ((*BASE, "--requests-per-s", "1", "--prompt-tokens", "9000", "--output-tokens", "9"), "take 9009 tokens"),
    ],
)
def test_nonsense_is_one_line_and_exit_2(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(monkeypatch, *words) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and told.out == ""


def test_targets_out_of_reach_are_exit_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--requests-per-s", "1", "--prompt-tokens", "8000", "--output-tokens", "100")
    assert exit_of(monkeypatch, *BASE, *load, "--ttft-ms", "100", "--json") == 1
    told = capsys.readouterr()
    assert "TTFT 100 ms cannot be met" in told.err and json.loads(told.out)["problem"] in told.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"hidden_size": "big"}, "hidden_size is no positive whole number"),
        ({"num_attention_heads": -1}, "num_attention_heads is no positive"),
        ({"layer_types": ["linear_attention"]}, "other than attention"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "is above num_experts"),
    ],
)
def test_a_config_that_makes_no_sense_is_told(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SimulationError, match=said):
        read_shape("config.json", MODELS["llama-3-8b"] | change)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_that_is_no_config_is_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(SimulationError, match=r"config\.json"):
        shape_of(str(path))
