"""Encryption and authentication between nodes: CURVE, with one key pair per cell.

Every member of a cell holds the same pair. A server proves that it has the secret half, and lets in only clients that
authenticate with the cell's public key (ZAP, RFC 27). On one node the channels bind loopback and need no keys.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85


@dataclass(frozen=True, repr=False)
class CurveKeys:
    """A cell's key pair in Z85 text (40 bytes each). It has no repr, so that the secret reaches no log."""

    public: bytes
    secret: bytes

    @staticmethod
    def generate() -> CurveKeys:
        public, secret = zmq.curve_keypair()
        return CurveKeys(public=public, secret=secret)

    def apply(self, socket: zmq.Socket[bytes], *, server: bool) -> None:
        """Set this pair on a socket that is not yet bound or connected."""
        socket.set(zmq.CURVE_PUBLICKEY, self.public)
        socket.set(zmq.CURVE_SECRETKEY, self.secret)
        if server:
            socket.set(zmq.CURVE_SERVER, 1)
        else:
            socket.set(zmq.CURVE_SERVERKEY, self.public)


class _OnlyThisKey:
    """Credentials provider for ZAP: the cell's own public key is the one that is let in."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return z85.encode(key) == self._public if len(key) == 32 else key == self._public


_lock = threading.Lock()
_guarded: dict[bytes, tuple[zmq.Context[zmq.Socket[bytes]], ThreadAuthenticator]] = {}


def context_of(curve: CurveKeys | None, *, server: bool) -> zmq.Context[zmq.Socket[bytes]]:
    """The process's zmq context; for a CURVE server, one whose ZAP handler admits that cell's key alone."""
    if curve is None or not server:
        return zmq.Context.instance()
    with _lock:
        if curve.public not in _guarded:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            guard = ThreadAuthenticator(context)
            guard.start()
            guard.configure_curve_callback(domain="*", credentials_provider=_OnlyThisKey(curve.public))
            _guarded[curve.public] = (context, guard)
        return _guarded[curve.public][0]
