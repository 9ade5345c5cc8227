"""Which blocks hold which beginnings of which texts. Pure Python.

A whole block is known by a key chained from its parent's key and its own tokens; the first parent is the share (tenant)
itself, so that no one finds, or can time, what another has asked. Keys only find candidates: a hit also needs the same
parent block and the same tokens, so that colliding keys cost a miss and never a wrong answer.

Everyone who holds a known block holds its parent too. Hence a block that nobody holds has no child that anybody holds,
and children fall idle before their parents do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, KeysView
from typing import NamedTuple

from rungway.engine.chain import chained, root
from rungway.engine.published import Published

Hasher = Callable[[bytes, list[int]], bytes]


class Node(NamedTuple):
    """What a known block holds. `parent` None: the text begins here."""

    key: bytes
    parent: int | None
    share: str
    tokens: list[int]
    depth: int


class PrefixIndex:
    """Blocks by content. At most one block is known for each content."""

    def __init__(self, block_tokens: int, hasher: Hasher = chained, published: Published | None = None) -> None:
        self.published = published or Published(0)
        self._block_tokens = block_tokens
        self._hasher = hasher
        self._blocks: dict[bytes, int] = {}
        self._nodes: dict[int, Node] = {}
        self._children: Counter[int] = Counter()

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def blocks(self) -> KeysView[int]:
        """All that are known."""
        return self._nodes.keys()

    def match(self, share: str, tokens: list[int], keys: list[bytes], limit: int) -> list[int]:
        """Known blocks of the longest beginning of `tokens`, at most `limit`. `keys` is the caller's memory of the keys of
        this text, extended as needed."""
        found: list[int] = []
        while len(found) < limit:
            at = len(found)
            parent = found[-1] if found else None
            block = self._blocks.get(self.key(share, tokens, keys, at))
            if block is None or not self._is(self._nodes[block], parent, share, self._part(tokens, at)):
                break
            found.append(block)
        return found

    def count(self, share: str, tokens: list[int], keys: list[bytes], limit: int) -> int:
        """How many leading blocks are probably known: by their keys alone, so this is an estimate."""
        at = 0
        while at < limit and self.key(share, tokens, keys, at) in self._blocks:
            at += 1
        return at

    def learn(self, share: str, tokens: list[int], keys: list[bytes], table: list[int], at: int) -> bool:
        """Block `at` of a table is computed. False where it stays unknown: its content is known from another block, its
        key collides, or its own parent is unknown."""
        parent = table[at - 1] if at else None
        part = self._part(tokens, at)
        key = keys[at] if at < len(keys) else self.key(share, tokens, keys, at)
        if key in self._blocks or (parent is not None and parent not in self._nodes):
            return False
        self._blocks[key] = table[at]
        self._nodes[table[at]] = Node(key, parent, share, part, at)
        if self.published.limit:
            self.published.learned(keys, share, at)
        if parent is not None:
            self._children[parent] += 1
        return True

    def forget(self, block: int) -> None:
        """A known block without children gets another use."""
        assert not self._children[block], f"block {block} is forgotten before its children"
        node = self._nodes.pop(block)
        del self._blocks[node.key], self._children[block]
        self.published.forgotten(node.key)
        if node.parent is not None:
            self._children[node.parent] -= 1

    def check(self, refs: list[int]) -> Iterator[str]:
        """What is wrong with the index, given everyone's references."""
        if {node.key: block for block, node in self._nodes.items()} != self._blocks:
            yield "keys and blocks of the prefix index disagree"
        children = Counter(node.parent for node in self._nodes.values() if node.parent is not None)
        if children != +self._children:
            yield "the prefix index miscounts children"
        for block, node in self._nodes.items():
            if node.parent is not None and (node.parent not in self._nodes or refs[node.parent] < refs[block]):
                yield f"block {block} has {refs[block]} holders, its parent {node.parent} is unknown or has fewer"

    def key(self, share: str, tokens: list[int], keys: list[bytes], at: int) -> bytes:
        """Of block `at` of a text."""
        while len(keys) <= at:
            keys.append(self._hasher(keys[-1] if keys else root(share), self._part(tokens, len(keys))))
        return keys[at]

    def _part(self, tokens: list[int], at: int) -> list[int]:
        return tokens[at * self._block_tokens : (at + 1) * self._block_tokens]

    @staticmethod
    def _is(node: Node, parent: int | None, share: str, tokens: list[int]) -> bool:
        return node.parent == parent and node.share == share and node.tokens == tokens
