"""`rungway drill` at the terminal: names, refusals, JSON and exit codes. The drill itself is replaced by a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rungway.chaos.course import Report
from rungway.chaos.drills import DRILLS, Drill
from rungway.chaos.invariants import Verdict
from rungway.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def invoke(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rungway", "drill", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return invoke


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "ready.json"
    path.write_text(json.dumps({"keys": {"victim": "k"}}))
    return str(path)


def test_drills_are_listed(run: Run) -> None:
    code, out, _ = run("list", "--json")
    assert code == 0
    assert [drill["name"] for drill in json.loads(out)] == list(DRILLS)
    assert "peak-load" in run("list")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-drill"], "there is no drill 'no-such-drill'"),
        (["peak-load", "--url", "http://127.0.0.1:1"], "--url and --keys go together"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(run: Run, words: list[str], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert said in err and err.count("\n") == 1


def test_a_used_state_folder_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "ledger.db").touch()
    code, _, err = run("peak-load", "--state", str(tmp_path))
    assert code == 2 and "not empty" in err


@pytest.mark.parametrize(("verdict_ok", "control_ok", "code"), [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_the_exit_code_is_that_of_all_verdicts(
    run: Run, keys: str, monkeypatch: pytest.MonkeyPatch, verdict_ok: bool, control_ok: bool, code: int
) -> None:
    report = Report("peak-load", [Verdict("a", "1", "<= 2", verdict_ok)], [Verdict("c", "9", "> 5", control_ok)])
    monkeypatch.setitem(DRILLS, "peak-load", Drill("s", 1, lambda stage, say: report))
    ended, out, _ = run("peak-load", "--url", "http://127.0.0.1:1", "--keys", keys, "--json")
    assert ended == code
    assert json.loads(out) == {
        "name": "peak-load",
        "verdicts": [{"what": "a", "measured": "1", "bar": "<= 2", "ok": verdict_ok}],
        "control": [{"what": "c", "measured": "9", "bar": "> 5", "ok": control_ok}],
    }
    ended, out, _ = run("peak-load", "--url", "http://127.0.0.1:1", "--keys", keys)
    assert ended == code and ("every verdict holds" in out) is (code == 0)


def test_a_key_that_is_not_there_is_one_line(run: Run, keys: str) -> None:
    code, _, err = run("peak-load", "--url", "http://127.0.0.1:1", "--keys", keys)
    assert code == 1 and "no key for 'admin'" in err and "Traceback" not in err
