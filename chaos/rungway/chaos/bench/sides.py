"""The servers that are measured: Rungway, LiteLLM's proxy, vllm-router, and the upstream alone.

A `Side` starts everything it needs (upstream included) and stops all of it. Only one side runs at a time. Other
gateways live in virtual environments of their own below the cache folder, made on first use.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
import venv
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rungway.chaos.bench.child import BenchError, Child, answers, free_port
from rungway.chaos.bench.ours import start_ours
from rungway.chaos.bench.shots import Target

LITELLM = "litellm[proxy]==1.108.7"
VLLM_ROUTER = "vllm-router==0.1.17"
START_S = 180.0
INSTALL_S = 900.0


def cache_dir() -> Path:
    """Where other gateways are installed: RUNGWAY_BENCH_CACHE, else below the user's cache folder."""
    chosen = os.environ.get("RUNGWAY_BENCH_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "rungway" / "bench"


@dataclass
class Side:
    """`start(stack, work)` starts it (the stack stops it) and says where to shoot."""

    name: str
    start: Callable[[ExitStack, Path], Target]
    about: str
    stack: ExitStack = field(default_factory=ExitStack)


def installed(requirement: str, program: str) -> Path:
    """The virtual environment that holds `requirement`; makes it where `program` is missing. Raises BenchError."""
    name = requirement.split("[")[0].split("==")[0] + "-" + requirement.split("==")[1]
    home = cache_dir() / name
    if (home / "bin" / program).exists():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    venv.create(home, with_pip=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", requirement]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode != 0 or not (home / "bin" / program).exists():
        raise BenchError(f"cannot install {requirement}: {done.stderr.strip()[-300:]}")
    return home


def start_upstream(stack: ExitStack, work: Path) -> Target:
    port = free_port()
    child = Child([sys.executable, "-m", "rungway.chaos.bench.upstream", str(port)], work / "upstream.log")
    stack.callback(child.stop)
    child.await_ready(lambda: answers(f"http://127.0.0.1:{port}/health"), START_S)
    return Target("127.0.0.1", port, "fake")


# LiteLLM's virtual keys need PostgreSQL and Prisma's engines, which Prisma downloads from its own server. The hook below
# is LiteLLM's documented way to check keys without them: a table of key hashes with limits, looked up for every request;
# its limiters then run on what the hook returns. That is less work for LiteLLM than a key in a database.
_KEY_HOOK = """
import hashlib, json, pathlib
from litellm.proxy._types import ProxyException, UserAPIKeyAuth

KEYS = json.loads(pathlib.Path(__file__).with_name("keys.json").read_text())

async def check(request, api_key):
    digest = hashlib.sha256(api_key.encode()).hexdigest()
    found = KEYS.get(digest)
    if found is None:
        raise ProxyException("invalid key", "auth_error", "api_key", 401)
    return UserAPIKeyAuth(api_key=digest, **found)
"""


def start_litellm(stack: ExitStack, work: Path) -> Target:
    home = installed(LITELLM, "litellm")
    upstream = start_upstream(stack, work)
    folder = work / "litellm"
    folder.mkdir(exist_ok=True)
    keys = tuple(f"sk-bench-{number}-0123456789abcdef" for number in range(4))
    limits = {"rpm_limit": 10_000_000, "tpm_limit": 1_000_000_000, "max_parallel_requests": 10_000}
    table = {
        hashlib.sha256(key.encode()).hexdigest(): {**limits, "user_id": f"user-{at}", "team_id": f"team-{at}"}
        for at, key in enumerate(keys)
    }
    (folder / "keys.json").write_text(json.dumps(table))
    (folder / "keyhook.py").write_text(_KEY_HOOK)
    model = {"model": "openai/fake", "api_base": f"http://127.0.0.1:{upstream.port}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": "fake", "litellm_params": model}],
        "general_settings": {"custom_auth": "keyhook.check"},
        "litellm_settings": {"telemetry": False, "num_retries": 0},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    port = free_port()
    python = home / "bin" / "litellm"
    command = [str(python), "--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    env = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MASTER_KEY": "sk-" + secrets.token_hex(32),
        "LITELLM_MODE": "PRODUCTION",
        "PYTHONPATH": str(folder),
    }
    child = Child([*command, "--num_workers", "1"], work / "litellm.log", env)
    stack.callback(child.stop)
    child.await_ready(lambda: answers(f"http://127.0.0.1:{port}/health/liveliness"), START_S)
    return Target("127.0.0.1", port, "fake", keys)


def start_vllm_router(stack: ExitStack, work: Path) -> Target:
    home = installed(VLLM_ROUTER, "vllm-router")
    upstream = start_upstream(stack, work)
    port, metrics = free_port(), free_port()
    command = [str(home / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    command += ["--worker-urls", f"http://127.0.0.1:{upstream.port}", "--policy", "round_robin"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    child = Child(command, work / "vllm-router.log")
    stack.callback(child.stop)
    child.await_ready(lambda: answers(f"http://127.0.0.1:{port}/health"), START_S)
    return Target("127.0.0.1", port, "fake")


def start_rungway(stack: ExitStack, work: Path) -> Target:
    return start_ours(stack, work).target


SIDES: dict[str, Side] = {
    side.name: side
    for side in (
        Side("ours", start_rungway, "rungway serve, governed, fake engine"),
        Side("litellm", start_litellm, f"{LITELLM}, 1 worker, key table through its auth hook, fake upstream"),
        Side("vllm-router", start_vllm_router, f"{VLLM_ROUTER}, no governance, fake upstream"),
        Side("upstream", start_upstream, "the fake upstream alone"),
    )
}
