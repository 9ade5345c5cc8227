"""What Locust runs: one user per stream of the plan that `load.send` wrote. Each user is a dispatcher: it starts every
request at its planned time in a greenlet of its own and never waits for an answer before the next (open loop).

Locust's own statistics get the same numbers: response time = time to first token from the planned moment.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from pathlib import Path
from urllib.parse import urlsplit

import gevent
import msgspec
from gevent.pool import Pool
from geventhttpclient import HTTPClient
from locust import User, task
from locust.exception import StopUser

from rungway.chaos.load import GAVE_UP, PLAN_VARIABLE, Plan, Sample, Stream, arrivals

LEAD_S = 0.5  # between the first user's start and the first planned moment, so that all users are there
_DEGRADED_IN_AUDIT = "SELECT 1 FROM audit WHERE request_id = ? AND kind = 'downgrade'"


class Run:
    """What the users share: the plan, its start on both clocks, and the samples."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.samples: list[Sample] = []
        self.left = len(plan.streams)
        self._start: tuple[float, int] | None = None
        self._ledger = sqlite3.connect(f"file:{plan.ledger}?mode=ro", uri=True) if plan.ledger else None

    def start(self) -> tuple[float, int]:
        """(monotonic seconds, wall ns) of the plan's zero; the first caller sets it."""
        if self._start is None:
            self._start = time.monotonic() + LEAD_S, time.time_ns() + int(LEAD_S * 1e9)
        return self._start

    def committed(self, request_id: str) -> bool | None:
        """Whether the downgrade's audit row is durable now (a read of about 0.1 ms)."""
        if self._ledger is None:
            return None
        return self._ledger.execute(_DEGRADED_IN_AUDIT, (request_id,)).fetchone() is not None

    def user_ended(self) -> bool:
        """Called by each user at its end; True for the last, after the samples are written."""
        self.left -= 1
        if self.left:
            return False
        Path(self.plan.samples).write_bytes(msgspec.json.encode(self.samples))
        return True


RUN = Run(msgspec.json.decode(Path(os.environ[PLAN_VARIABLE]).read_bytes(), type=Plan))


class Dispatcher(User):  # type: ignore[misc]
    """One stream. Subclasses below carry the streams of the plan."""

    abstract = True
    fixed_count = 1
    stream: Stream

    @task  # type: ignore[untyped-decorator]
    def send_all(self) -> None:
        stream, (start_s, start_wall_ns) = self.stream, RUN.start()
        target = urlsplit(RUN.plan.url)
        client = HTTPClient(
            target.hostname or "127.0.0.1",
            target.port,
            concurrency=stream.in_flight_max,
            connection_timeout=stream.timeout_s,
            network_timeout=stream.timeout_s,
        )
        pool = Pool(stream.in_flight_max)
        for offset_s, phase in arrivals(stream):
            planned_s = start_s + offset_s
            planned_wall_ns = start_wall_ns + int(offset_s * 1e9)
            if (pause_s := planned_s - time.monotonic()) > 0:
                gevent.sleep(pause_s)
            call = Call(stream, phase, planned_s, planned_wall_ns)
            if pool.full():
                self._record(call.sample(0, code="client_full", tries=0))
            else:
                pool.spawn(self._one, client, call)
        pool.join(timeout=stream.longest_s() + 5)
        client.close()
        if RUN.user_ended():
            self.environment.runner.quit()
        raise StopUser

    def _one(self, client: HTTPClient, first: Call) -> None:
        """The request and its retries; the last try is the sample."""
        stream, ids, lag_ms = self.stream, [], first.since_ms()
        tries, again = 0, True
        while again:
            tries += 1
            call = Call(stream, first.phase, first.planned_s, first.planned_wall_ns)
            sample = self._try(client, call)
            ids += [call.request_id] if call.request_id else []
            failed = sample.status in (200, 429, 503) or sample.code == GAVE_UP
            again = not sample.done and failed and tries <= stream.retries
        self._record(msgspec.structs.replace(sample, tries=tries, request_ids=tuple(ids), lag_ms=lag_ms))

    def _try(self, client: HTTPClient, call: Call) -> Sample:
        try:
            with gevent.Timeout(self.stream.patience_s or None, GaveUp()):
                return call.run(client)
        except GaveUp:
            return call.sample(0, code=GAVE_UP)
        except (OSError, EOFError, ValueError, RuntimeError) as error:
            return call.sample(0, code=type(error).__name__)

    def _record(self, sample: Sample) -> None:
        RUN.samples.append(sample)
        failed = None if sample.done or sample.status in (429, 503) else RuntimeError(f"{sample.status} {sample.code}")
        self.environment.events.request.fire(
            request_type=f"{sample.status}",
            name=f"{sample.stream}, {sample.phase}",
            response_time=sample.e2e_ms if sample.ttft_ms is None else sample.ttft_ms,
            response_length=sample.tokens,
            exception=failed,
            context={},
        )


