"""The process of a rank other than 0: computes each batch that it is sent, and ends when rank 0 does.

Started as `python -m rungway.engine.parallel.follower FD`, with one end of a socket pair as file descriptor FD.
"""

from __future__ import annotations

import socket
import sys

import torch

from rungway.engine.architecture import read_architecture
from rungway.engine.checkpoint import open_weights
from rungway.engine.errors import ModelError
from rungway.engine.model import Batch, Decoder
from rungway.engine.parallel.group import Group, here, meeting_place, ready
from rungway.engine.parallel.shards import ShardedWeights, precision_of, share_of
from rungway.engine.parallel.wire import CacheSize, Setup, moved, receive
from rungway.engine.weights import read_config


@torch.inference_mode()
def follow(link: socket.socket) -> None:
    """Returns when rank 0 has closed its end. Raises ModelError, or RuntimeError when a collective fails."""
    setup = receive(link)
    assert isinstance(setup, Setup)
    torch.set_num_threads(setup.threads)
    device = torch.device(setup.device, setup.rank) if setup.device == "cuda" else torch.device(setup.device)
    store = meeting_place(setup.port, setup.size, setup.timeout_s, hold=False)
    store.set(here(setup.rank), "1")
    group = Group(store, setup.rank, setup.size, device, setup.timeout_s)
    config = read_config(setup.path)
    arch = share_of(read_architecture(config), setup.size)
    weights = ShardedWeights(open_weights(setup.path, config), setup.rank, setup.size)
    model = Decoder(arch, weights, precision_of(setup.dtype, device), device, group=group)
    store.set(ready(setup.rank), "1")
    cache: list[torch.Tensor] = []
    while (message := receive(link)) is not None:
        if isinstance(message, CacheSize):
            cache = model.cache(message.blocks, message.block_tokens)
        elif isinstance(message, Batch):
            model.forward(moved(message, device), cache)
    group.leave()


def main() -> int:
    link = socket.socket(fileno=int(sys.argv[1]))
    try:
        follow(link)
    except (ModelError, RuntimeError, OSError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)  # torch adds a stack of its own
        print(f"tensor-parallel rank ended: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
