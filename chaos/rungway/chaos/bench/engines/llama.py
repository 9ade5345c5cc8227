"""llama.cpp's server: jobs become streams over HTTP, one thread each; the client shares the machine but not the server's
threads, and its own processor time is not counted."""

from __future__ import annotations

import http.client
import json
import threading
import time
from pathlib import Path
from typing import Any

from rungway.chaos.bench.child import BenchError, Child, answers, free_port
from rungway.chaos.bench.engines.lines import JOB_S, START_S
from rungway.chaos.bench.engines.timeline import Event, Job, Timeline
from rungway.chaos.bench.ours import cpu_seconds

_DATA = b"data: "


class LlamaServer:
    def __init__(self, program: Path, weights: Path, *, slots: int, context: int, threads: int, log: Path) -> None:
        """`context` tokens for each of `slots` streams. Raises BenchError."""
        self._port = free_port()
        command = [str(program), "-m", str(weights), "--host", "127.0.0.1", "--port", str(self._port)]
        command += ["-t", str(threads), "-tb", str(threads), "-np", str(slots), "-c", str(slots * context)]
        self._child = Child([*command, "--no-webui"], log)
        self.cpu_before_s = 0.0
        self.facts: dict[str, Any] = {"dtype": "Q8_0", "threads": threads}
        try:
            self._child.await_ready(lambda: answers(f"http://127.0.0.1:{self._port}/health"), START_S)
        except BenchError:
            self.stop()
            raise

    def run(self, job: Job) -> Timeline:
        if job.late:
            raise BenchError("llama.cpp's server is not asked for late prompts")
        self.cpu_before_s = cpu_seconds(self._child.pid)
        events: list[Event] = []
        problems: list[str] = []
        started = time.perf_counter()

        def stream(number: int) -> None:
            try:
                self._stream(job, number, started, events)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                problems.append(f"llama.cpp's server: {error}")

        threads = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(len(job.prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, started + JOB_S - time.perf_counter()))
        if problems or any(thread.is_alive() for thread in threads):
            raise BenchError(problems[0] if problems else f"llama.cpp's server did not answer within {JOB_S:.0f} s")
        return Timeline(sorted(events, key=lambda event: event.at_s))

    def stop(self) -> None:
        self._child.stop()

    def _stream(self, job: Job, number: int, started: float, events: list[Event]) -> None:
        asked = {
            "prompt": job.prompts[number],
            "n_predict": job.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": False,
            "return_tokens": True,
            "seed": job.seed + number,
            "temperature": job.temperature,
            "top_p": job.top_p,
            "top_k": 0,
            "min_p": 0.0,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=JOB_S)
        try:
            connection.request("POST", "/completion", json.dumps(asked), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {answer.read(200)!r}")
            for line in answer:
                if line.startswith(_DATA) and (count := len(json.loads(line[len(_DATA) :])["tokens"])):
                    events.append(Event(number, time.perf_counter() - started, count, cpu_seconds(self._child.pid)))
        finally:
            connection.close()
