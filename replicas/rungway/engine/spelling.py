"""Which bytes a token of the vocabulary stands for, in the two kinds of BPE tokenizers that published models use.

byte level      every byte has a printable stand-in, and tokens are strings of those (GPT-2; Llama 3, Qwen, DeepSeek).
byte fallback   tokens are text with `▁` for a space; what no token covers is spelled in tokens `<0x00>` to `<0xFF>`
                (SentencePiece; Gemma, Mistral, Mixtral).

In both each token is a fixed byte string, which makes streaming exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from rungway.engine.errors import ModelError


class Spelling(NamedTuple):
    """Bytes of a token of the vocabulary by its text there, and of one that was added as ordinary text."""

    token: Callable[[str], bytes]
    added: Callable[[str], bytes]


_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def spelling_of(backend: Backend, description: dict[str, Any]) -> Spelling:
    """`description`: tokenizer.json. Raises ModelError for a tokenizer of neither kind."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    tokens = [token for token in backend.get_vocab() if token not in added]
    if all(char in _BYTE_OF for token in tokens for char in token):
        return Spelling(_byte_level, str.encode)
    model = description.get("model") or {}
    if model.get("type") == "BPE" and model.get("byte_fallback") and _writes_spaces(description):
        have = set(backend.get_vocab())
        missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in have]
        if missing:
            raise ModelError(f"the tokenizer has no token for bytes such as {missing[0]}")
        return Spelling(_byte_fallback, _byte_fallback)
    raise ModelError("the tokenizer is neither byte-level BPE nor BPE with byte fallback; only those are supported")


def continued(description: dict[str, Any]) -> dict[str, Any] | None:
    """The same tokenizer for text that does not begin a prompt: without the space that some put before their input. None
    where it is no different."""
    normalizer, splitter = description.get("normalizer"), description.get("pre_tokenizer")
    parts = (normalizer or {}).get("normalizers", [normalizer])
    if any(part and part["type"] == "Prepend" for part in parts):
        left = [part for part in parts if part["type"] != "Prepend"]
        return {**description, "normalizer": {"type": "Sequence", "normalizers": left}}
    if splitter and splitter["type"] == "Metaspace" and splitter.get("prepend_scheme") == "first":
        return {**description, "pre_tokenizer": {**splitter, "prepend_scheme": "never"}}
    return None


def begins_each_piece(description: dict[str, Any]) -> bool:
    """Whether the space goes before every piece between control tokens, not only before the first."""
    normalizer = description.get("normalizer") or {}
    return any(part["type"] == "Prepend" for part in normalizer.get("normalizers", [normalizer]) if part)


def _writes_spaces(description: dict[str, Any]) -> bool:
    """Whether the decoder turns `▁` into spaces."""
    decoder = description.get("decoder") or {}
    return any(
        part["type"] == "Metaspace" or (part["type"] == "Replace" and part["pattern"] == {"String": _SPACE})
        for part in decoder.get("decoders", [decoder])
        if part
    )


def _byte_level(token: str) -> bytes:
    return bytes(_BYTE_OF[char] for char in token)


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(_SPACE, " ").encode()


def _byte_alphabet() -> Iterator[tuple[str, int]]:
    """The printable stand-ins that byte-level BPE uses for the 256 bytes (GPT-2's table)."""
    spare = 256
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            yield chr(byte), byte
        else:
            yield chr(spare), byte
            spare += 1


_BYTE_OF: dict[str, int] = dict(_byte_alphabet())
