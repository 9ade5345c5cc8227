"""The command line: exit codes, one-line errors, JSON, and a help that loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rungway.cli import COMMANDS, main
from rungway.settings import hash_key, load_platform

PLATFORM = """\
tenants_dir: tenants
state_dir: state
tiers:
  small:
    price_usd_per_1k: {input: 1, cached_input: 1, output: 1}
    versions: {s: {backend: fake}}
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "tenants").mkdir()
    for name in ("acme", "platform"):
        (tmp_path / "tenants" / f"{name}.yaml").write_text(f"tenant: {name}\n")
    path = tmp_path / "rungway.yaml"
    path.write_text(PLATFORM)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path) -> Run:
    for name in ("RUNGWAY_URL", "RUNGWAY_KEY", "RUNGWAY_STATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RUNGWAY_CONFIG", str(config))

    def invoke(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rungway", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return invoke


class Server(ThreadingHTTPServer):
    """Answers what it is told to and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        key = self.headers.get("authorization", "")
        self.server.asked.append((self.command, self.path, key, json.loads(body) if body else None))
        status, answer = self.server.answers.get(self.path.partition("?")[0], (404, {}))
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    thread.join(60)
    made.server_close()


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['rungway', '--help']\n"
        "from rungway.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "heavy = {'torch', 'ray', 'transformers', 'sqlalchemy', 'pydantic', 'httpx', 'yaml', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_every_command_has_help_that_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from rungway.cli import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    if name == 'serve':\n        continue  # its own concern: it starts Ray\n"
        "    sys.argv = ['rungway', name, '--help']\n"
        "    try:\n        main()\n"
        "    except SystemExit as ended:\n        assert not ended.code, (name, ended.code)\n"
        "    heavy = {'torch', 'ray', 'transformers', 'sqlalchemy'} & set(sys.modules)\n"
        "    assert not heavy, (name, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == len(COMMANDS) - 1


@pytest.mark.parametrize(
    "words",
    [
        ("bogus",),
        ("check-config", "--bogus"),
        ("explain",),
        ("keys", "create"),
        ("ladder", "set", "1"),
        ("audit", "bogus"),
    ],
)
def test_bad_usage_is_exit_code_2(run: Run, words: tuple[str, ...]) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err


def test_version(run: Run) -> None:
    assert run("--version")[:2] == (0, "0.1.0\n")


def test_check_config_right(run: Run) -> None:
    code, out, _ = run("check-config")
    assert (code, "acme" in out) == (0, True)
    code, out, _ = run("check-config", "--json")
    data = json.loads(out)
    assert (code, data["ok"], data["mistakes"]) == (0, True, [])
    assert data["config"]["tenants"]["acme"]["quotas"]["requests_per_minute"] == 600


def test_check_config_wrong(run: Run, config: Path) -> None:
    (config.parent / "tenants" / "acme.yaml").write_text("tenant: acme\nweight: 0\nclass: hgih\n")
    code, out, err = run("check-config")
    assert (code, out) == (2, "")
    assert "acme.yaml:2: tenants.acme.weight: " in err
    assert "acme.yaml:3: tenants.acme.class: " in err
    code, out, err = run("check-config", "--json")
    assert code == 2
    assert [mistake["line"] for mistake in json.loads(out)["mistakes"]] == [2, 3]


@pytest.mark.parametrize("words", [("keys", "list"), ("models", "list"), ("usage",), ("pools",), ("explain", "r")])
def test_a_wrong_configuration_is_exit_code_2_for_every_command(run: Run, config: Path, words: tuple[str, ...]) -> None:
    config.write_text(PLATFORM + "nope: 1\n")
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "rungway.yaml:7: nope: unknown key" in err
    assert "Traceback" not in err


def test_keys_from_making_to_revoking(run: Run, config: Path) -> None:
    code, out, err = run("keys", "create", "acme", "--expires", "2030-01-01T00:00:00Z")
    assert code == 0
    text = out.strip()
    assert text.startswith("rw_acme_")
    assert text not in err
    code, out, _ = run("keys", "create", "platform", "--json")
    assert (code, json.loads(out)["scopes"]) == (0, ["admin", "usage"])
    _, out, _ = run("keys", "list", "--json")
    listed = {key["id"]: key for key in json.loads(out)}
    assert listed["acme-1"]["expires"] == "2030-01-01 00:00:00.000Z"
    assert text not in out
    assert hash_key(text) not in out
    assert run("keys", "revoke", "acme", "acme-1")[0] == 0
    tenant = load_platform(config).tenant("acme")
    assert tenant is not None
    assert tenant.keys[0].revoked
    assert "acme-1" in run("keys", "list")[1]
    # the next key gets the next free name
    assert json.loads(run("keys", "create", "acme", "--json")[1])["id"] == "acme-2"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("keys", "create", "nobody"), 2),
        (("keys", "create", "acme", "--scope", "admin"), 2),
        (("keys", "create", "acme", "--scope", "root"), 2),
        (("keys", "create", "acme", "--expires", "soon"), 2),
        (("keys", "create", "acme", "--id", "has space"), 2),
        (("keys", "revoke", "acme", "missing"), 2),
        (("keys", "list", "--tenant", "nobody"), 2),
        (("models", "fetch", "pypi:no-such-model==1"), 2),
        (("usage", "--since", "whenever"), 2),
        (("usage",), 1),
        (("pools",), 1),
        (("pools", "--url", "", "--key", "x"), 1),
        (("pools", "--url", "no url", "--key", "x"), 1),
        (("audit", "verify", "--url", ""), 1),
        (("explain", "req"), 1),
    ],
)
def test_operating_errors_are_one_line(run: Run, words: tuple[str, ...], code: int) -> None:
    got, out, err = run(*words)
    assert (got, out) == (code, "")
    assert len(err.strip().splitlines()) == 1, err


def test_hash_reads_standard_input_and_never_repeats_a_bad_key(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("rw_acme_abc\n"))
    assert run("keys", "hash")[:2] == (0, hash_key("rw_acme_abc") + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("secret with spaces\n"))
    code, out, err = run("keys", "hash")
    assert (code, out, "secret" in err) == (2, "", False)


def test_models_list_of_fakes_is_empty(run: Run) -> None:
    assert run("models", "list", "--json")[:2] == (0, "[]\n")


def test_url_and_key_come_from_options_variables_or_the_ready_file(
    run: Run, server: Server, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["/admin/pools"] = (200, {})
    assert run("pools", "--json", "--url", server.url, "--key", "k1")[:2] == (0, "{}\n")
    state = config.parent / "state"
    state.mkdir()
    ready = {"url": server.url, "keys": {"acme": "k0", "admin": "k2"}}
    (state / "ready.json").write_text(json.dumps(ready))
    assert run("pools", "--json")[0] == 0
    monkeypatch.setenv("RUNGWAY_URL", server.url)
    monkeypatch.setenv("RUNGWAY_KEY", "k3")
    assert run("pools", "--json")[0] == 0
    assert [key for _, _, key, _ in server.asked] == ["Bearer k1", "Bearer k2", "Bearer k3"]


def test_a_server_without_a_known_key_needs_one(run: Run, server: Server) -> None:
    code, out, err = run("pools", "--url", server.url)
    assert (code, out, server.asked) == (2, "", [])
    assert "RUNGWAY_KEY" in err


def test_errors_of_the_platform_are_one_line(run: Run, server: Server) -> None:
    server.answers["/admin/pools"] = (403, {"error": {"message": "This needs admin.", "code": "scope_missing"}})
    assert run("pools", "--url", server.url, "--key", "k") == (1, "", "rungway: scope_missing: This needs admin.\n")
    code, _, err = run("pools", "--url", "http://127.0.0.1:9", "--key", "k")
    assert (code, len(err.splitlines())) == (1, 1)


def test_ladder_commands(run: Run, server: Server) -> None:
    scope = {"pool": "small", "tenant_class": "batch", "rung": 1, "name": "rerank_off", "pressure": 0.95}
    server.answers["/admin/ladder"] = (200, {"changed": 2, "name": "small_tier", "scopes": [scope], "leave": 0.7})
    where = ("--url", server.url, "--key", "k")
    assert "rerank_off" in run("ladder", "show", *where)[1]
    code, out, _ = run("ladder", "set", "small_tier", "--why", "drill", "--pool", "small", "--ttl", "60", *where)
    assert (code, out) == (0, "2 place(s) held on rung small_tier for 60 s\n")
    assert run("ladder", "clear", "--class", "batch", *where)[0] == 0
    assert [(method, body) for method, _, _, body in server.asked] == [
        ("GET", None),
        ("POST", {"rung": "small_tier", "pool": "small", "tenant_class": None, "ttl_s": 60, "why": "drill"}),
        ("DELETE", {"pool": None, "tenant_class": "batch", "why": ""}),
    ]


def test_top_once_and_pools_show_what_is_there(run: Run, server: Server) -> None:
    replica = {"replica_id": "r-1", "version": "s", "state": "ready", "running": 3}
    pools = {"small": {"replicas": [replica], "in_flight": 3, "slots": 17, "saturation": 0.18}}
    tenants = {"acme": {"class": "standard", "running": 3, "waiting": 1, "budget": {"spent_usd": 0.25}}}
    server.answers["/admin/live"] = (200, {"pools": pools, "tenants": tenants, "flights": 4, "ladder": []})
    server.answers["/admin/pools"] = (200, pools)
    where = ("--url", server.url, "--key", "k")
    code, out, _ = run("top", "--once", *where)
    assert (code, "acme" in out, "0.25" in out) == (0, True, True)
    assert "r-1" in run("pools", *where)[1]
    assert json.loads(run("top", "--json", *where)[1])["flights"] == 4


def test_usage_with_a_tenants_key_is_its_own(run: Run, server: Server) -> None:
    totals = {"requests": 12, "input_tokens": 3400, "cost_usd": 0.5}
    server.answers["/admin/usage"] = (403, {"error": {"code": "scope_missing", "message": "no"}})
    server.answers["/v1/usage"] = (200, {"tenant": "acme", "totals": totals, "budget": {"limit_usd": None}})
    code, out, _ = run("usage", "--since", "7d", "--url", server.url, "--key", "k")
    assert (code, "3,400" in out, "unlimited" in out) == (0, True, True)
    assert "since=" in server.asked[1][1]


def test_explain_prints_whatever_parts_there_are(run: Run, server: Server) -> None:
    offer = {"kind": "model", "tier": "large", "version": "l", "p_ok": 0.9, "price_nusd": 4200, "net_value_usd": 0.01}
    decision = {
        "ask": {"model": "auto", "prompt_tokens": {"small": 10}},
        "pressure": {"large": [0.93, "queue_wait"]},
        "rungs": {"large": 4},
        "thresholds": {"names": ["full", "a", "b", "c", "small_tier"], "enter": {"small_tier": 1.1}, "leave": 0.7},
        "offers": [offer],
        "best": offer,
        "rejected": [{"tier": "small", "kind": "model", "why": "not_allowed[x]"}],
        "surprise": {"from": "a later version"},
    }
    row = {"request_id": "req-1", "tenant": "acme", "outcome": "completed", "cost_nusd": 4000, "decision": decision}
    audit = [{"seq": 7, "wall_ns": 10**18, "kind": "downgrade", "detail": {"why": "pressure"}}]
    server.answers["/v1/decisions/req-1"] = (200, {"request": row, "audit": audit})
    server.answers["/v1/decisions/req-2"] = (200, {"request": {"request_id": "req-2", "decision": None}})
    where = ("--url", server.url, "--key", "k")
    code, out, _ = run("explain", "req-1", *where)
    assert code == 0
    for word in (
        "0.93 (from queue_wait)",
        "4 small_tier",
        "large/l",
        "not_allowed[x]",
        "a later version",
        "downgrade",
        "4.2e-06",
    ):
        assert word in out, word
    assert run("explain", "req-2", *where)[0] == 0
    assert json.loads(run("explain", "req-1", "--json", *where)[1])["request"] == row
    assert run("explain", "req-3", *where)[0] == 1
