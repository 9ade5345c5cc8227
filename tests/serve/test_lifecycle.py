"""`rungway serve` from start to end: what it leaves on disk, what it refuses, what it listens on, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from rungway.serve import listeners, processes
from support.platform_process import FAKE_CONFIG, PlatformProcess, free_port, running_platform

pytestmark = pytest.mark.serve

WAIT_S = 60.0


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait, bounded, until `condition` holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.2)


def answers(platform: PlatformProcess) -> bool:
    """Whether one chat request of a tenant gets its answer."""
    try:
        answer = httpx.post(
            f"{platform.url}/v1/chat/completions",
            json={"model": "auto", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
            headers={"Authorization": f"Bearer {platform.keys['acme']}"},
            timeout=30.0,
        )
    except httpx.HTTPError:
        return False
    return answer.status_code == 200


# --- a running platform


def test_it_is_ready_when_it_says_so(platform: PlatformProcess) -> None:
    assert httpx.get(f"{platform.url}/readyz", timeout=WAIT_S).status_code == 200
    assert answers(platform)


def test_ready_file_names_url_pid_and_keys_and_is_private(platform: PlatformProcess) -> None:
    ready = platform.ready()
    assert ready["url"] == platform.url
    assert ready["dashboard"] == f"{platform.url}/dashboard"
    assert ready["pid"] == platform.pid
    assert set(ready["keys"]) == {"acme", "globex", "admin"}
    assert stat.S_IMODE(platform.ready_file.stat().st_mode) == 0o600


def test_no_process_gives_way_to_what_else_runs_on_the_machine(platform: PlatformProcess) -> None:
    own = os.getpriority(os.PRIO_PROCESS, platform.pid)
    names = {processes.name_of(pid): os.getpriority(os.PRIO_PROCESS, pid) for pid in platform.members()}
    assert any("rungway:Controller" in name for name in names)
    assert {name: nice for name, nice in names.items() if nice > own} == {}


def test_keys_are_printed_once_and_kept_only_as_hashes(platform: PlatformProcess) -> None:
    key = platform.keys["acme"]
    assert key in platform.text()
    kept = [path for path in platform.state_dir.rglob("*") if path.is_file() and path != platform.ready_file]
    assert not [path for path in kept if key.encode() in path.read_bytes()]


def test_nothing_listens_beyond_loopback(platform: PlatformProcess) -> None:
    pids = [platform.pid, *platform.members()]
    assert listeners.beyond_loopback(pids) == []
    ports = [one.port for one in listeners.listening(pids)]
    assert platform.port in ports, "the test looks at the wrong processes"
    assert len(ports) > 5, "Ray's own servers are missing from the picture"


def test_haproxy_shows_no_statistics_page(platform: PlatformProcess) -> None:
    (haproxy,) = platform.members("/haproxy -db")[-1:]
    assert [one.port for one in listeners.listening([haproxy])] == [platform.port]


def test_a_second_server_on_the_same_state_is_refused_in_one_line(platform: PlatformProcess) -> None:
    refused = PlatformProcess(platform.state_dir).run()
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert f"already running on {platform.state_dir} (process {platform.pid})" in refused.stderr
    assert platform.ready_file.exists(), "the refused one must not touch the running one's files"


def test_a_taken_port_is_refused_in_one_line(platform: PlatformProcess, tmp_path: Path) -> None:
    refused = PlatformProcess(tmp_path / "state", port=platform.port).run()
    assert refused.returncode == 2
    assert refused.stderr == f"rungway serve: cannot listen on 127.0.0.1:{platform.port}: the port is taken\n"


def test_sighup_reads_the_configuration_again(platform: PlatformProcess) -> None:
    before = platform.text().count("reload: the new configuration is in force")
    platform.signal(signal.SIGHUP)
    eventually(lambda: platform.text().count("reload: the new configuration is in force") > before, "a reload")
    assert answers(platform)


@pytest.mark.parametrize("role", ["rungway:Controller", "rungway:Gateway", "rungway:Replica small", "HAProxyManager"])
def test_a_killed_process_is_replaced(platform: PlatformProcess, role: str) -> None:
    (killed,) = platform.members(role)
    processes.kill(killed)
    eventually(lambda: any(pid != killed for pid in platform.members(role)), f"a new {role}")
    eventually(lambda: httpx_ready(platform), "readiness")
    eventually(lambda: answers(platform), "an answer")


def httpx_ready(platform: PlatformProcess) -> bool:
    try:
        return httpx.get(f"{platform.url}/readyz", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


# --- starts that are refused


def test_a_wrong_configuration_is_refused_with_every_mistake(tmp_path: Path) -> None:
    config = tmp_path / "platform.yaml"
    config.write_text("cell: local\ngateway: {replicas: many}\ngatewy: {}\n")
    refused = PlatformProcess(tmp_path / "state", config=config).run()
    assert refused.returncode == 2
    assert "platform.yaml:2" in refused.stderr
    assert "platform.yaml:3" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "state").exists()


def test_a_missing_model_is_refused_in_one_line(tmp_path: Path) -> None:
    config = tmp_path / "config" / "platform.yaml"
    config.parent.mkdir()
    (tmp_path / "config" / "ladders").symlink_to(FAKE_CONFIG.parent / "ladders")
    (tmp_path / "tenants").symlink_to(FAKE_CONFIG.parent.parent / "tenants")
    native = f"backend: native\n        model: path:{tmp_path}/nothing-here"
    text = FAKE_CONFIG.read_text().replace("backend: fake", native, 1)
    first, _, rest = text.partition("        fake: {prefill_ms_per_1k: 20, ttft_ms: 5, tpot_ms: 5}\n")
    config.write_text(first + rest)
    refused = PlatformProcess(tmp_path / "state", config=config).run()
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.count("\n") == 1
    assert "nothing-here" in refused.stderr
    assert not (tmp_path / "state" / "ready.json").exists()


# --- the end


def test_sigterm_leaves_no_process_and_a_second_start_shows_no_keys(tmp_path: Path) -> None:
    with running_platform(tmp_path / "state") as first:
        assert len(first.members()) > 5
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        assert processes.find(first.mark) == []
        assert not first.ready_file.exists()
        assert first.text().rstrip().endswith("stopped")
        first.start()
        assert first.ready()["keys"] == {}
        assert "rw_" not in first.text()
        assert answers(first), "the keys of the first start hold"
        first.signal(signal.SIGINT)
        assert first.wait() == 0
        assert processes.find(first.mark) == []


def test_an_answer_that_runs_may_end_before_the_server_does(tmp_path: Path) -> None:
    with running_platform(tmp_path / "state") as server:
        request = {
            "model": "small",
            "stream": True,
            "max_tokens": 60,
            "messages": [{"role": "user", "content": "[[tpot_ms=50]] count"}],
        }
        headers = {"Authorization": f"Bearer {server.keys['acme']}"}
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=request, headers=headers, timeout=60.0
        ) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            server.signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 0


def test_a_signal_to_the_whole_group_ends_in_order(tmp_path: Path) -> None:
    """What Ctrl-C in a terminal, `timeout` and service managers do: every process of the group is told at once."""
    server = PlatformProcess(tmp_path / "state", own_group=True)
    try:
        server.start()
        server.signal_group(signal.SIGTERM)
        assert server.wait() == 0
        assert server.text().rstrip().endswith("stopped")
        assert processes.find(server.mark) == []
        assert not (tmp_path / "state" / "serve.json").exists()
    finally:
        server.stop()


def test_the_death_of_rays_own_server_ends_everything_and_says_so(tmp_path: Path) -> None:
    server = PlatformProcess(tmp_path / "state")
    try:
        server.start()
        (head,) = server.members("/gcs_server")
        processes.kill(head)
        assert server.wait() == 1
        assert "Ray ended unexpectedly" in server.text()
        assert processes.find(server.mark) == []
        assert not server.ready_file.exists()
    finally:
        server.stop()


def test_after_kill_9_the_next_start_clears_what_was_left(tmp_path: Path) -> None:
    with running_platform(tmp_path / "state") as server:
        mark, haproxy = server.mark, server.members("/haproxy -db")
        assert haproxy
        server.signal(signal.SIGKILL)
        server.wait()
        assert json.loads((tmp_path / "state" / "serve.json").read_text())["mark"] == mark
        server.ready_file.unlink(missing_ok=True)
        server.start()
        assert server.mark != mark
        assert processes.find(mark) == []
        assert answers(server)


def test_two_servers_run_side_by_side(platform: PlatformProcess, tmp_path: Path) -> None:
    with running_platform(tmp_path / "other") as other:
        assert answers(other)
        assert answers(platform)
        assert other.stop() == 0
        assert answers(platform), "ending one must not touch the other"


def test_without_haproxy_serves_own_proxy_stands_in_and_says_so(tmp_path: Path) -> None:
    server = PlatformProcess(tmp_path / "state", port=free_port())
    try:
        server.start(env={"RAY_SERVE_ENABLE_HA_PROXY": "0"})
        eventually(lambda: "no HAProxy here" in server.text(), "it says so")  # ready.json is there before the text
        assert server.members("/haproxy -db") == []
        assert listeners.beyond_loopback([server.pid, *server.members()]) == []
        assert answers(server)
    finally:
        assert server.stop() == 0
