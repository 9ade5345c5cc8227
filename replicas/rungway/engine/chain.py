"""Names for beginnings of texts. Pure; needs nothing but the tokens, so gateways compute the same names as engines.

A text is cut into blocks of `block_tokens`. A block's key is chained from its parent's key and its own tokens; the first
parent is the share (tenant), so equal texts of two tenants have nothing in common. What leaves an engine are the first
64 bits of a key: enough to say where a beginning probably is, while the engine itself compares tokens.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array

DEPTH_MAX = 64  # keys of one text that are told to anybody


def root(share: str) -> bytes:
    """The key from which all texts of a share are chained."""
    return hashlib.blake2b(share.encode(), digest_size=16).digest()


def chained(parent: bytes, tokens: list[int]) -> bytes:
    """Key of a block from its parent's key, 16 bytes."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def short(key: bytes) -> int:
    """The 64 bits of a key that are told to others."""
    return int.from_bytes(key[:8], "little")


def chain_keys(
    share: str, tokens: list[int], block_tokens: int, limit: int = DEPTH_MAX, every: int = 1
) -> tuple[int, ...]:
    """Short keys of the leading whole blocks of a prompt that an engine could find: of every `every`-th one, at most
    `limit`. The last token is never found: it is always computed anew."""
    count = min(limit, (len(tokens) - 1) // block_tokens // every) * every
    keys: list[int] = []
    key = root(share) if count > 0 else b""
    for at in range(0, count * block_tokens, block_tokens):
        key = chained(key, tokens[at : at + block_tokens])
        if (at // block_tokens + 1) % every == 0:
            keys.append(short(key))
    return tuple(keys)


def word_ids(text: str, limit: int | None = None) -> list[int]:
    """Stable ids of a text's words, for engines that count words as tokens; at most `limit`."""
    words = text.split() if limit is None else text.split(None, limit)[:limit]
    return [zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words]
