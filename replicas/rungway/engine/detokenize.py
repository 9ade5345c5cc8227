"""Token ids to text, piece by piece: never half a character, never part of a stop string.

Tokens are byte strings (see tokenizer.py), so the text is their concatenation decoded as UTF-8; bytes that are no UTF-8
become U+FFFD, and an unfinished character at the very end is left out, in streams and whole answers alike. Since the
text depends on the tokens alone, a sequence resumed elsewhere goes on exactly where it was.
"""

from __future__ import annotations

import codecs

from rungway.engine.tokenizer import Vocabulary


def written(vocabulary: Vocabulary, token: int, *, specials: bool) -> bytes:
    """Bytes that a token adds to the text; with `specials`, special tokens are spelled out."""
    data = vocabulary.token_bytes(token)
    return vocabulary.token_name(token) if specials and not data else data


class Detokenizer:
    """The text of one sequence. After `stopped` turns true nothing more comes out."""

    __slots__ = ("_decoder", "_held", "_keep", "_specials", "_stops", "_vocabulary", "stopped")

    def __init__(
        self, vocabulary: Vocabulary, stops: tuple[str, ...], *, keep: bool = False, specials: bool = False
    ) -> None:
        """`keep`: a stop string stays in the text. `specials`: special tokens are spelled out."""
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._keep = keep
        self._specials = specials
        self.stopped = False

    def push(self, token: int, *, early: bool = False) -> str:
        """Text that is certain after `token`. A stop string ends it: of several, the one complete first, and of those
        the longest; it is cut from the text. None is looked for in the text of `early` tokens."""
        if self.stopped:
            return ""
        text = self._decoder.decode(written(self._vocabulary, token, specials=self._specials))
        if early or not self._stops:
            return text
        self._held += text
        found = min(
            ((at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            self.stopped = True
            return self._emit(found[0] if self._keep else found[1])
        return self._emit(len(self._held) - self._possible())

    def flush(self) -> str:
        """The end: what was held back for a stop string that did not come."""
        return "" if self.stopped else self._emit(len(self._held))

    def _emit(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _possible(self) -> int:
        """Length of the longest end of the held text that could still grow into a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
