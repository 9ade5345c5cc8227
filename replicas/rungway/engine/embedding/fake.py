"""Vectors without a model: each a function of its text alone, at a scripted pace. For tests, drills and benchmarks.

The directives `[[ttft_ms=X]]` (this much longer takes the step), `[[hang]]` (no vector, until it is cancelled) and
`[[fail_after=K]]` (an error) of fake_script.py work in a text to embed.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from array import array
from collections.abc import Callable, Sequence

from rungway.engine.embedding.encoder import Failed, Piece
from rungway.engine.fake_script import ScriptError, read_script
from rungway.engine.fake_stream import FakeProfile

FAKE_DIMENSIONS = 384
_VOCABULARY = 1 << 16
_STEP_S_MAX = 60.0


class FakeEncoder:
    """An Encoder. A step takes the profile's `ttft_ms`, and `prefill_ms_per_1k` for each 1,000 tokens of its batch."""

    dimensions = FAKE_DIMENSIONS
    vocab_size = _VOCABULARY
    goes_by_text = True
    path = ""

    def __init__(self, profile: FakeProfile, *, max_context: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self.context = max_context
        self._profile = profile
        self._sleep = sleep

    def encode(self, batch: Sequence[Piece]) -> list[bytes | Failed | None]:
        results: list[bytes | Failed | None] = []
        longest_ms = self._profile.ttft_ms
        for piece in batch:
            try:
                script = read_script(piece.text)
            except ScriptError as unreadable:
                results.append(Failed(str(unreadable)))
                continue
            longest_ms = max(longest_ms, script.ttft_ms or 0.0)
            if script.fail_after is not None or self._profile.fail == "always":
                results.append(Failed("scripted failure"))
            else:
                results.append(None if script.hang is not None else unit_vector(piece.text))
        tokens = sum(piece.tokens for piece in batch)
        self._sleep(min(_STEP_S_MAX, (longest_ms + self._profile.prefill_ms_per_1k * tokens / 1000) / 1000))
        return results


def unit_vector(text: str) -> bytes:
    """FAKE_DIMENSIONS little-endian float32 of length 1, from a hash of the text."""
    stream = hashlib.shake_128(text.encode("utf-8", "surrogatepass")).digest(4 * FAKE_DIMENSIONS)
    words = [int.from_bytes(stream[at : at + 4], "little") for at in range(0, len(stream), 4)]
    values = [word / 2**31 - 1.0 for word in words]
    length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
    vector = array("f", [value / length for value in values])
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()
