"""The ranks of one model and what they say to each other within a step."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rungway.engine.errors import EngineError

HOST = "127.0.0.1"


def meeting_place(port: int, size: int, timeout_s: float, *, hold: bool) -> TCPStore:
    """The store through which ranks find each other; rank 0 holds it (port 0 = any). Raises RuntimeError."""
    wait = timedelta(seconds=timeout_s)
    return TCPStore(HOST, port, size, is_master=hold, wait_for_workers=False, timeout=wait)


class RankError(EngineError):
    """A rank is gone or does not answer. The model cannot compute any more; its engine ends."""


def here(rank: int) -> str:
    """A key in the store: the rank is about to join the group."""
    return f"here/{rank}"


def ready(rank: int) -> str:
    """A key in the store: the rank has loaded its weights."""
    return f"ready/{rank}"


class Group:
    """This process among `size` ranks. Every wait is bounded by `timeout_s`; then, or when a peer is gone, torch raises
    RuntimeError."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """Joins the group; returns when all ranks have. `store` is the meeting place, held by rank 0."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        self.rank = rank
        self.size = size
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Of all ranks' `x`, the same bits on every rank."""
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a matrix, all ranks as many: zeros follow the last."""
        count = -(-whole.shape[0] // self.size)
        mine = whole[self.rank * count : (self.rank + 1) * count]
        return torch.nn.functional.pad(mine, (0, 0, 0, count - mine.shape[0])).contiguous()

    def joined(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """What all ranks computed with their `rows`, side by side, [tokens, columns]."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=1)[:, :columns]

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
