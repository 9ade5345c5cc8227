"""The parts of `rungway serve` that need no Ray: HAProxy's narrowed configuration, listeners, the claim on a state dir."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rungway.commands.serve import _ready_lines
from rungway.serve import haproxy, listeners, processes
from rungway.serve.drain import ongoing
from rungway.serve.environment import (
    RUN_DIR_BYTES_MAX,
    StartError,
    free_port,
    make_run_directory,
    run_directory,
    threads_per_engine,
)
from rungway.serve.instance import Instance, check_port
from rungway.serve.loopback import narrowed
from rungway.serve.runner import Ready
from rungway.settings import load_platform

CONFIGS = Path(__file__).parents[2] / "config"

SERVES_CONFIG = """global
    log 127.0.0.1:514 local0 info
    stats socket /run/admin.sock mode 666 level admin expose-fd listeners
defaults
    mode http
    errorfile 503 /run/500.http
    log global
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
    use_backend app
backend app
    server one 127.0.0.1:30000 check
listen stats
  bind *:8404
  stats enable
"""


def narrow(text: str, host: str = "127.0.0.1") -> str:
    return haproxy.narrow(text, listen_host=host, errors="/run")


def test_only_the_front_door_of_haproxy_stays() -> None:
    lines = [line.strip() for line in narrow(SERVES_CONFIG).splitlines()]
    assert [line for line in lines if line.startswith("bind")] == ["bind 127.0.0.1:8000"]
    assert "frontend prometheus" not in lines
    assert "listen stats" not in lines
    assert "server one 127.0.0.1:30000 check" in lines
    assert [line for line in lines if line.startswith("errorfile")] == [
        f"errorfile {status} /run/{status}.http" for status in (400, 408, 503)
    ]
    assert "stats socket /run/admin.sock mode 600 level admin expose-fd listeners" in lines
    assert "log 127.0.0.1:514 local0 info" not in lines
    assert "http-request del-header x-request-timeout-seconds" in lines


def test_the_front_door_takes_the_address_that_was_configured() -> None:
    assert "    bind 192.0.2.7:8000\n" in narrow(SERVES_CONFIG, "192.0.2.7")


@pytest.mark.parametrize(
    "addition",
    ["frontend more\n    bind :9999\n", "listen other\n    bind *:9999\n", "backend odd\n    bind /run/some.sock\n"],
)
def test_a_bind_that_is_not_known_is_refused(addition: str) -> None:
    with pytest.raises(haproxy.UnknownConfig):
        narrow(SERVES_CONFIG + addition)


def test_a_configuration_without_a_front_door_is_refused() -> None:
    with pytest.raises(haproxy.UnknownConfig):
        narrow("global\n    maxconn 10\n")


def test_narrowing_twice_changes_nothing_more() -> None:
    once = narrow(SERVES_CONFIG)
    binds = [line for line in narrow(once).splitlines() if "bind" in line]
    assert binds == ["    bind 127.0.0.1:8000"]


def test_serves_own_template_is_understood(tmp_path: Path) -> None:
    """Against the installed Ray: a new version that adds a listener must show up here, not in production."""
    template = pytest.importorskip("ray.serve._private.haproxy_templates").HAPROXY_CONFIG_TEMPLATE
    text = template.replace("{{ config.frontend_host }}:{{ config.frontend_port }}", "127.0.0.1:8000")
    text = text.replace("{{ config.metrics_port }}", "9101").replace("{{ config.stats_port }}", "8404")
    without_grpc, _, rest = text.partition("{%- if config.grpc_enabled %}\nfrontend grpc_frontend")
    text = without_grpc + "listen stats" + rest.rpartition("listen stats")[2]
    binds = [line.strip() for line in narrow(text).splitlines() if line.strip().startswith("bind")]
    assert binds == ["bind 127.0.0.1:8000"]


def test_the_launcher_runs_this_module_and_is_private(tmp_path: Path) -> None:
    launcher = haproxy.write_launcher(tmp_path)
    assert stat.S_IMODE(launcher.stat().st_mode) == 0o700
    config = tmp_path / "haproxy.cfg"
    config.write_text(SERVES_CONFIG)
    env = {
        **os.environ,
        haproxy.BINARY: "/bin/echo",
        haproxy.LISTEN_HOST: "127.0.0.1",
        haproxy.ERROR_FILES: "/run",
    }
    ran = subprocess.run(
        [launcher, "-db", "-f", config], env=env, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
    )
    assert ran.stdout.strip() == f"-db -f {config}"
    assert "8404" not in config.read_text()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("[::]:0", "127.0.0.1:0"),
        ("0.0.0.0:50", "127.0.0.1:50"),
        ("127.0.0.1:7", "127.0.0.1:7"),
        ("10.0.0.1:7", "10.0.0.1:7"),
    ],
)
def test_wildcards_become_loopback(address: str, expected: str) -> None:
    assert narrowed(address) == expected


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("0.0.0.0", False)])
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the kernel's tables of Linux")
def test_listeners_are_found_where_they_are(host: str, loopback: bool) -> None:
    with socket.socket() as listening:
        listening.bind((host, 0))
        listening.listen()
        port = listening.getsockname()[1]
        (found,) = [one for one in listeners.listening([os.getpid()]) if one.port == port]
        assert found.address == host
        assert found.loopback is loopback
        assert (found in listeners.beyond_loopback([os.getpid()])) is not loopback


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found through /proc")
def test_a_process_belongs_by_its_mark_alone() -> None:
    code = "import time; time.sleep(600)"
    ours = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, processes.MARK: "mark-a"})
    strangers = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, processes.MARK: "mark-ab"})
    try:
        while not processes.find("mark-a") or not processes.find("mark-ab"):
            assert ours.poll() is None
        assert processes.find("mark-a") == [ours.pid]
        assert processes.end("mark-a") == []
        assert ours.wait(60) != 0
        assert strangers.poll() is None
    finally:
        for process in (ours, strangers):
            process.kill()
            process.wait(60)


def test_a_state_directory_has_one_owner_at_a_time(tmp_path: Path) -> None:
    first = Instance(tmp_path / "state")
    first.claim()
    first.record("no-such-mark", tmp_path)
    with pytest.raises(StartError, match=f"already running on .* \\(process {os.getpid()}\\)"):
        Instance(tmp_path / "state").claim()
    first.announce("http://127.0.0.1:1", "http://127.0.0.1:1/dashboard", {"acme": "rw_acme_x"})
    ready = tmp_path / "state" / "ready.json"
    assert stat.S_IMODE(ready.stat().st_mode) == 0o600
    first.release()
    assert not ready.exists()
    second = Instance(tmp_path / "state")
    second.claim()
    second.release()


def test_a_broken_record_does_not_keep_a_server_from_starting(tmp_path: Path) -> None:
    (tmp_path / "serve.json").write_text("{not json")
    instance = Instance(tmp_path)
    instance.claim()
    instance.release()


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1:{port}: the port is taken") as refused:
            check_port("127.0.0.1", port)
        assert refused.value.code == 2
    check_port("127.0.0.1", free_port())


def test_the_run_directory_is_short_stable_and_private(tmp_path: Path) -> None:
    path = run_directory(tmp_path)
    assert len(str(path)) <= RUN_DIR_BYTES_MAX
    assert path == run_directory(tmp_path)
    assert path != run_directory(tmp_path / "other")
    mine = tmp_path / "run"
    make_run_directory(mine)
    (mine / "old").touch()
    make_run_directory(mine)
    assert list(mine.iterdir()) == []
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700


def test_a_run_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError):
        make_run_directory(tmp_path / "run")


def test_running_requests_are_the_backends_sessions() -> None:
    statistics = (
        "# pxname,svname,qcur,qmax,scur\nfront,FRONTEND,,,7\napp,one,0,0,3\napp,BACKEND,0,0,3\nx,BACKEND,0,0,2\n"
    )
    assert ongoing(statistics) == 5
    assert ongoing("") == 0


def test_cores_are_shared_out_among_native_engines() -> None:
    two_engines = load_platform(CONFIGS / "quickstart.yaml")
    assert [threads_per_engine(two_engines, cores) for cores in (1, 2, 8)] == [1, 1, 4]
    no_engine = load_platform(CONFIGS / "fake.yaml")
    assert threads_per_engine(no_engine, 8) == 8


@pytest.mark.parametrize("keys", [{"acme": "rw_acme_x", "admin": "rw_platform_y"}, {}])
def test_who_starts_it_learns_how_to_ask(keys: dict[str, str]) -> None:
    """With the keys that were just made; later, where none can be shown, how to make another."""
    ready = Ready("http://127.0.0.1:8000", keys, False, "auto", lambda: 3.0)
    lines = "\n".join(_ready_lines(ready))
    assert all(text in lines for text in keys.values())
    assert ("rungway keys create" in lines) == ("$RUNGWAY_KEY" in lines) == (not keys)
