"""`rungway simulate` as a person runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rungway.cli import app
from rungway.simulate.errors import SimulationError

CONFIG = str(Path(__file__).resolve().parents[2] / "config" / "fake.yaml")
TRACE = "arrival_s,tenant,input_tokens,output_tokens\n" + "".join(
    f"{number * 0.2:.1f},{'acme' if number % 3 else 'visitor'},{20 + number},{5 + number % 30}\n"
    for number in range(60)
)
runner = CliRunner()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def run(*words: str) -> tuple[int, str]:
    result = runner.invoke(app, ["simulate", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_trace_is_played_under_a_configuration(trace: str) -> None:
    code, output = run(trace, "--config", CONFIG, "--json", "--like", "globex")
    told = json.loads(output)
    assert code == 0 and told["requests"] == 60 and told["outcomes"]["completed"] == 60
    assert set(told["tenants"]) == {"acme", "visitor"} and told["violations"] == []
    assert told["tenants"]["visitor"]["class"] == "standard", "a tenant without a contract gets a copy of globex's"
    assert told["cost_usd"] == pytest.approx(sum(tenant["cost_usd"] for tenant in told["tenants"].values()), abs=1e-5)


def test_the_same_line_gives_the_same_numbers(trace: str) -> None:
    words = (trace, "--config", CONFIG, "--json", "--seed", "5", "--faults", "replica:30,delay", "--speed", "2")
    assert run(*words) == run(*words)


def test_the_line_that_is_printed_reproduces_the_run(trace: str) -> None:
    _, output = run(trace, "--config", CONFIG, "--json", "--seed", "5", "--duration", "3", "--deadlines")
    told = json.loads(output)
    words = told["command"].split()
    assert words[:2] == ["rungway", "simulate"]
    assert run(*words[2:], "--json")[1] == output


def test_tiers_for_embeddings_are_left_out(trace: str, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert "kind: embedding" in Path(CONFIG).read_text()
    assert run(trace, "--config", CONFIG, "--duration", "2", "--report", str(page))[0] == 0
    assert ">small<" in page.read_text() and ">embed<" not in page.read_text()


def test_a_crowd_is_one_line_too(trace: str) -> None:
    code, output = run(trace, "--config", CONFIG, "--json", "--tenants", "9", "--load", "2", "--like", "globex,acme")
    told = json.loads(output)
    assert code == 0 and len(told["tenants"]) == 9 and told["requests"] == pytest.approx(120, abs=12)
    assert {tenant["class"] for tenant in told["tenants"].values()} == {"standard", "interactive"}
    assert run(*told["command"].split()[2:], "--json")[1] == output
    assert run(trace, "--config", CONFIG, "--load", "2")[0] == 2, "without --tenants there is nobody to load"


def test_a_seed_alone_is_a_random_world() -> None:
    code, output = run("--seed", "3", "--faults", "all", "--duration", "3")
    assert code == 0 and "rungway simulate --seed 3 --faults all --duration 3" in output


def test_many_seeds_say_how_many_broke() -> None:
    code, output = run("--seeds", "0:4", "--faults", "all", "--duration", "2")
    assert code == 0 and "0 of 4 seeds broke an invariant" in output


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_world_that_cannot_be_played_is_named_and_the_others_are_played(
    jobs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rungway.simulate import scenario

    play = scenario.random_world

    def one_fails(seed: int, *rest: Any) -> Any:
        assert seed != 2, "a bug"
        return play(seed, *rest)

    monkeypatch.setattr(scenario, "random_world", one_fails)
    code, output = run("--seeds", "0:4", "--duration", "1", "--jobs", jobs)
    assert code == 1 and "rungway simulate --seed 2 --faults none --duration 1" in output
    assert "it cannot be played" in output and "1 of 4 seeds broke" in output


def test_a_broken_promise_is_one_line_to_reproduce(monkeypatch: pytest.MonkeyPatch) -> None:
    from rungway.control.pool import Pool

    monkeypatch.setattr(Pool, "release", lambda self, attempt, state: setattr(attempt, "released", True))
    code, output = run("--seeds", "0:2", "--duration", "3")
    assert code == 1 and "rungway simulate --seed 0 --faults none --duration 3" in output
    code, output = run("--seed", "0", "--duration", "3")
    assert code == 1 and "BROKEN" in output


def test_the_report_is_one_file_with_its_charts(trace: str, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    code, _ = run(trace, "--config", CONFIG, "--report", str(page))
    text = page.read_text()
    assert code == 0 and text.count("<svg") >= 4 and "visitor" in text
    assert "<script" not in text and not re.search(r"(src|href)\s*=", text), "nothing is fetched"


def test_names_in_a_report_are_text(tmp_path: Path) -> None:
    path, page = tmp_path / "t.csv", tmp_path / "out.html"
    path.write_text(TRACE.replace("visitor", "<script>alert(1)</script>"))
    assert run(str(path), "--config", CONFIG, "--report", str(page))[0] == 0
    assert "<script" not in page.read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("nowhere.csv", "--config", CONFIG),
        ("--faults", "meteor"),
        ("--faults", "replica:x"),
        ("--faults", "replica:nan"),
        ("--faults", "replica:-1"),
        ("--faults", "replica:1e300"),
    ],
)
def test_nonsense_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SimulationError):
        run(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("--duration", "inf"),
        ("--duration", "nan"),
        ("--start", "1e300"),
        ("--speed", "inf"),
        ("--load", "1e300", "--tenants", "2"),
        ("--report-ms", "inf"),
        ("--report", "no-such-folder/report.html"),
        ("--cost", "small"),
        ("--cost", "=a10g-7b"),
        ("--cost", "nowhere=a10g-7b"),
    ],
)
def test_numbers_and_names_that_cannot_be_end_before_anything_is_played(trace: str, words: tuple[str, ...]) -> None:
    assert run(trace, "--config", CONFIG, *words)[0] == 2


def test_cost_models_and_tenants_that_do_not_exist_are_refused(trace: str) -> None:
    for more in (("--cost", "small=abacus"), ("--like", "nobody"), ("--start", "1000")):
        with pytest.raises(SimulationError):
            run(trace, "--config", CONFIG, *more)
    assert run("--seeds", "9:3")[0] == 2
