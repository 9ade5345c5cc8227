"""One seed is one history, in every process: a failing seed is worth nothing if it does not fail again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PLAY = """
import hashlib, msgspec
from rungway.simulate.faults import parse
from rungway.simulate.scenario import random_world
world = random_world({seed}, parse("delay:12,replica:20,controller:8,gateway:6"), 6.0)
told = msgspec.json.encode([list(world.disk.rows.values()), world.disk.audit, world.disk.waste])
print(hashlib.sha256(told).hexdigest())
"""


def history(seed: int, hash_seed: int) -> str:
    """Digest of everything that a world wrote down, played in a process with its own order of sets."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, "-c", PLAY.format(seed=seed)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("seed", [3, 47, 101])
def test_a_seed_plays_the_same_in_processes_that_order_their_sets_differently(seed: int) -> None:
    assert len({history(seed, hash_seed) for hash_seed in (0, 1, 2, 3)}) == 1


def test_two_seeds_differ() -> None:
    assert history(3, 0) != history(4, 0)
