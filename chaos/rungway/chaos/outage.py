"""Watching an outage of the controller from outside: /metrics, several times a second, through whatever gateway answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import httpx

from rungway.chaos.load import Sample

LOOK_S = 0.1
DEGRADED = "rungway_quota_degraded "
OTHER = "rungway_pressure{"  # a series that only a controller knows


class Outage:
    """`begin` marks the kill. `rose_s`: from then until a gateway said that it admits from its lease (0 = it never did);
    `back_s`: until a controller answered again (0 = not yet)."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._noticed = False
        self.began_ns = self.rose_ns = self.back_ns = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(30.0)

    def begin(self) -> None:
        self.began_ns = time.time_ns()

    def await_end(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not self.back_ns and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return bool(self.back_ns)

    @property
    def rose_s(self) -> float:
        return (self.rose_ns - self.began_ns) / 1e9 if self.rose_ns else 0.0

    @property
    def back_s(self) -> float:
        return (self.back_ns - self.began_ns) / 1e9 if self.back_ns else 0.0

    def during(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those that were planned while the gateways knew that the controller was away: from when it was first noticed."""
        return [one for one in samples if self._since_ns() <= one.planned_wall_ns < self.back_ns]

    def _since_ns(self) -> int:
        return self.rose_ns or self.began_ns

    def _look(self) -> None:
        with httpx.Client(base_url=self._url, timeout=5.0) as client:
            while not self._over.wait(LOOK_S):
                with contextlib.suppress(httpx.HTTPError):
                    answer = client.get("/metrics")
                    self._see(answer.status_code, answer.text)

    def _see(self, status: int, text: str) -> None:
        """A scrape that fails or holds the gateway's own series only: the controller is away."""
        if not self.began_ns or self.back_ns:
            return
        whole = status == 200 and OTHER in text
        if not whole:
            self._noticed = True
            if status == 200 and f"{DEGRADED}1" in text and not self.rose_ns:
                self.rose_ns = time.time_ns()
        elif self._noticed and f"{DEGRADED}0" in text:
            self.back_ns = time.time_ns()


def long_text(tokens: int) -> str:
    """A prompt that the fake engine answers with so many tokens."""
    return f"[[tokens={tokens}]] tell me"
