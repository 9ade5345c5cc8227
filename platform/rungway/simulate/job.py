"""One attempt inside a played engine."""

from __future__ import annotations


class Job:
    """One attempt in an engine. `prompt` tokens, of which `resumed` were emitted elsewhere and count as context; `target`
    output tokens are left to emit. `blocks`: hashes of the prompt's leading 512-token blocks."""

    __slots__ = (
        "arrived",
        "attempt",
        "blocks",
        "cached",
        "finish_step",
        "finished",
        "first",
        "joined",
        "left",
        "priority",
        "prompt",
        "request_id",
        "resumed",
        "share",
        "state",
        "stop",
        "target",
        "weight",
    )

    def __init__(
        self,
        request_id: str,
        attempt: int,
        *,
        prompt: int,
        target: int,
        resumed: int = 0,
        priority: int = 0,
        share: str = "",
        weight: float = 1.0,
        blocks: tuple[int, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.prompt = prompt
        self.target = target
        self.resumed = resumed
        self.priority = priority
        self.share = share
        self.weight = weight
        self.blocks = blocks
        self.arrived = 0
        self.cached = 0
        self.left = 0
        self.joined = 0
        self.finish_step = 0
        self.first = False
        self.state = "waiting"  # waiting | prefill | decode | done
        self.stop = False  # a cancel takes effect at the end of the step
        self.finished = 0  # tokens emitted in the end
