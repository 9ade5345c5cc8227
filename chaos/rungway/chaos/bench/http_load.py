"""Load in two shapes. Closed loop: C connections, each sends its next request when the last one is answered. Open
loop: requests are due on a fixed schedule whatever the server does, and latency counts from the moment a request was
due, so that a server that stalls cannot hide the requests that it kept from being sent.

Bounded in time, in connections and in reconnects; whatever has not ended when the grace is over counts as an error.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rungway.chaos.bench.http_wire import Answer, Connection
from rungway.chaos.bench.shots import Shot, Target, judge
from rungway.clock import NS_PER_MS, NS_PER_S, monotonic_ns

CONNECT_S = 5.0
GRACE_S = 20.0
ARRIVAL_TICK_S = 0.001
RECONNECTS_MAX = 1000


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed; nan for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-len(ordered) * share // 1) - 1))]


@dataclass
class Load:
    """What one run saw. Rates and latencies are of answers that ended inside the measured window, errors of the whole
    run. Latencies in ms."""

    seconds: float = 0.0
    completed: int = 0
    latency_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    frames: int = 0
    lost: int = 0
    misplaced: int = 0
    degraded: int = 0
    reconnects: int = 0

    @property
    def per_second(self) -> float:
        return self.completed / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, float | int | dict[str, int]]:
        found: dict[str, float | int | dict[str, int]] = {
            "per_s": round(self.per_second, 1),
            "completed": self.completed,
            "p50_ms": round(percentile(self.latency_ms, 0.5), 3),
            "p90_ms": round(percentile(self.latency_ms, 0.9), 3),
            "p99_ms": round(percentile(self.latency_ms, 0.99), 3),
            "errors": dict(self.errors),
            "degraded": self.degraded,
            "reconnects": self.reconnects,
        }
        if self.frames:
            found |= {
                "ttft_ms_p50": round(percentile(self.ttft_ms, 0.5), 2),
                "ttft_ms_p99": round(percentile(self.ttft_ms, 0.99), 2),
                "gap_ms_p99": round(percentile(self.gap_ms, 0.99), 2),
                "frames": self.frames,
                "lost": self.lost,
                "misplaced": self.misplaced,
            }
        return found


class _Run:
    """Connections and books that both loops share."""

    def __init__(self, target: Target, shots: Sequence[Shot], warm_s: float, seconds: float) -> None:
        self.target = target
        self.shots = shots
        self.load = Load(seconds=seconds)
        self.start_ns = monotonic_ns() + int(warm_s * NS_PER_S)
        self.end_ns = self.start_ns + int(seconds * NS_PER_S)
        self.connections: list[Connection] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self._taken = 0

    def alive(self) -> bool:
        """Whether anything is under way."""
        return bool(self.tasks) or any(one.busy for one in self.connections)

    def next_shot(self) -> Shot:
        self._taken += 1
        return self.shots[self._taken % len(self.shots)]

    async def connect(self, on_answer: Callable[[Connection, Answer], None]) -> Connection | None:
        """A new connection, or None (counted) where the server does not take it."""
        index = len(self.connections)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, made = await loop.create_connection(
                    lambda: Connection(index, on_answer), self.target.host, self.target.port
                )
        except (OSError, TimeoutError):
            self.load.errors["cannot connect"] += 1
            return None
        self.connections.append(made)
        return made

    def spawn(self, work: Callable[[], asyncio.Task[None]]) -> None:
        task = work()
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def book(self, shot: Shot, due_ns: int, answer: Answer) -> None:
        load, end_ns = self.load, answer.end_ns
        load.answers += 1
        verdict = judge(shot, answer)
        load.frames += verdict.frames
        load.lost += verdict.lost
        load.misplaced += verdict.misplaced
        if verdict.problem:
            load.errors[verdict.problem] += 1
            return
        if b"\r\nx-rungway-rung: " in answer.head and b"\r\nx-rungway-rung: 0" not in answer.head:
            load.degraded += 1
        if self.start_ns <= end_ns < self.end_ns:
            load.completed += 1
            load.latency_ms.append((end_ns - due_ns) / NS_PER_MS)
            if shot.stream:
                load.ttft_ms.append((answer.first_ns - due_ns) / NS_PER_MS)
                load.gap_ms.extend([gap / NS_PER_MS for gap in answer.gaps_ns])

    async def finish(self, idle: Callable[[], bool]) -> Load:
        """Wait for what is under way, within the grace, and close everything."""
        last_ns = self.end_ns + int(GRACE_S * NS_PER_S)
        while not idle() and monotonic_ns() < last_ns:  # noqa: ASYNC110 - the deadline is the point
            await asyncio.sleep(0.02)
        for task in list(self.tasks):
            task.cancel()
        for connection in self.connections:
            if connection.busy:
                self.load.errors["unanswered at the end"] += 1
                connection.on_answer = _ignore
            connection.close()
        await asyncio.sleep(0.05)
        return self.load


def _ignore(_connection: Connection, _answer: Answer) -> None:
    return


async def closed_loop(
    target: Target, shots: Sequence[Shot], *, connections: int, seconds: float, warm_s: float = 1.0
) -> Load:
    """`connections` clients that always wait for an answer; measured for `seconds` after `warm_s`."""
    run = _Run(target, shots, warm_s, seconds)

    def fire(connection: Connection) -> None:
        shot = run.next_shot()
        connection.tag = shot
        connection.send(shot.raw)

    def on_answer(connection: Connection, answer: Answer) -> None:
        run.book(connection.tag, answer.sent_ns, answer)
        if monotonic_ns() >= run.end_ns:
            return
        if connection.open:
            fire(connection)
        elif run.load.reconnects < RECONNECTS_MAX:
            run.load.reconnects += 1
            run.spawn(lambda: asyncio.ensure_future(begin()))

    async def begin() -> None:
        made = await run.connect(on_answer)
        if made is not None:
            fire(made)

    await asyncio.gather(*(begin() for _ in range(connections)))
    while monotonic_ns() < run.end_ns and run.alive():  # noqa: ASYNC110 - the deadline is the point
        await asyncio.sleep(min(0.05, max(0.001, (run.end_ns - monotonic_ns()) / NS_PER_S)))
    return await run.finish(lambda: not any(one.busy for one in run.connections))


async def open_loop(
    target: Target,
    shots: Sequence[Shot],
    *,
    per_second: float,
    seconds: float,
    connections_max: int,
    warm_s: float = 1.0,
) -> Load:
    """`per_second` requests on an even schedule. Over `connections_max` under way they wait here, and the wait counts."""
    run = _Run(target, shots, warm_s, seconds)
    arrivals = _Arrivals(run, connections_max)
    every_ns = NS_PER_S / per_second
    begin_ns, sent = monotonic_ns(), 0
    while (now_ns := monotonic_ns()) < run.end_ns:
        while (due_ns := begin_ns + int(sent * every_ns)) <= now_ns:
            sent += 1
            arrivals.arrive(due_ns)
        await asyncio.sleep(ARRIVAL_TICK_S)
    done = await run.finish(lambda: not arrivals.waiting and not any(one.busy for one in run.connections))
    done.errors["never sent"] += len(arrivals.waiting)
    done.errors += Counter()
    return done


class _Arrivals:
    """Requests of an open loop on their way to a connection: an idle one, a new one while there may be more, or the
    next that answers."""

    def __init__(self, run: _Run, connections_max: int) -> None:
        self.run = run
        self.waiting: deque[int] = deque()
        self._idle: list[Connection] = []
        self._connections_max = connections_max
        self._opening = 0

    def arrive(self, due_ns: int) -> None:
        """A request is due now."""
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                self._fire(connection, due_ns)
                return
            self.run.connections.remove(connection)
        self.waiting.append(due_ns)
        if len(self.run.connections) + self._opening < self._connections_max and self._opening < len(self.waiting):
            self._opening += 1
            self.run.spawn(lambda: asyncio.ensure_future(self._widen()))

    def _fire(self, connection: Connection, due_ns: int) -> None:
        shot = self.run.next_shot()
        connection.tag = (shot, due_ns)
        connection.send(shot.raw)

    def _on_answer(self, connection: Connection, answer: Answer) -> None:
        shot, due_ns = connection.tag
        self.run.book(shot, due_ns, answer)
        if not connection.open:
            self.run.connections.remove(connection)
            self.run.load.reconnects += 1
        else:
            self._free(connection)

    async def _widen(self) -> None:
        made = await self.run.connect(self._on_answer)
        self._opening -= 1
        if made is not None:
            self._free(made)

    def _free(self, connection: Connection) -> None:
        if self.waiting:
            self._fire(connection, self.waiting.popleft())
        else:
            self._idle.append(connection)


async def learn(target: Target, prompts: Sequence[str], *, max_tokens: int) -> dict[str, str]:
    """The text that each prompt gets when nothing else runs: one request after the other, without streaming.

    Raises RuntimeError when an answer is not usable as a reference: fewer than `max_tokens` words, or a word twice.
    """
    texts: dict[str, str] = {}
    for number, prompt in enumerate(prompts):
        shot = target.shot(prompt, max_tokens=max_tokens, stream=False, key=number)
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def on_answer(_: Connection, answer: Answer, answered: asyncio.Future[Answer] = answered) -> None:
            if not answered.done():
                answered.set_result(answer)

        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(lambda on=on_answer: Connection(0, on), target.host, target.port)  # type: ignore[misc]
        made.send(shot.raw)
        async with asyncio.timeout(GRACE_S):
            answer = await answered
        made.close()
        verdict = judge(shot, answer)
        words = verdict.text.split()
        if verdict.problem or len(words) != max_tokens or len(set(words)) != len(words):
            raise RuntimeError(f"no reference text from {target.host}:{target.port}: {verdict} {answer.raw[:300]!r}")
        texts[prompt] = verdict.text
    return texts
