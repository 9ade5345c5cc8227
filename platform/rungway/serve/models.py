"""Fetches the models of a platform before it starts, in a process of its own.

Converting weights needs torch and gigabytes that the serving process would keep for its whole life, and a download must
end at once when a person presses Ctrl-C. Both come with a child process that reports over a pipe.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from rungway.engine.errors import ModelError
from rungway.engine.loader import fetch_model
from rungway.serve.environment import StartError

_LOOK_S = 0.2
_END_S = 5.0
_Progress = Callable[[str, int, int], None]


def fetch_all(sources: Sequence[str], models_dir: Path, progress: _Progress, stop_wanted: Callable[[], bool]) -> bool:
    """Make every source's model directory. `progress(step and source, done, total)`.

    Returns False when `stop_wanted` asked for the end meanwhile. Raises StartError, one line, for a model that cannot be
    had.
    """
    spawning = multiprocessing.get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    child = spawning.Process(target=_fetch_in_child, args=(tuple(sources), models_dir, sender), daemon=True)
    child.start()
    sender.close()  # so that the child's end of the pipe is the only one, and its death is seen here
    try:
        return _follow(receiver, progress, stop_wanted)
    finally:
        child.terminate()
        child.join(_END_S)
        if child.is_alive():
            child.kill()
            child.join(_END_S)
        receiver.close()


def _follow(receiver: Connection, progress: _Progress, stop_wanted: Callable[[], bool]) -> bool:
    while True:
        if stop_wanted():
            return False
        if not receiver.poll(_LOOK_S):
            continue
        try:
            step, done, total = receiver.recv()
        except EOFError:
            raise StartError("the process that fetches models died", code=1) from None
        if step == "done":
            return True
        if done < 0:
            raise StartError(step)
        progress(step, done, total)


def _fetch_in_child(sources: tuple[str, ...], models_dir: Path, sender: Connection) -> None:
    """Sends (step, done, total) as it goes; then ("done", 0, 0), or (what is wrong, -1, 0)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    for source in sources:
        try:
            fetch_model(source, models_dir, partial(_send, sender, source))
        except ModelError as missing:
            sender.send((f"model {source}: {missing}", -1, 0))
            return
    sender.send(("done", 0, 0))


def _send(sender: Connection, source: str, what: str, done: int, total: int) -> None:
    sender.send((f"{what} {source}", done, total))
