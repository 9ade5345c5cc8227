"""One simulated cell: controller, gateways, replicas, clients and faults on one loop and one `Random`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random

from rungway.clock import NS_PER_MS, NS_PER_S
from rungway.contracts import Platform, Version
from rungway.policies.quality import QualityModel, load_default
from rungway.simulate.clients import Clients
from rungway.simulate.controller import COMMIT_NS, SimController
from rungway.simulate.cost import cost_of
from rungway.simulate.disk import Disk
from rungway.simulate.faults import APPLY, Fault
from rungway.simulate.flight import Flight
from rungway.simulate.gateway import SimGateway
from rungway.simulate.invariants import Invariants
from rungway.simulate.link import Link, Wire
from rungway.simulate.loop import Call, Loop
from rungway.simulate.measure import Sampler
from rungway.simulate.replica import SimReplica
from rungway.simulate.workload import Arrival
from rungway.types import AttemptEnd

WARM_UP_NS = NS_PER_S  # everybody has said hello and reported once
DRAIN_MAX_S = 300.0


class World:
    """`costs` names a preset per tier (see `cost.py`); `replicas` how many per version (default: its minimum)."""

    def __init__(
        self,
        platform: Platform,
        *,
        seed: int = 0,
        costs: Mapping[str, str] | None = None,
        replicas: int | None = None,
        gateways: int | None = None,
        tries_max: int = 1,
        backoff_s: float | None = None,
        report_ms: float = 100.0,
        quality: QualityModel | None = None,
    ) -> None:
        self.platform = platform
        self.rng = Random(seed)
        self.loop = Loop()
        self.wire = Wire(self.loop, self.rng, platform.channel)
        self.disk = Disk()
        self.watch = Invariants(self.loop, self.disk)
        self.quality = quality or load_default()
        self.controller = SimController(self.loop, self.rng, platform, self.quality, self.disk, self.watch)
        self.replicas: dict[str, SimReplica] = {}  # by name, the dead ones among them
        self.watch.replicas = self.replicas
        self.gateways: list[SimGateway] = []
        self.clients = Clients(self.loop, platform, self.gateways, tries_max=tries_max, backoff_s=backoff_s)
        self.sampler = Sampler(self)
        self.faults = 0
        self.down = 0  # processes that are dead and will be back
        self._costs = dict(costs or {})
        self._report_ms = report_ms
        self._serial = 0
        for version in platform.versions():
            for number in range(replicas or version.replicas_min):
                self.start_replica(version, f"{version.tier}.{version.name}.{number}")
        for _ in range(gateways or platform.gateway.replicas):
            self.start_gateway()
        self.loop.run(WARM_UP_NS)
        self.sampler.start()

    # -- running ----------------------------------------------------------------------------------------------

    def play(self, arrivals: Iterable[Arrival], faults: Iterable[Fault] = (), *, drain_s: float = DRAIN_MAX_S) -> None:
        """Run the workload from now on, and until everything that it left behind is settled (at most `drain_s`)."""
        start_ns = self.loop.now_ns
        shift_s = start_ns / NS_PER_S
        moved = (_shifted(arrival, shift_s) for arrival in arrivals)
        for fault in faults:
            self.loop.at(start_ns + int(fault.at_s * NS_PER_S), self._apply, fault)
        self.clients.begin(moved)
        while self.clients.pending:
            self.loop.run(self.loop.now_ns + NS_PER_S)
        self.sampler.stop()
        limit_ns = self.loop.now_ns + int(drain_s * NS_PER_S)
        while self.loop.now_ns < limit_ns and not self.at_rest():
            self.loop.run(self.loop.now_ns + NS_PER_S)
        self.watch.final(self)

    def at_rest(self) -> bool:
        """Nothing in flight, nothing unacknowledged, nothing on its way to the disk, everybody alive."""
        controller = self.controller
        if self.down or not controller.alive or controller.core.cell.flights or controller.core.cell.orphans:
            return False
        if controller.writing:
            return False
        if any(gateway.alive and (gateway.flights or gateway.unacked) for gateway in self.gateways):
            return False
        return not any(replica.alive and (replica.owed or replica.batch.running) for replica in self.replicas.values())

    def living(self) -> list[SimReplica]:
        return [replica for replica in self.replicas.values() if replica.alive]

    # -- processes --------------------------------------------------------------------------------------------

    def start_replica(self, version: Version, node: str, owed: list[AttemptEnd] | None = None) -> None:
        self._serial += 1
        replica = SimReplica(
            self.loop,
            f"{node}#{self._serial}",
            node,
            version,
            cost_of(version, self._costs),
            report_ms=self._report_ms,
            owed=owed,
        )
        self.replicas[replica.name] = replica
        self.controller.links[Link(self.wire, replica, self.controller)] = None

    def start_gateway(self) -> None:
        self._serial += 1
        name = f"gateway#{self._serial}"
        gateway = SimGateway(
            self.wire, name, self.platform, self.replicas, self.clients.done, self.quality, self.watch.history
        )
        self.gateways.append(gateway)
        self.controller.links[Link(self.wire, gateway, self.controller)] = None

    # -- faults -----------------------------------------------------------------------------------------------

    def _apply(self, fault: Fault) -> None:
        self.faults += 1
        APPLY[fault.kind](self, self.rng)

    def _later(self, after_s: float, start: Call, *args: object) -> None:
        """A successor starts then."""

        def back() -> None:
            self.down -= 1
            start(*args)

        self.down += 1
        self.loop.after(int(after_s * NS_PER_S), back)

    def kill_replica(self, pick: int, back_after_s: float) -> None:
        living = self.living()
        if not living:
            return
        replica = living[pick % len(living)]
        owed = replica.kill()
        if replica.link is not None:
            replica.link.close()
            self.controller.links.pop(replica.link, None)
        for gateway in self.gateways:
            link = gateway.links.get(replica.name)
            if link is not None:
                link.cut()
        self._later(back_after_s, self.start_replica, replica.version, replica.node, owed)

    def kill_gateway(self, pick: int, back_after_s: float) -> None:
        living = [gateway for gateway in self.gateways if gateway.alive]
        if not living:
            return
        gateway = living[pick % len(living)]
        gone: list[Flight] = gateway.kill()
        if gateway.uplink is not None:
            self.controller.links.pop(gateway.uplink, None)
        for flight in gone:
            self.clients.died(flight)
        self._later(back_after_s, self.start_gateway)

    def crash_controller(self, down_s: float) -> None:
        if self.controller.alive:
            self.watch.crashed(self.controller)
            self.controller.crash()
            self._later(down_s, self.controller.start)

    def step_clock(self, seconds: float) -> None:
        self.loop.wall_step_ns += int(seconds * NS_PER_S)

    def slow_replica(self, pick: int, factor: float, for_s: float) -> None:
        living = self.living()
        if living:
            batch = living[pick % len(living)].batch
            batch.slow = factor
            self.loop.after(int(for_s * NS_PER_S), setattr, batch, "slow", 1.0)

    def cut_link(self, pick: int, blocked_s: float) -> None:
        links = sorted(self.controller.links, key=lambda link: link.client.name)
        links += [link for gateway in self.gateways if gateway.alive for link in gateway.links.values()]
        if links:
            links[pick % len(links)].cut(int(blocked_s * NS_PER_S))

    def partition_controller(self, blocked_s: float) -> None:
        """The controller lives on, but no gateway reaches it."""
        for gateway in self.gateways:
            if gateway.alive and gateway.uplink is not None:
                gateway.uplink.cut(int(blocked_s * NS_PER_S))

    def slow_disk(self, commit_ms: float, for_s: float) -> None:
        self.controller.commit_ns = int(commit_ms * NS_PER_MS)
        self.loop.after(int(for_s * NS_PER_S), setattr, self.controller, "commit_ns", COMMIT_NS)

    def delay_messages(self, mean_ms: float, for_s: float) -> None:
        self.wire.extra_ms = mean_ms
        self.loop.after(int(for_s * NS_PER_S), setattr, self.wire, "extra_ms", 0.0)


def _shifted(arrival: Arrival, by_s: float) -> Arrival:
    return replace(arrival, at_s=arrival.at_s + by_s)
