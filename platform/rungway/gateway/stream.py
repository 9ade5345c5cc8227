"""From deltas to the client: as server-sent events while they come, or gathered into one body.

Tokens that came while the socket was busy leave together in one ASGI message. Nothing is sent before the first delta,
so that every error before it is a real HTTP status.
"""

from __future__ import annotations

import asyncio

from rungway.clock import NS_PER_S
from rungway.engine.protocol import Delta, PromptToken, TokenLogprob
from rungway.errors import RequestError
from rungway.gateway.answer import Choice, Stored, body, json_headers, sse_headers
from rungway.gateway.call import Call
from rungway.gateway.embeddings import embeddings_body, vector_text
from rungway.gateway.prompt_view import Showing
from rungway.gateway.read import Reading
from rungway.gateway.schema import EmbeddingBody
from rungway.gateway.sse import DONE, Frames, error_frame
from rungway.gateway.tool_frames import CallFrames

CHARS_INLINE_MAX = 65_536
"""Larger answers, which take milliseconds to write out, are written on a thread."""


class Gathered:
    """The parts of every sequence, joined at the end."""

    __slots__ = ("_count", "_finish", "_logprobs", "_score", "_texts", "prompt")

    def __init__(self) -> None:
        self._texts: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._finish: dict[int, str] = {}
        self._score: dict[int, float] = {}
        self._count: dict[int, int] = {}
        self.prompt: list[PromptToken] | None = None  # with log-probabilities, where they are to be listed

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.vector is not None:
                self._texts[delta.index] = [vector_text(delta.vector)]  # a second try's replaces the first one's
            else:
                self._texts.setdefault(delta.index, []).append(delta.text)
            self._count[delta.index] = self._count.get(delta.index, 0) + len(delta.token_ids)
            if delta.prompt_logprobs is not None:
                self.prompt = delta.prompt_logprobs
            if delta.logprobs:
                self._logprobs.setdefault(delta.index, []).extend(delta.logprobs)
            if delta.finish is not None:
                self._finish[delta.index] = delta.finish
                self._score[delta.index] = delta.cum_logprob

    def choices(self, n: int, with_logprobs: bool, ranked: bool = False) -> tuple[Choice, ...]:
        """The `n` sequences of the highest mean log-probability, best first; in order of their numbers where there are
        no more than `n`, or where they are `ranked` by them."""
        order = sorted(self._texts)
        if len(order) > n and not ranked:
            order.sort(key=lambda index: -self._score.get(index, 0.0) / max(1, self._count[index]))
        return tuple(
            Choice(
                "".join(self._texts[index]),
                self._finish.get(index, "stop"),
                self._logprobs.get(index, []) if with_logprobs else None,
            )
            for index in order[:n]
        )


class Answering:
    """One answer on its way out. `write` each batch, then `end`; `fail` instead when it cannot be finished."""

    __slots__ = ("_call", "_created", "_frames", "_gathered", "_reading", "_showing")

    def __init__(self, call: Call, reading: Reading, created: int | None = None, *, keeping: bool = False) -> None:
        self._call = call
        self._reading = reading
        self._created = call.received_wall_ns // NS_PER_S if created is None else created
        self._frames = _frames(call, reading, self._created) if reading.stream else None
        self._gathered = Gathered() if keeping or not reading.stream else None
        self._showing = Showing(reading.view) if reading.view.shows else None

    @property
    def echoed(self) -> int:
        """Characters of the prompt before each sequence."""
        return 0 if self._showing is None else len(self._showing.text)

    async def write(self, deltas: list[Delta]) -> None:
        """As an engine gives them: what the client sees of its prompt is put in here."""
        showing = self._showing
        heavy = showing is not None and showing.heavy(deltas)
        await self.tell(deltas if showing is None else showing.show(deltas), heavy=heavy)

    async def tell(self, deltas: list[Delta], *, heavy: bool = False) -> None:
        """As the client gets them; `heavy`: writing them out takes milliseconds."""
        if self._gathered is not None:
            self._gathered.add(deltas)
        if self._frames is None:
            return
        frame = self._frames.frame
        if heavy:
            text = await asyncio.to_thread(lambda: "".join([frame(delta) for delta in deltas]))
        else:
            text = frame(deltas[0]) if len(deltas) == 1 else "".join([frame(delta) for delta in deltas])
        if text:
            await self._send(text, True)

    async def end(self, stored: Stored | None, tokens: tuple[int, int, int]) -> None:
        """`stored` is the whole answer where it was gathered; `tokens` = prompt, cached, output."""
        if self._frames is None:
            assert stored is not None, "a unary answer is always gathered"
            whole = await _whole(self._call, self._reading, stored)
            await self._call.respond(200, json_headers(self._call.facts, len(whole)), whole)
            return
        await self._send((self._frames.usage(*tokens) if self._reading.include_usage else "") + DONE, False)

    def stored(self, tokens: tuple[int, int, int]) -> Stored | None:
        """The whole answer as it may be kept, None when nothing was gathered."""
        if self._gathered is None:
            return None
        ask = self._reading.sampling
        choices = self._gathered.choices(self._reading.answers, ask.logprobs is not None, ask.use_beam_search)
        prompt = self._gathered.prompt
        return Stored(self._call.id, self._created, self._call.facts, choices, *tokens, prompt)

    async def fail(self, error: RequestError) -> None:
        """A real HTTP error as long as nothing was sent, else the last event of the stream."""
        if not self._call.started:
            await self._call.refuse(error)
        else:
            await self._send(error_frame(error), False)

    async def _send(self, text: str, more: bool) -> None:
        call = self._call
        if not call.started:
            call.started = True
            await call.send({"type": "http.response.start", "status": 200, "headers": sse_headers(call.facts)})
        await call.send({"type": "http.response.body", "body": text.encode("ascii"), "more_body": more})


async def _whole(call: Call, reading: Reading, stored: Stored) -> bytes:
    given = reading.body

    def written() -> bytes:
        if isinstance(given, EmbeddingBody):
            return embeddings_body(call.facts, stored, given.encoding_format)
        return body(call.facts, stored, reading.chat, reading.demand.calling, reading.view.listed)

    return written() if stored.size <= CHARS_INLINE_MAX else await asyncio.to_thread(written)


def _frames(call: Call, reading: Reading, created: int) -> Frames:
    listed = reading.view.listed
    if reading.demand.calling:
        return CallFrames(call.facts, created, listed)
    return Frames(call.facts, created, reading.chat, listed)


async def replay(answering: Answering, stored: Stored) -> None:
    """A stored answer, or a text from the configuration, in whatever form the client asked for now."""
    deltas = [
        Delta(
            stored.request_id,
            1,
            index,
            choice.text,
            [],
            choice.logprobs,
            choice.finish,
            prompt_logprobs=None if index else stored.prompt,
        )
        for index, choice in enumerate(stored.choices)
    ]
    await answering.tell(deltas)
    await answering.end(stored, (stored.prompt_tokens, stored.cached_tokens, stored.output_tokens))
