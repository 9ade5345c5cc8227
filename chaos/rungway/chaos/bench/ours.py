"""Rungway as it is measured: everything that governs is on, limits are high enough to refuse nothing.

Two tiers of the fake engine: `small` streams at 5 ms a token; `large` answers at once, so that unary rows show the
platform and not the engine. Both are wide (512 sequences), as the ladder would rightly degrade answers on a full one.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rungway.chaos.bench.child import Child, free_port
from rungway.chaos.bench.shots import Target
from rungway.clock import NS_PER_S, monotonic_ns
from rungway.settings import generate_key, hash_key

TENANTS = 4
START_S = 240.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Ours:
    """A running platform. `admin_key` opens /admin."""

    target: Target
    admin_key: str
    state_dir: Path
    started_s: float

    def get(self, path: str) -> Any:
        """JSON of an admin path, or its text where it is none."""
        url = f"http://{self.target.host}:{self.target.port}{path}"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self.admin_key}"})
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            body = answer.read().decode()
        return json.loads(body) if body.startswith(("{", "[")) else body

    def processes(self) -> dict[str, int]:
        """Our processes, name -> pid: gateways, controller, replicas, HAProxy and the server that started them."""
        record = json.loads((self.state_dir / "serve.json").read_text())
        found = {"serve": int(record["pid"])}
        wanted = f"RUNGWAY_INSTANCE={record['mark']}".encode()
        for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            name = _role(pid, wanted)
            if name:
                same = sum(1 for known in found if known == name or known.startswith(f"{name}#"))
                found[f"{name}#{same + 1}" if same else name] = pid
        return found


def _role(pid: int, wanted: bytes) -> str:
    try:
        if wanted not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return ""
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    if command.startswith("ray::ServeReplica:rungway:"):
        # Ray adds the method that runs just now, as in `Gateway.check_health`.
        return re.split(r"[ .]", command.removeprefix("ray::ServeReplica:rungway:"), maxsplit=1)[0]
    return "haproxy" if "haproxy" in command.split(" ")[0] else ""


def rss_bytes(pid: int) -> int:
    """Resident memory now; 0 when the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def cpu_seconds(pid: int) -> float:
    """CPU time used so far; 0 when the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _tier(price: dict[str, float], name: str, fake: dict[str, float]) -> dict[str, Any]:
    version = {
        "backend": "fake",
        "max_num_seqs": 512,
        "max_context": 8192,
        "replica_cost_usd_per_hour": 0.6,
        "fake": {**fake, "kv_blocks": 16_384},
    }
    return {"price_usd_per_1k": price, "versions": {name: version}}


def write_config(folder: Path, port: int) -> tuple[Path, tuple[str, ...], str]:
    """The platform file and its tenants. Returns (file, the tenants' keys, the admin key)."""
    small = {"input": 0.0002, "cached_input": 0.00005, "output": 0.0006}
    large = {"input": 0.001, "cached_input": 0.00025, "output": 0.003}
    platform = {
        "cell": "bench",
        "listen": {"host": "127.0.0.1", "port": port},
        "tenants_dir": "tenants",
        "state_dir": "state",
        "database": "sqlite",
        "gateway": {"replicas": 1},
        "tiers": {
            "small": _tier(small, "fake-small", {"prefill_ms_per_1k": 0, "ttft_ms": 5, "tpot_ms": 5}),
            "large": _tier(large, "fake-large", {"prefill_ms_per_1k": 0, "ttft_ms": 0, "tpot_ms": 1}),
        },
        "models": {"auto": {"tiers": ["small", "large"]}},
        "plans": {
            "bench": {
                "class": "interactive",
                "weight": 1,
                "quotas": {
                    "requests_per_minute": 10_000_000,
                    "tokens_per_minute": 1_000_000_000,
                    "concurrent_requests": 2000,
                    "queue_max": 2000,
                },
                "isolation": {"in_flight_share_max": 1.0},
                "budget": {"usd": 1_000_000, "per": "month", "at_limit": "degrade"},
                "slo": {"ttft_ms_p99": 2000, "tpot_ms_p99": 300, "availability": 0.999},
            }
        },
    }
    tenants = folder / "tenants"
    tenants.mkdir(parents=True, exist_ok=True)
    keys = []
    for number in range(TENANTS):
        name = f"bench-{number}"
        keys.append(generate_key(name))
        entry = {"id": f"{name}-1", "sha256": hash_key(keys[-1])}
        (tenants / f"{name}.yaml").write_text(
            yaml.safe_dump({"tenant": name, "plan": "bench", "models": "all", "keys": [entry]})
        )
    admin = generate_key("platform")
    entry = {"id": "admin-1", "sha256": hash_key(admin), "scopes": ["admin"]}  # type: ignore[dict-item]
    (tenants / "platform.yaml").write_text(yaml.safe_dump({"tenant": "platform", "models": [], "keys": [entry]}))
    path = folder / "platform.yaml"
    path.write_text(yaml.safe_dump(platform, sort_keys=False))
    return path, tuple(keys), admin


def start_ours(stack: ExitStack, work: Path) -> Ours:
    """`rungway serve` on a free port; the stack ends it. Raises BenchError."""
    folder = work / f"ours-{monotonic_ns()}"
    folder.mkdir(parents=True)
    port = free_port()
    config, keys, admin = write_config(folder, port)
    began_ns = monotonic_ns()
    child = Child([sys.executable, "-m", "rungway.cli", "serve", "--config", str(config)], work / "ours.log")
    stack.callback(child.stop)
    child.await_ready((folder / "state" / "ready.json").exists, START_S)
    started_s = (monotonic_ns() - began_ns) / NS_PER_S
    target = Target("127.0.0.1", port, "large", keys, stream_model="small")
    return Ours(target, admin, folder / "state", started_s)
