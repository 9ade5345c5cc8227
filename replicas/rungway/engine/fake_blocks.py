"""The fake engine's KV blocks: the native engine's pool and prefix cache, with words as tokens. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rungway.engine.blocks import BlockPool
from rungway.engine.chain import word_ids
from rungway.engine.fake_stream import FakeProfile, Request, Stream
from rungway.engine.protocol import PrefixNews
from rungway.engine.published import Published


class FakeBlocks:
    """Blocks of streams. A stream of c tokens holds ceil(c / block_tokens); with a prefix cache those of equal prompt
    beginnings of one share are the same blocks. Only prompts are kept in the cache, not what was said to them."""

    def __init__(self, profile: FakeProfile) -> None:
        self._size = profile.block_tokens
        self._cache = profile.prefix_cache
        self._pool = BlockPool(
            profile.kv_blocks,
            profile.block_tokens,
            published=Published(profile.prefix_keys_max if self._cache else 0, profile.prefix_key_blocks),
            soft_quota=profile.kv_soft_quota,
        )

    @property
    def free(self) -> int:
        """Blocks that no stream holds, cached ones included."""
        return self._pool.free

    @property
    def cached(self) -> int:
        return self._pool.idle

    def admit(self, stream: Stream) -> bool:
        """Blocks for a stream's context and one token more, found ones first; False and nothing where they are not free."""
        request = stream.request
        found: list[int] = []
        if self._cache:
            if not request.tokens:
                request.tokens = request.work.prompt_ids or word_ids(request.work.prompt_text)
            whole = (len(request.tokens) - 1) // self._size
            if not request.scoring:  # what is found has no logits
                found = self._pool.known.match(request.work.share, request.tokens, request.keys, whole)
            self._pool.share(found)
        need = -(-(stream.context + 1) // self._size)
        taken = self._pool.take(need - len(found), request.work.share, request.work.weight)
        if taken is None:
            self._pool.release(found)
            return False
        stream.blocks = found + taken
        stream.room = need * self._size - stream.context
        stream.found = len(found) * self._size
        if request.cached is None:
            request.cached = stream.found
        return True

    def prefilled(self, stream: Stream) -> None:
        """The stream's prompt is computed: others may find it."""
        tokens = stream.request.tokens
        for at in range(stream.found // self._size, len(tokens) // self._size):
            self._pool.known.learn(stream.request.work.share, tokens, stream.request.keys, stream.blocks, at)

    def lacking(self, stream: Stream, count: int) -> int:
        """Blocks that `count` more tokens need."""
        return -(-(stream.context + count) // self._size) - len(stream.blocks)

    def grow(self, stream: Stream, blocks: int) -> None:
        """So many more blocks, which are free."""
        work = stream.request.work
        taken = self._pool.take(blocks, work.share, work.weight)
        assert taken is not None, "growth without room"
        stream.blocks += taken
        stream.room += blocks * self._size

    def release(self, stream: Stream) -> None:
        self._pool.release(stream.blocks)
        stream.blocks = []
        stream.room = 0

    def prefix_news(self, *, full: bool) -> PrefixNews:
        return self._pool.known.published.news(full=full)

    def recount(self, running: set[Stream], requests: Iterable[Request]) -> list[str]:
        """Counts every block from the streams up; what does not add up, in words."""
        wrong = self._pool.check(stream.blocks for stream in running)
        for stream in running:
            room = len(stream.blocks) * self._size - stream.context
            if stream.closed or room != stream.room or room < 0:
                wrong.append(f"{stream.request_id}/{stream.index}: blocks do not fit its context")
        for request in requests:
            for stream in request.streams:
                if stream not in running and stream.blocks:
                    wrong.append(f"{stream.request_id}/{stream.index}: waits and holds blocks")
        return wrong
