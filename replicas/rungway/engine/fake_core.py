"""The fake engine without its clock: requests, KV blocks and due times; every call is given `now_ns`.

Streams are kept in slots of a coarse time grid (a dict of lists and a heap of the distinct slots), so a token costs no
heap operation and everything due in one slot leaves together, as from one step of a real engine. A late step emits all
that is due by then. Blocks: a stream of c tokens of context holds ceil(c / block_tokens). When they run out, the newest
stream of the least urgent band gives its blocks back and waits to be prefilled again; the oldest stream of the most
urgent band therefore always moves, and since no single stream may exceed the cache, nothing deadlocks.
"""

from __future__ import annotations

import heapq

from rungway.engine.fake_blocks import FakeBlocks
from rungway.engine.fake_script import WORDS, prompt_length, script_of, token_logprob
from rungway.engine.fake_stream import FakeProfile, Rate, Request, Stream, refused
from rungway.engine.protocol import REFUSED, Delta, EngineStats, TokenLogprob, Work
from rungway.engine.validate import NO_EMBEDDINGS

_NS_PER_MS = 1_000_000
_SLOT_NS_MIN, _SLOT_NS_MAX = _NS_PER_MS, 5 * _NS_PER_MS


class FakeCore:
    """State of one fake engine. `step` gives what is due; `wake_ns` says when the next step is worth making."""

    def __init__(self, profile: FakeProfile, *, max_num_seqs: int, max_context: int) -> None:
        self.profile = profile
        self.max_num_seqs = max_num_seqs
        self.max_context = max_context
        self.blocks = FakeBlocks(profile)
        self._requests: dict[str, Request] = {}
        self._waiting: list[tuple[tuple[int, int], Stream]] = []
        self._running: set[Stream] = set()
        self._slots: dict[int, list[Stream]] = {}
        self._slot_heap: list[int] = []
        self._slot_ns = min(max(int(profile.tpot_ms * _NS_PER_MS) // 2, _SLOT_NS_MIN), _SLOT_NS_MAX)
        self._out: list[Delta] = []
        self._dirty = False
        self._arrivals = 0
        self._tokens_in_flight = 0
        self._emitted = 0
        self._rate = Rate()

    def submit(self, work: Work) -> None:
        """Take a request; it is admitted, or its error is out, at the next step."""
        self._dirty = True
        prompt = prompt_length(work)
        script, error = script_of(work)
        if error is None and (unfit := self._unfit(work, prompt)) is not None:
            error = REFUSED + unfit
        if error is not None:
            self._out += refused(work, error)
            return
        request = self._requests[work.request_id] = Request(work, prompt)
        for index in range(work.sequences):
            self._arrivals += 1
            stream = Stream(request, index, (work.priority, self._arrivals), script)
            stream.direct(script, self.profile, self.max_context)
            request.streams.append(stream)
            heapq.heappush(self._waiting, (stream.order, stream))

    def _unfit(self, work: Work, prompt: int) -> str | None:
        """Why this request can never run, or None."""
        longest = prompt + max((len(tokens) for tokens in work.resume), default=0)
        if work.kind != "generate":
            return NO_EMBEDDINGS
        if work.request_id in self._requests:
            return "a request of this id is already here"
        if longest >= self.max_context:
            return f"{longest} tokens leave no room in a context of {self.max_context}"
        if min(prompt + work.sampling.max_tokens, self.max_context) > self.kv_tokens:
            return f"prompt and max_tokens exceed the KV cache of {self.kv_tokens} tokens"
        return None

    @property
    def kv_tokens(self) -> int:
        return self.profile.kv_blocks * self.profile.block_tokens

    def cancel(self, request_id: str) -> None:
        """Free the request's blocks now; its last deltas come with the next step. Unknown ids do nothing."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._dirty = True
        for stream in request.streams:
            if not stream.closed:
                self._out.append(self._end(stream, "", [], None, "cancelled", None))

    def step(self, now_ns: int) -> list[Delta]:
        """All that is due at `now_ns`, then admission of whoever fits."""
        out, self._out = self._out, []
        self._dirty = False
        while self._slot_heap and self._slot_heap[0] <= now_ns:
            slot = heapq.heappop(self._slot_heap)
            self._tick(self._slots.pop(slot), slot, now_ns, out)
        self._admit(now_ns)
        self._rate.measure(self._emitted, now_ns, busy=bool(self._running))
        return out

    def wake_ns(self) -> int | None:
        """When to step next: 0 = at once, None = not before something is submitted or cancelled."""
        if self._dirty:
            return 0
        return self._slot_heap[0] if self._slot_heap else None

    def _admit(self, now_ns: int) -> None:
        """First come first served within a band; whoever does not fit holds up those behind."""
        while self._waiting and len(self._running) < self.max_num_seqs:
            stream = self._waiting[0][1]
            if not stream.closed:
                if not self.blocks.admit(stream):
                    return
                stream.first = stream.request.started = True
                self._running.add(stream)
                self._tokens_in_flight += stream.context
                self._admitted(stream, now_ns)
            heapq.heappop(self._waiting)

    def _admitted(self, stream: Stream, now_ns: int) -> None:
        """The stream has its seat and blocks: its first token is due after its prompt."""
        prefill_ns = int(self.profile.prefill_ms_per_1k * (stream.context - stream.found) * 1000)
        self._schedule(stream, now_ns + stream.start_ns + prefill_ns)

    def _schedule(self, stream: Stream, due_ns: int) -> None:
        stream.due_ns = due_ns
        slot = stream.slot = -(-due_ns // self._slot_ns) * self._slot_ns
        streams = self._slots.get(slot)
        if streams is None:
            self._slots[slot] = [stream]
            heapq.heappush(self._slot_heap, slot)
        else:
            streams.append(stream)

    def _tick(self, streams: list[Stream], slot: int, now_ns: int, out: list[Delta]) -> None:
        """Advance all streams of one slot. Plain streams with one token due take the short way: this loop is what the
        fake engine spends its time in (600 streams at 5 ms a token pass it 120,000 times a second)."""
        slots, slot_ns = self._slots, self._slot_ns
        for stream in streams:
            if stream.slot != slot:
                continue  # it ended or gave its blocks back meanwhile
            position = stream.position
            due_ns = stream.due_ns + stream.tpot_ns
            target = -(-due_ns // slot_ns) * slot_ns
            others = slots.get(target)
            if (
                others is None
                or due_ns <= now_ns
                or stream.first
                or not stream.plain
                or not stream.room
                or position + 1 >= stream.end
            ):
                self._advance(stream, now_ns, out)
                continue
            stream.position = position + 1
            stream.room -= 1
            stream.due_ns = due_ns
            stream.slot = target
            others.append(stream)
            stream.request.output += 1
            self._tokens_in_flight += 1
            self._emitted += 1
            token = stream.voice.id(position)
            out.append(Delta(stream.request_id, stream.attempt, stream.index, WORDS[token], [token]))

    def _advance(self, stream: Stream, now_ns: int, out: list[Delta]) -> None:
        """Emit every token of this stream that is due, and settle what comes after."""
        count, due_ns, tpot_ns = 0, stream.due_ns, stream.tpot_ns
        if stream.first:
            # Later tokens lie on a grid common to all streams of this pace; the nearest point keeps the mean pace.
            count, due_ns = 1, (due_ns + tpot_ns + tpot_ns // 2) // tpot_ns * tpot_ns
        if due_ns <= now_ns:
            late = 1 + (now_ns - due_ns) // tpot_ns
            count, due_ns = count + late, due_ns + late * tpot_ns
        count = min(count, stream.end - stream.position)
        if stream.room < count and not self._grow(stream, count):
            return
        if stream.first:
            stream.first = False
            self.blocks.prefilled(stream)
        start = stream.position
        stream.position = start + count
        stream.room -= count
        stream.request.output += count
        self._tokens_in_flight += count
        self._emitted += count
        if stream.position == stream.end or not stream.plain:
            self._say(stream, start, due_ns, out)
            return
        self._schedule(stream, due_ns)
        ids = stream.voice.ids(start, stream.position)
        out.append(Delta(stream.request_id, stream.attempt, stream.index, stream.speak(ids)[0], ids))

    def _say(self, stream: Stream, start: int, due_ns: int, out: list[Delta]) -> None:
        """The long way for streams with held-back text, logprobs, or at their end."""
        wanted = stream.request.work.sampling.logprobs
        ids = stream.voice.ids(start, stream.position)
        text, used = stream.speak(ids)
        stopped = stream.detokenizer is not None and stream.detokenizer.stopped
        self._unsay(stream, len(ids) - used)
        ids = ids[:used]
        logprobs = None if wanted is None else [token_logprob(token, wanted) for token in ids]
        finish = "stop" if stopped else stream.how if stream.position == stream.end else None
        if finish in ("stop", "length") and stream.detokenizer is not None:
            text += stream.detokenizer.flush()
        if finish is None:
            self._schedule(stream, due_ns)
        if finish is None or finish == "hang":
            if ids:
                out.append(stream.delta(text, ids, logprobs))
            return
        error = None
        if finish == "fail":
            finish, error = "error", f"scripted failure after {stream.position} tokens"
        out.append(self._end(stream, text, ids, logprobs, finish, error))

    def _unsay(self, stream: Stream, count: int) -> None:
        """Take back tokens that a late step made past a stop string."""
        stream.position -= count
        stream.room += count
        stream.request.output -= count
        self._tokens_in_flight -= count
        self._emitted -= count

    def _grow(self, stream: Stream, count: int) -> bool:
        """Blocks for `count` more tokens; False where this stream itself had to give way."""
        need = self.blocks.lacking(stream, count)
        while self.blocks.free < need:
            victim = max(self._running, key=lambda other: other.order)
            self._release(victim)
            heapq.heappush(self._waiting, (victim.order, victim))
            if victim is stream:
                return False
        self.blocks.grow(stream, need)
        return True

    def _release(self, stream: Stream) -> None:
        """Give back the stream's seat, blocks and place on the grid; nothing to do for one that waits."""
        if stream not in self._running:
            return
        self._running.remove(stream)
        self.blocks.release(stream)
        self._tokens_in_flight -= stream.context
        if stream.slot in self._slots and stream in self._slots[stream.slot]:
            self._slots[stream.slot].remove(stream)
        stream.slot = -1

    def _end(
        self,
        stream: Stream,
        text: str,
        ids: list[int],
        logprobs: list[TokenLogprob] | None,
        finish: str,
        error: str | None,
    ) -> Delta:
        """Close the stream and make its last delta; the last stream of a request brings the usage."""
        self._release(stream)
        stream.closed = True
        request = stream.request
        work = request.work
        request.left -= 1
        usage = None
        if request.left == 0:
            usage = request.usage()
            del self._requests[work.request_id]
        return stream.delta(text, ids, logprobs, finish, error, stream.score(), usage)

    def open_requests(self) -> list[str]:
        return list(self._requests)

    def stats(self) -> EngineStats:
        open_streams = sum(request.left for request in self._requests.values())
        return EngineStats(
            running=len(self._running),
            waiting=open_streams - len(self._running),
            tokens_in_flight=self._tokens_in_flight,
            kv_blocks_total=self.profile.kv_blocks,
            kv_blocks_free=self.blocks.free - self.blocks.cached,
            kv_blocks_cached=self.blocks.cached,
            step_ms=self.profile.tpot_ms,
            prefill_tokens_per_s=1e6 / self.profile.prefill_ms_per_1k if self.profile.prefill_ms_per_1k else 0.0,
            decode_tokens_per_s=self._rate.per_s,
        )

    def check(self) -> list[str]:
        """Recount blocks, seats and tokens; what does not add up, in words."""
        wrong = self.blocks.recount(self._running, self._requests.values())
        if sum(stream.context for stream in self._running) != self._tokens_in_flight:
            wrong.append("tokens in flight do not add up")
        if len(self._running) > self.max_num_seqs:
            wrong.append(f"{len(self._running)} streams run, {self.max_num_seqs} may")
        return wrong
