"""Stopping an answer for a higher class costs it none of its own promises."""

from __future__ import annotations

from control.harness import SECOND, World, tenant
from control.test_preempt import PATIENT, SLO, evictions, fill, hog, obey
from rungway.contracts import TenantClass
from rungway.control.pace import Pace


def urgent_world() -> World:
    return World(tenant("acme", slo=SLO, ladder=PATIENT), hog(tenant_class=TenantClass.BATCH))


def test_a_pause_that_would_break_the_pace_is_skipped_until_pauses_are_short() -> None:
    """40 tokens at 100 ms allow 3.9 s, of which a pause is expected to take 5, until pauses turn out to take less."""
    world = urgent_world()
    fill(world, output_bound=40)
    world.submit("acme")
    world.advance(0.9)
    assert evictions(world) == []
    for _ in range(30):
        world.cell.pools["small"].pace.paused(0.2, world.mono_ns)
    world.submit("acme")
    world.advance(0.9)
    assert evictions(world)


def test_the_length_of_pauses_is_learned_from_pauses() -> None:
    world = urgent_world()
    fill(world)
    pace = world.cell.pools["small"].pace
    before_s = pace.pause_s(world.mono_ns)
    world.submit("acme")
    world.advance(0.6)
    [stopped] = obey(world)
    world.complete(
        next(name for name, f in world.cell.flights.items() if f.attempts and name != stopped and not f.entry)
    )
    world.advance(0.1)
    assert world.grant(stopped).attempt == 2 and pace.pause_s(world.mono_ns) < before_s


def test_long_pauses_are_learned_at_once_and_forgotten_in_time() -> None:
    """Else one storm would end all pauses: who expects long ones has none to learn from."""
    pace = Pace()
    first_s = pace.pause_s(0)
    for _ in range(3):
        pace.paused(20.0, SECOND)
    learned_s = pace.pause_s(SECOND)
    assert learned_s > 5 * first_s
    assert pace.pause_s(61 * SECOND) < learned_s / 10
    assert pace.pause_s(61 * SECOND) == pace.pause_s(61 * SECOND), "asking changes nothing"


def test_an_answer_that_has_not_begun_is_not_stopped_within_its_first_token_target() -> None:
    world = urgent_world()
    for _ in range(4):
        world.submit("hog", output_bound=1000)
    world.submit("acme")
    world.advance(0.9)
    assert evictions(world) == []
    world.submit("acme")
    world.advance(0.9)
    assert evictions(world), "its own target is missed in any case"
