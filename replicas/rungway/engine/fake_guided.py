"""What the fake engine says under a constraint: a short text that the grammar takes as a whole.

The text is found by walking the same grammar and guide as the native engine's, a byte at a time, always towards the end:
strings stay empty, optional members away, lists as short as they may be. It is a function of the constraint alone.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from rungway.engine.constraint import CALLS_MAX, ConstraintError, read_tools
from rungway.engine.grammar import Grammars
from rungway.engine.guides import GrammarGuide
from rungway.engine.protocol import Constraint

_END = 256
_BYTES_MAX = 2048


class _Bytes:
    """Tokens 0..255 are the bytes, 256 the end."""

    vocab_size = 257
    eos_ids = frozenset({_END})

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if token < _END else b""

    def token_name(self, token: int) -> bytes:
        return self.token_bytes(token) or b"<end>"


_GRAMMARS = Grammars(_Bytes())


def text_under(constraint: Constraint, calls: int) -> bytes | None:
    """A text that fits; with `calls` > 0 that many calls of the first tool. None: any text does (tools that may be called
    need not be). Raises ConstraintError, also where no text of 2,048 bytes was found."""
    if constraint.kind != "tools":
        return _short(constraint)
    tools = read_tools(constraint.text)
    if not (tools.must or calls):
        if tools.answer is None:
            check_fit(constraint, b"")
            return None
        return _short(Constraint("json_schema", msgspec.json.encode(tools.answer).decode()))
    one = msgspec.structs.replace(tools, tools=tools.tools[:1], must=True, most=1)
    text = b"\n".join([_short(Constraint("tools", msgspec.json.encode(one).decode()))] * min(max(1, calls), CALLS_MAX))
    if not check_fit(constraint, text):
        raise ConstraintError(f"it does not take {calls} calls")
    return text


def check_fit(constraint: Constraint, text: bytes) -> bool:
    """Whether the grammar takes `text` as a whole. Raises ConstraintError where the constraint itself is wrong."""
    guide = _GRAMMARS.compile(constraint).guide()
    return all(guide.accept(byte) for byte in text) and (guide.complete or guide.fits)


@lru_cache(maxsize=256)
def _short(constraint: Constraint) -> bytes:
    guide = _GRAMMARS.compile(constraint).guide()
    text = bytearray()
    while len(text) < _BYTES_MAX:
        byte = _next(guide, text)
        if byte is None:
            return bytes(text)
        guide.accept(byte)
        text.append(byte)
    raise ConstraintError("the fake engine finds no short text that fits")


def _next(guide: GrammarGuide, text: bytearray) -> int | None:
    """The byte that most likely leads to the end; None = this is the end."""
    if guide.complete or guide.fits:
        return None
    allowed = {int(token) for token in np.nonzero(np.unpackbits(guide.mask().view(np.uint8), bitorder="little"))[0]}
    if not allowed:
        raise ConstraintError("the grammar comes to a dead end")
    in_string = ord("z") in allowed  # no JSON but in strings has this letter
    for byte in b'"' if in_string else b'}]"':
        if byte in allowed:
            return byte
    # No bracket to close: open none where anything else may come, and take what was said least often, so that no way round
    # is gone for ever.
    printable = sorted(byte for byte in allowed if 0x20 < byte < 0x7F) or sorted(allowed)
    return min(printable, key=lambda byte: (byte in b"{[", text.count(byte)))
