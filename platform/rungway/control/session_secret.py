"""The secret that dashboard sessions are signed with: random, kept in the state directory so that a restart keeps people
signed in, and handed to every gateway with the directory so that any of them can check a session."""

from __future__ import annotations

import os
from pathlib import Path

SECRET_BYTES = 32
FILE = "session.secret"


def load_secret(state_dir: Path) -> bytes:
    """Read the secret, or make a new one where there is none (or a torn one). Only the owner may read the file. Raises
    OSError when the state directory cannot be written."""
    path = state_dir / FILE
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        kept = b""
    if len(kept) == SECRET_BYTES:
        path.chmod(0o600)
        return kept
    secret = os.urandom(SECRET_BYTES)
    fresh = path.with_name(f"{FILE}.{os.getpid()}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    return secret
