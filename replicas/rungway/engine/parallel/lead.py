"""Rank 0 of a divided model: starts the other ranks, tells each of them every step, and is to the engine a decoder like any
other. The engine schedules and samples here alone, so ranks never disagree on what to compute.

A rank that dies or stalls ends the engine: the collective or the message to it fails within the time-out, RankError
leaves the step loop, every request gets an error, and the replica is replaced as a whole.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rungway.engine.errors import EngineError, ModelError
from rungway.engine.families.spec import Architecture
from rungway.engine.model import Batch, Decoder, Weights
from rungway.engine.parallel.group import Group, RankError, here, meeting_place, ready
from rungway.engine.parallel.shards import ShardedWeights, precision_of, share_of
from rungway.engine.parallel.wire import CacheSize, Message, Setup, moved, send

LOAD_WAIT_S = 1800.0  # until all ranks have their weights
_END_WAIT_S = 5.0
_POLL_S = 0.05
_CPU = torch.device("cpu")


class Followers:
    """The processes of ranks 1 to size - 1, each with a socket to it."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []
        for _ in range(1, size):
            ours, theirs = socket.socketpair()
            ours.settimeout(timeout_s)
            with theirs:
                command = [sys.executable, "-m", "rungway.engine.parallel.follower", str(theirs.fileno())]
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            self._processes.append(process)
            self._links.append(ours)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, message: Message) -> None:
        """Raises RankError."""
        for rank in range(1, len(self._links) + 1):
            self.tell_one(rank, message)

    def await_all(self, store: TCPStore, key: Callable[[int], str]) -> None:
        """Until each rank has set its key. Raises ModelError when one ends before, or after LOAD_WAIT_S."""
        end = time.monotonic() + LOAD_WAIT_S
        for rank, process in enumerate(self._processes, start=1):
            while not store.check([key(rank)]):
                code = process.poll()
                if code is not None:
                    raise ModelError(f"rank {rank} of the model ended with code {code} before it was ready")
                if time.monotonic() > end:
                    raise ModelError(f"rank {rank} of the model was not ready after {LOAD_WAIT_S:.0f} s")
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Ends all of them: by closing their socket, or else by force."""
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(_END_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def tell_one(self, rank: int, message: Message) -> None:
        """Raises RankError."""
        try:
            send(self._links[rank - 1], message)
        except OSError as error:
            raise RankError(f"rank {rank} of the model does not take its work: {error}") from error


class LeadDecoder(Decoder):
    """Rank 0's share, and the word to the others. `close` has to be called in the end."""

    def __init__(
        self, arch: Architecture, weights: Weights, dtype: str, device: torch.device, group: Group, followers: Followers
    ) -> None:
        share, mine = share_of(arch, group.size), ShardedWeights(weights, group.rank, group.size)
        self.followers = followers
        self._ranks = group
        super().__init__(share, mine, precision_of(dtype, device), device, group=group)

    def cache(self, blocks: int, block_tokens: int) -> list[torch.Tensor]:
        self.followers.tell(CacheSize(blocks, block_tokens))
        return super().cache(blocks, block_tokens)

    def forward(self, batch: Batch, cache: list[torch.Tensor]) -> torch.Tensor:
        """Raises RankError when the step cannot be computed: ranks that have lost step never find it again."""
        self.followers.tell(moved(batch, _CPU))
        try:
            return super().forward(batch, cache)
        except RuntimeError as error:
            raise RankError(f"a divided step failed: {error}") from error

    def close(self) -> None:
        self.followers.close()
        self._ranks.leave()


def lead(
    path: Path, arch: Architecture, weights: Weights, dtype: str, device: torch.device, size: int, timeout_s: float
) -> LeadDecoder:
    """The model in `path` over `size` processes, all loaded when this returns. Raises ModelError."""
    share_of(arch, size), precision_of(dtype, device)  # refused before anything is started
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ModelError(f"tensor_parallel {size} needs as many devices; there are {torch.cuda.device_count()}")
    threads = torch.get_num_threads()
    if device.type == "cpu":  # the ranks share the cores that this process had
        threads = max(1, threads // size)
        torch.set_num_threads(threads)
    followers, group = Followers(size, timeout_s), None
    try:
        store = meeting_place(0, size, timeout_s, hold=True)
        for rank in range(1, size):
            followers.tell_one(rank, Setup(path, dtype, device.type, rank, size, store.port, threads, timeout_s))
        followers.await_all(store, here)
        group = Group(store, 0, size, torch.device("cuda", 0) if device.type == "cuda" else device, timeout_s)
        model = LeadDecoder(arch, weights, dtype, device, group, followers)
        followers.await_all(store, ready)
    except (RuntimeError, EngineError) as error:
        followers.close()
        if group is not None:
            group.leave()
        raise ModelError(f"the model could not be divided over {size} processes: {error}") from error
    return model
