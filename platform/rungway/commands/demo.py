"""`rungway demo`: the platform's promises shown once, with two tenants, on a running platform or one of its own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rungway.commands.common import State, clock_text, fail, load, show, table

if TYPE_CHECKING:
    import httpx

    from rungway.chaos.stage import Stage

FAKE, REAL = Path("config/fake.yaml"), Path("config/quickstart.yaml")
LOUD, QUIET = "acme", "globex"
REPEATS_MAX = 2000
SETTLE_S = 15.0
START_S = 1800.0  # a first start with real weights downloads them
HOLD_S = 60


def demo(
    real: Annotated[
        bool, typer.Option("--real", help="Real weights (config/quickstart.yaml), not fake engines.")
    ] = False,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Another platform file.")] = None,
    state: State = None,
) -> None:
    """Two tenants, a stream, a downgrade with its audit row, a quota refusal, the bills against the engines' count.

    Uses the platform that runs on the state folder, if there is one; else it starts one in a temporary folder and ends
    it again. Needs the keys of acme and globex, which `ready.json` holds on a first start.
    """
    import httpx

    chosen = config or (REAL if real else FAKE)
    with _stage(chosen, state) as stage:
        started = time.monotonic()
        try:
            _Demo(stage).run()
        except httpx.HTTPError as error:
            raise fail(f"the platform did not answer as it should: {error}") from None
        show("", f"[dim]shown in {time.monotonic() - started:.0f} s[/dim]")


@contextlib.contextmanager
def _stage(config: Path, state: Path | None) -> Iterator[Stage]:
    """The platform that runs on the state folder, or an own one, which keeps its models in that folder, too."""
    from rungway.chaos import stage

    platform = load(config, state)
    folder = Path(platform.state_dir)
    ready = _running(folder)
    if ready.get("keys"):
        show(f"using the platform that runs at {ready['url']}")
        yield stage.Stage(str(ready["url"]), ready["keys"], folder)
        return
    if ready:
        show("a platform runs here, but its ready.json has no keys (they are shown on the first start only)")
    models = folder / "models" if any(version.backend != "fake" for version in platform.versions()) else None
    if models is not None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        models.mkdir(exist_ok=True)
    with stage.own(config, models=models, say=show, start_s=START_S) as place:
        yield place


def _running(folder: Path) -> dict[str, Any]:
    """`ready.json` of the platform that runs on `folder`; empty when none does (a killed one leaves the file)."""
    import httpx

    try:
        ready: dict[str, Any] = json.loads((folder / "ready.json").read_text(encoding="utf-8"))
        httpx.get(f"{ready['url']}/livez", timeout=5.0).raise_for_status()
    except (OSError, ValueError, KeyError, httpx.HTTPError):
        return {}
    return ready


class _Demo:
    """The acts of the show. Each prints what it did and what came back."""

    def __init__(self, stage: Stage) -> None:
        import httpx

        self.since_s = int(time.time()) - 1
        self.asked = 0
        self.http = {
            name: httpx.Client(
                base_url=stage.url, headers={"Authorization": f"Bearer {stage.key(name)}"}, timeout=120.0
            )
            for name in (LOUD, QUIET, "admin")
        }

    def run(self) -> None:
        try:
            self.streamed()
            request_id = self.downgraded()
            self.explained(request_id)
            self.refused()
            self.billed()
        finally:
            for client in self.http.values():
                client.close()

    def streamed(self) -> None:
        """acme's answer, printed as it comes."""
        _title(f"1. {LOUD} asks the large model and reads along")
        self.asked += 1
        body = _chat("large", "Tell me about the tides in one sentence.", 32) | {"stream": True}
        with self.http[LOUD].stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise fail(f"the first request was answered {answer.status_code}: {answer.read().decode()}")
            typer.echo("  ", nl=False)
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    typer.echo(choices[0]["delta"].get("content") or "" if choices else "", nl=False)
            typer.echo("")
        _headers(answer, "x-request-id", "x-rungway-model-served", "x-rungway-rung", "x-rungway-degraded")

    def downgraded(self) -> str:
        """globex asks for large while an operator holds the ladder on small_tier: the downgrade, marked."""
        _title(f"2. {QUIET} asks for large while the ladder is held on rung small_tier")
        show("  (held by hand, as `rungway ladder set small_tier` does; `rungway drill peak-load` gets there by load)")
        self.asked += 1
        hold = {"pool": "large", "rung": "small_tier", "ttl_s": HOLD_S, "why": "demo"}
        self.admin("POST", hold)
        try:
            answer = self.http[QUIET].post("/v1/chat/completions", json=_chat("large", "And what are currents?", 16))
        finally:
            self.admin("DELETE", {"pool": "large", "why": "demo over"})
        answer.raise_for_status()
        names = ("x-rungway-model-requested", "x-rungway-model-served", "x-rungway-rung", "x-rungway-degraded")
        _headers(answer, *names, "x-rungway-reason")
        return str(answer.headers["x-request-id"])

    def admin(self, method: str, body: dict[str, Any]) -> None:
        self.http["admin"].request(method, "/admin/ladder", json=body).raise_for_status()

    def explained(self, request_id: str) -> None:
        """The audit row, which was durable before the first byte, and what `rungway explain` says."""
        from rungway.commands.explain_text import print_explanation

        answer = self._settled(request_id)
        _title("3. Its row in the audit log, written before the first byte left")
        for entry in answer["audit"]:
            show(
                f"  #{entry['seq']} {clock_text(entry['wall_ns'])} {entry['kind']} rung {entry['rung']} {entry['tenant']}"
            )
            show(f"  hash {entry['hash'][:16]}... follows {entry['prev_hash'][:16]}...")
        _title(f"4. rungway explain {request_id}")
        print_explanation(answer)

    def _settled(self, request_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + SETTLE_S
        while True:
            answer = self.http["admin"].get(f"/v1/decisions/{request_id}")
            if answer.status_code == 200:
                found: dict[str, Any] = answer.json()
                return found
            if time.monotonic() > deadline:
                raise fail(f"request {request_id} was not settled within {SETTLE_S:.0f} s")
            time.sleep(0.1)

    def refused(self) -> None:
        """globex repeats a question, answered from its own cache, until its requests per minute are used up."""
        _title(f"5. {QUIET} repeats one question, answered from its own cache, until its quota is used up")
        body = _chat("small", "What is a tide table?", 8) | {"temperature": 0}
        client = self.http[QUIET]

        def ask(_: int) -> httpx.Response:
            return client.post("/v1/chat/completions", json=body, headers={"x-rungway-cache": "exact"})

        ask(0)
        self.asked += 1
        answered = 0
        with ThreadPoolExecutor(4) as pool:
            for start in range(0, REPEATS_MAX, 40):
                answers = list(pool.map(ask, range(start, start + 40)))
                self.asked += len(answers)
                answered += sum(answer.status_code == 200 for answer in answers)
                refusals = [answer for answer in answers if answer.status_code == 429]
                if refusals:
                    show(f"  {answered} answers, then {refusals[0].status_code} {refusals[0].json()['error']['code']}:")
                    show(f"  {refusals[0].json()['error']['message']}")
                    _headers(refusals[0], "retry-after", "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests")
                    return
        show(f"  {answered} answers and no refusal: this tenant's quota is larger than the demo is patient")

    def billed(self) -> None:
        """What each tenant pays, and the same tokens as the engines counted them."""
        _title("6. The bills, and what the engines counted")
        usage, books = self._books()
        names = ("requests", "input_tokens", "output_tokens", "cost_usd")
        rows = [[tenant, *(values[name] for name in names)] for tenant, values in usage.items()]
        show(table("", ["tenant", *names], rows))
        truth = [
            [tenant, sums["billed_output_tokens"], sums["wasted_tokens"], sums["engine_output_tokens"], sums["ok"]]
            for tenant, sums in books["tenants"].items()
        ]
        show(table("", ["tenant", "billed", "wasted", "engines emitted", "equal"], truth))
        chain = self.http["admin"].get("/admin/audit/verify").json()
        show(f"audit chain: {chain['message']}")
        if not (books["ok"] and chain["ok"]) or books["unsettled"]:
            raise fail("the books do not agree")

    def _books(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Usage per tenant and the comparison with the engines, once every request of the show has its row."""
        admin, deadline = self.http["admin"], time.monotonic() + SETTLE_S
        while True:
            usage = admin.get("/admin/usage", params={"since": self.since_s}).raise_for_status().json()["tenants"]
            answer = admin.get("/admin/engine-truth", params={"since": self.since_s, "limit": 1})
            books: dict[str, Any] = answer.raise_for_status().json()["reconcile"]
            rows = sum(totals["requests"] for totals in usage.values())
            if (rows >= self.asked and not books["unsettled"]) or time.monotonic() > deadline:
                return usage, books
            time.sleep(0.2)


def _chat(model: str, text: str, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "max_tokens": max_tokens, "messages": [{"role": "user", "content": text}]}


def _title(text: str) -> None:
    show("", f"[bold]{text}[/bold]")


def _headers(answer: httpx.Response, *names: str) -> None:
    for name in names:
        show(f"  [dim]{name}:[/dim] {answer.headers.get(name, '-')}")
