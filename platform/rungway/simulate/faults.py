"""What goes wrong, when: a plan drawn from the seed before the run starts, so that a seed and its kinds say it all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

from rungway.simulate.errors import SimulationError

if TYPE_CHECKING:
    from rungway.simulate.world import World


class FaultKind(StrEnum):
    DELAY = "delay"  # every message takes up to hundreds of milliseconds longer for a while
    CUT = "cut"  # one channel is cut, for longer or shorter than heartbeats need to notice
    REPLICA = "replica"  # SIGKILL of a replica; a successor on its node reads the token log
    GATEWAY = "gateway"  # SIGKILL of a gateway; its clients are cut off
    DISK = "disk"  # the ledger's commits take up to seconds for a while
    CONTROLLER = "controller"  # SIGKILL of the controller; the new one has the ledger and the hellos
    AWAY = "away"  # the same for longer than a channel needs to notice: gateways admit from their leases
    PARTITION = "partition"  # the controller lives, but every gateway is cut off from it for as long
    CLOCK = "clock"  # the wall clock steps by up to five minutes, back or forth
    SLOW = "slow"  # a replica's steps take up to 50 times as long for a while


PER_MINUTE_DEFAULT = 4.0
PER_MINUTE_MAX = 6000.0


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: FaultKind


def parse(text: str) -> dict[FaultKind, float]:
    """`all`, `none`, or `kind[:per_minute]` with commas: `replica:2,controller`. Raises SimulationError."""
    if text in ("", "none"):
        return {}
    if text == "all":
        return dict.fromkeys(FaultKind, PER_MINUTE_DEFAULT)
    wanted: dict[FaultKind, float] = {}
    for part in text.split(","):
        name, _, rate = part.partition(":")
        try:
            per_minute = float(rate) if rate else PER_MINUTE_DEFAULT
            if not 0.0 <= per_minute <= PER_MINUTE_MAX:
                raise ValueError
            wanted[FaultKind(name)] = per_minute
        except ValueError:
            known = ", ".join(FaultKind)
            raise SimulationError(
                f"{part!r} is no fault (known: all, none, {known}; KIND:PER_MINUTE, at most {PER_MINUTE_MAX:g})"
            ) from None
    return wanted


def plan(kinds: dict[FaultKind, float], duration_s: float, rng: Random) -> list[Fault]:
    """Poisson moments of each kind within the duration."""
    faults = []
    for kind, per_minute in sorted(kinds.items()):
        at_s = 0.0
        while per_minute > 0:
            at_s += rng.expovariate(per_minute / 60.0)
            if at_s >= duration_s:
                break
            faults.append(Fault(at_s, kind))
    return sorted(faults, key=lambda fault: (fault.at_s, fault.kind))


def _delay(world: World, rng: Random) -> None:
    world.delay_messages(rng.choice((5.0, 50.0, 400.0)), rng.uniform(0.2, 5.0))


def _cut(world: World, rng: Random) -> None:
    world.cut_link(rng.randrange(1 << 30), rng.choice((0.0, 0.5, 5.0)))


def _disk(world: World, rng: Random) -> None:
    world.slow_disk(rng.choice((50.0, 500.0, 3000.0)), rng.uniform(0.5, 5.0))


def _replica(world: World, rng: Random) -> None:
    world.kill_replica(rng.randrange(1 << 30), rng.choice((0.2, 3.0, 15.0)))


def _gateway(world: World, rng: Random) -> None:
    world.kill_gateway(rng.randrange(1 << 30), rng.choice((0.2, 3.0)))


def _controller(world: World, rng: Random) -> None:
    world.crash_controller(rng.choice((0.1, 1.0, 6.0)))


def _away(world: World, rng: Random) -> None:
    world.crash_controller(rng.choice((4.0, 8.0, 15.0)))


def _partition(world: World, rng: Random) -> None:
    world.partition_controller(rng.choice((2.0, 5.0, 14.0)))


def _clock(world: World, rng: Random) -> None:
    world.step_clock(rng.uniform(-300.0, 300.0))


def _slow(world: World, rng: Random) -> None:
    world.slow_replica(rng.randrange(1 << 30), rng.choice((3.0, 50.0)), rng.uniform(0.5, 5.0))


APPLY: dict[FaultKind, Callable[[World, Random], None]] = {
    FaultKind.DELAY: _delay,
    FaultKind.CUT: _cut,
    FaultKind.DISK: _disk,
    FaultKind.REPLICA: _replica,
    FaultKind.GATEWAY: _gateway,
    FaultKind.CONTROLLER: _controller,
    FaultKind.AWAY: _away,
    FaultKind.PARTITION: _partition,
    FaultKind.CLOCK: _clock,
    FaultKind.SLOW: _slow,
}