class GaveUp(BaseException):
    """The client's patience has ended; no handler for errors on the way may take it for one."""


class Call:
    """One try of a request and what is known of its answer so far."""

    def __init__(self, stream: Stream, phase: str, planned_s: float, planned_wall_ns: int) -> None:
        self.stream = stream
        self.phase = phase
        self.planned_s = planned_s
        self.planned_wall_ns = planned_wall_ns
        self.request_id = ""
        self.ttft_ms: float | None = None
        self.first_wall_ns = 0
        self.tokens = 0
        self.done = False
        self.committed: bool | None = None

    def since_ms(self) -> float:
        return (time.monotonic() - self.planned_s) * 1000.0

    def run(self, client: HTTPClient) -> Sample:
        stream = self.stream
        body = {
            "model": stream.model,
            "max_tokens": stream.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": stream.prompt}],
        }
        headers = {"Authorization": f"Bearer {stream.key}", "Content-Type": "application/json"}
        if stream.deadline_ms:
            headers["x-rungway-deadline-ms"] = f"{stream.deadline_ms:g}"
        answer = client.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        get = answer.get
        request_id, degraded = str(get("x-request-id", "")), str(get("x-rungway-degraded", "none"))
        self.request_id = request_id
        code = ""
        if answer.status_code == 200:
            while line := bytes(answer.readline(b"\n")):
                self._line(line.strip(), request_id if degraded != "none" else "")
        else:
            code = str(json.loads(bytes(answer.read()))["error"]["code"])
        return self.sample(
            answer.status_code,
            code=code,
            retry_after=str(get("retry-after", "")),
            rung=int(str(get("x-rungway-rung", "0"))),
            degraded=degraded,
            served=str(get("x-rungway-model-served", "")),
        )

    def _line(self, line: bytes, degraded_id: str) -> None:
        if not line.startswith(b"data: "):
            return
        if not self.first_wall_ns:
            self.first_wall_ns = time.time_ns()
            if degraded_id:
                self.committed = RUN.committed(degraded_id)
        if line == b"data: [DONE]":
            self.done = True
        elif self.ttft_ms is None and b'"content":"' in line and b'"content":""' not in line:
            self.ttft_ms = self.since_ms()
        elif b'"choices":[]' in line:
            self.tokens = json.loads(line[6:])["usage"]["completion_tokens"]

    def sample(self, status: int, **more: object) -> Sample:
        facts: dict[str, object] = {
            "stream": self.stream.name,
            "phase": self.phase,
            "planned_wall_ns": self.planned_wall_ns,
            "lag_ms": 0.0,
            "status": status,
            "request_id": self.request_id,
            "first_wall_ns": self.first_wall_ns,
            "ttft_ms": self.ttft_ms,
            "e2e_ms": self.since_ms(),
            "tokens": self.tokens,
            "done": self.done,
            "committed": self.committed,
        }
        return msgspec.convert(facts | more, Sample)


for _stream in RUN.plan.streams:
    _name = f"Stream{_stream.name.title()}"
    globals()[_name] = type(_name, (Dispatcher,), {"stream": _stream, "abstract": False, "__module__": __name__})
