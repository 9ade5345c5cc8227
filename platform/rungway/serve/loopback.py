"""Keeps the gRPC server of every Serve replica on loopback.

Ray Serve binds it to every interface, whatever the node's address, and it takes pickled calls. Whoever asks, gRPC's
asyncio server has one method that names the address, and the wildcard is replaced there. The start fails closed all
the same: `rungway serve` looks at the listening sockets afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpc.aio import _server  # type: ignore[import-untyped]

_WILDCARDS = ("[::]:", "0.0.0.0:")
_LOOPBACK = "127.0.0.1:"


def narrowed(address: str) -> str:
    """`address` with a wildcard host replaced by loopback."""
    for wildcard in _WILDCARDS:
        if address.startswith(wildcard):
            return _LOOPBACK + address.removeprefix(wildcard)
    return address


def keep_grpc_on_loopback() -> None:
    """From now on every asyncio gRPC server of this process that asks for all interfaces gets 127.0.0.1."""
    kind: Any = _server.Server
    if getattr(kind.add_insecure_port, "narrows", False):
        return
    original: Callable[[Any, str], int] = kind.add_insecure_port

    def add_insecure_port(self: Any, address: str) -> int:
        return original(self, narrowed(address))

    add_insecure_port.narrows = True  # type: ignore[attr-defined]
    kind.add_insecure_port = add_insecure_port
