"""What rank 0 tells the others, over a socket pair to each: pickled, with the length before it. Both ends are one program of
one user; nothing else can reach the sockets."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rungway.engine.model import Batch

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Setup:
    """The first message. `port`: of rank 0's store."""

    path: Path
    dtype: str
    device: str
    rank: int
    size: int
    port: int
    threads: int
    timeout_s: float


@dataclass(frozen=True)
class CacheSize:
    """Make a cache of so many blocks; comes before the first batch."""

    blocks: int
    block_tokens: int


Message = Setup | CacheSize | Batch


def moved(batch: Batch, device: torch.device) -> Batch:
    """The same batch on `device`."""

    def to(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    spans = [
        replace(
            span,
            blocks=to(span.blocks),
            lengths=to(span.lengths),
            mask=None if span.mask is None else to(span.mask),
            starts=None if span.starts is None else to(span.starts),
        )
        for span in batch.spans
    ]
    return Batch(to(batch.ids), to(batch.positions), to(batch.slots), to(batch.outputs), spans)


def send(link: socket.socket, message: Message) -> None:
    """Raises OSError: the other end is gone, or takes nothing within the socket's time-out."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    link.sendall(_LENGTH.pack(len(data)) + data)


def receive(link: socket.socket) -> Message | None:
    """None where the other end has closed."""
    head = _exactly(link, _LENGTH.size)
    data = None if head is None else _exactly(link, _LENGTH.unpack(head)[0])
    if data is None:
        return None
    message: Message = pickle.loads(data)
    return message


def _exactly(link: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = link.recv(min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)
