"""What one request to the fake engine says and how: its words, its directives, its invented log-probabilities.

Text is a function of (prompt, seed, sequence, position) alone, or, under a constraint, of that alone (fake_guided.py), so a run that was cut anywhere continues on another
engine exactly where the emitted tokens end. Token ids: `WORD_COUNT` words with a leading space, then the same words
without it (the first of a text), then the 256 bytes, which only the directive `emit` uses.

Directives stand anywhere in `Work.prompt_text`; of two of a name the last one holds, unknown names are plain text:

    [[tokens=N]]      stop after N tokens (finish "stop"; "length" where max_tokens is not above N)
    [[eos_after=N]]   an end-of-sequence token after N tokens: finish "stop", unless `ignore_eos`
    [[emit=TEXT]]     say TEXT (percent-encoded UTF-8), one byte a token
    [[calls=N]]       call the first of the request's tools N times, where it has tools
    [[ttft_ms=X]]     time to the first token, instead of the profile's (prefill time is added as usual)
    [[tpot_ms=X]]     time per further token
    [[fail_after=K]]  finish "error" once K tokens are out; a resumed attempt that starts at or past K fails at once
    [[hang]]          never emit anything; [[hang=K]]: nothing after K tokens. Only a cancel ends it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import unquote_to_bytes

from rungway.engine.chain import word_ids
from rungway.engine.protocol import REFUSED, Constraint, PromptToken, TokenLogprob, Work

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "ch", "st")
_SYLLABLES = tuple(onset + vowel for onset in _ONSETS for vowel in ("a", "o"))
WORDS: tuple[str, ...] = tuple(" " + first + second for first in _SYLLABLES for second in _SYLLABLES)
WORD_COUNT = len(WORDS)
_MASK = WORD_COUNT - 1
assert WORD_COUNT & _MASK == 0, "positions are folded with a mask"

TEXTS: tuple[bytes, ...] = (
    *(word.encode() for word in WORDS),
    *(word[1:].encode() for word in WORDS),
    *(bytes((byte,)) for byte in range(256)),
)
_FIRST_BYTE = 2 * WORD_COUNT

LOGPROBS: tuple[float, ...] = tuple(-(1 + token * 37 % 97) / 100 for token in range(len(TEXTS)))
"""Invented, but fixed and negative: the logprob of each token id wherever it is chosen."""

_WORD = re.compile(r"\s*\S+(?:\s+\Z)?")
_DIRECTIVE = re.compile(r"\[\[([a-z_]+)(?:=([^\]]*))?\]\]")


class ScriptError(ValueError):
    """A known directive has a value that cannot be read."""


@dataclass(frozen=True)
class Script:
    """One request's directives; times in milliseconds, counts in tokens, None = not given."""

    tokens: int | None = None
    eos_after: int | None = None
    emit: bytes | None = None
    calls: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    fail_after: int | None = None
    hang: int | None = None


def _count(text: str | None) -> int:
    return int(text or "")


def _hang(text: str | None) -> int:
    return int(text) if text else 0


def _ms(text: str | None) -> float:
    return float(text or "")


_READERS: dict[str, Callable[[str | None], int | float | bytes]] = {
    "tokens": _count,
    "eos_after": _count,
    "fail_after": _count,
    "hang": _hang,
    "calls": _count,
    "ttft_ms": _ms,
    "tpot_ms": _ms,
    "emit": lambda text: unquote_to_bytes(text or ""),
}
_PLAIN = Script()


def read_script(prompt_text: str) -> Script:
    """Directives of a prompt. Raises ScriptError where a known one has no readable, finite value >= 0."""
    if "[[" not in prompt_text:
        return _PLAIN
    found: dict[str, int | float | bytes] = {}
    for match in _DIRECTIVE.finditer(prompt_text):
        reader = _READERS.get(match[1])
        if reader is None:
            continue
        try:
            value = reader(match[2])
        except ValueError:
            raise ScriptError(f"cannot read the directive {match[0]}") from None
        if not isinstance(value, bytes) and not (math.isfinite(value) and value >= 0):
            raise ScriptError(f"the directive {match[0]} must be finite and not negative")
        found[match[1]] = value
    return Script(**found)  # type: ignore[arg-type]


def script_of(work: Work) -> tuple[Script, str | None]:
    """What a request directs, and why it cannot be followed."""
    try:
        script = read_script(work.prompt_text)
    except ScriptError as unreadable:
        return _PLAIN, REFUSED + str(unreadable)
    constraint = work.sampling.constraint
    return (script, None) if constraint is None else _constrained(script, constraint)


