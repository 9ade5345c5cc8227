"""Which addresses a set of processes listens on, read from the kernel's own tables.

`rungway serve` looks after every start: anything of ours that listens beyond loopback, other than the address
the configuration names, stops the start. Linux only; elsewhere `listening` finds nothing.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_LISTEN = "0A"


class Listener(NamedTuple):
    """One listening TCP socket; `address` is an IP in text form."""

    pid: int
    address: str
    port: int

    @property
    def loopback(self) -> bool:
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def listening(pids: Iterable[int]) -> list[Listener]:
    """Every TCP listener of `pids`, in the order of the processes."""
    sockets = _listening_inodes()
    found = []
    for pid in pids:
        for inode in _socket_inodes(pid):
            if inode in sockets:
                address, port = sockets[inode]
                found.append(Listener(pid, address, port))
    return found


def beyond_loopback(pids: Iterable[int]) -> list[Listener]:
    """The listeners of `pids` that another machine could reach."""
    return [listener for listener in listening(pids) if not listener.loopback]


def addresses(host: str) -> set[str]:
    """The IP addresses that `host` (a name or an address) stands for; empty when it stands for none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(entry[4][0]) for entry in found}


def _socket_inodes(pid: int) -> set[str]:
    inodes: set[str] = set()
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return inodes
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _listening_inodes() -> dict[str, tuple[str, int]]:
    table = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN:
                address, _, port = fields[1].partition(":")
                table[fields[9]] = (_decode(address), int(port, 16))
    return table


def _decode(text: str) -> str:
    """The kernel prints an address as 32-bit words in host order (little-endian on every machine we run on)."""
    words = bytes.fromhex(text)
    packed = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
    return str(ipaddress.ip_address(packed))