def _constrained(script: Script, constraint: Constraint) -> tuple[Script, str | None]:
    """The script with a text that fits. A text that the prompt directs has to fit by itself."""
    # Imported here: the grammar library and NumPy are needed by constrained requests only.
    from rungway.engine import fake_guided
    from rungway.engine.constraint import DEAD_END, INVALID, ConstraintError

    try:
        if script.emit is not None:
            return script, None if fake_guided.check_fit(constraint, script.emit) else DEAD_END
        return replace(script, emit=fake_guided.text_under(constraint, script.calls)), None
    except ConstraintError as error:
        return script, f"{INVALID}{error}"


def prompt_length(work: Work) -> int:
    """Tokens of the prompt: its ids where there are some, else its whitespace-separated words, at least 1."""
    return len(work.prompt_ids) or max(1, len(work.prompt_text.split()))


def input_lengths(work: Work) -> list[int]:
    """Tokens of each text to embed, counted in the same way."""
    return [len(given.ids) or max(1, len(given.text.split())) for given in work.inputs]


class Voice:
    """Token ids and texts of one sequence by position; plain words, or the bytes of `emit`."""

    __slots__ = ("_start", "_stride", "emit")

    def __init__(self, work: Work, index: int, emit: bytes | None) -> None:
        self.emit = emit
        hasher = hashlib.blake2b(digest_size=8)
        hasher.update(work.prompt_text.encode("utf-8", "surrogatepass"))
        hasher.update(repr((work.prompt_ids, work.sampling.seed or 0, index)).encode())
        digest = int.from_bytes(hasher.digest(), "little")
        self._start = digest & _MASK
        self._stride = (digest >> 16) & _MASK | 1  # odd, so that all words come up before one repeats

    def id(self, position: int) -> int:
        """Token id at a position > 0 of a sequence that says words."""
        return (self._start + self._stride * position) & _MASK

    def ids(self, start: int, end: int) -> list[int]:
        """Token ids at positions start..end-1."""
        if self.emit is not None:
            return [_FIRST_BYTE + byte for byte in self.emit[start:end]]
        first, stride = self._start, self._stride
        ids = [(first + stride * position) & _MASK for position in range(start, end)]
        if start == 0 and ids:
            ids[0] += WORD_COUNT
        return ids


class FakeVocabulary:
    """Token ids to bytes, as the detokenizer wants them."""

    vocab_size = len(TEXTS)
    eos_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return TEXTS[token]

    def token_name(self, token: int) -> bytes:
        return TEXTS[token]


def text_of(ids: list[int]) -> str:
    """Text of word tokens."""
    return b"".join([TEXTS[token] for token in ids]).decode()


def token_logprob(token: int, alternatives: int) -> TokenLogprob:
    """The chosen token's logprob with `alternatives` best ones, the chosen one first."""
    top = []
    for rank in range(alternatives):
        data = TEXTS[(token + rank) % len(TEXTS)]
        top.append((data.decode("utf-8", "replace"), data, LOGPROBS[token] - rank))
    data = TEXTS[token]
    return TokenLogprob(data.decode("utf-8", "replace"), data, LOGPROBS[token], top)


def prompt_tokens(work: Work) -> list[PromptToken]:
    """Invented log-probabilities of the prompt's words, or of its ids: a function of each of them alone. The tokens make up
    the prompt's text."""
    tops = work.sampling.prompt_logprobs or 0
    ids = work.prompt_ids or word_ids(work.prompt_text) or [0]
    if work.prompt_ids:
        names = [f" {id_}" if at else str(id_) for at, id_ in enumerate(ids)]
    else:
        names = _WORD.findall(work.prompt_text) or [work.prompt_text]
    data = [name.encode("utf-8", "surrogatepass") for name in names]
    rest = [_prompt_token(id_, name, tops) for id_, name in zip(ids[1:], data[1:], strict=True)]
    return [PromptToken(ids[0], data[0], None, 0, []), *rest]


def _prompt_token(token: int, data: bytes, tops: int) -> PromptToken:
    rank, odd = 1 + token % 3, token % 97 / 100
    top = []
    for place in range(1, tops + 1):
        other = (token + place) & _MASK
        who = (token, data) if place == rank else (other, TEXTS[other])
        top.append((*who, -place - odd))
    return PromptToken(token, data, -rank - odd, rank, top)
