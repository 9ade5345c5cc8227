"""The engine without threads: requests in, steps out. engine.py runs it in a worker thread.

A step: schedule -> draft -> run the model -> sample -> keep what was verified, detokenize, end what is finished -> one
delta per sequence.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable
from functools import partial

from rungway.engine import verify
from rungway.engine.answer import NOT_FINITE, Answer, Said, refused
from rungway.engine.beams import Beams, Stops
from rungway.engine.detokenize import written
from rungway.engine.drafts import Speculation
from rungway.engine.grammar import Grammar
from rungway.engine.meter import Meter
from rungway.engine.protocol import REFUSED, Delta, EngineStats, EngineUsage, PrefixNews, PromptToken, Work
from rungway.engine.runner import Read, Runner, Step
from rungway.engine.sampler import Row, Sampled, sample
from rungway.engine.scheduler import Scheduler, Slice
from rungway.engine.scoring import score
from rungway.engine.sequence import Group, Sequence
from rungway.engine.step_costs import TokenCost
from rungway.engine.tokenizer import Vocabulary
from rungway.engine.validate import problem


class Core:
    """Single-threaded, except `check`, `stats` and `prefix_news`, which any thread may call."""

    def __init__(
        self,
        runner: Runner,
        vocabulary: Vocabulary,
        scheduler: Scheduler,
        *,
        context: int,
        waiting_max: int,
        clock_ns: Callable[[], int],
        speculation: Speculation | None = None,
        step_timeout_s: float = math.inf,
    ) -> None:
        """`context` = most tokens of a sequence; requests beyond `waiting_max` waiting sequences are refused.
        `speculation` None = one token a step for each sequence. `step_timeout_s`: a step that lasts longer has hung, which
        `check` says."""
        self._runner = runner
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._context = context
        self._waiting_max = waiting_max
        self._speculation = speculation
        self._answers: dict[Sequence, Answer] = {}
        self._seeds: dict[str, int] = {}
        self._meter = Meter(clock_ns)
        self._prompts = TokenCost()
        self._step_timeout_s = step_timeout_s
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.groups)

    def add(self, work: Work, grammar: Grammar | None = None) -> list[Delta]:
        """Takes a request, with its constraint compiled. Returns its end at once where it cannot run or was complete
        already."""
        why = self._refusal(work, grammar)
        if why is not None:
            return refused(work, why)
        group = Group(work)
        limit = min(len(work.prompt_ids) + work.sampling.max_tokens, self._context)
        if work.sampling.use_beam_search:
            group.beams = self._beams(work, limit)
        self._seeds[work.request_id] = secrets.randbits(62) if work.sampling.seed is None else work.sampling.seed
        with self._lock:
            self._scheduler.add(group, limit)
            return [delta for seq in group.members if (delta := self._resume(seq, grammar)) is not None]

    def cancel(self, request_id: str) -> list[Delta]:
        """Ends all sequences of a request; nothing for an unknown one."""
        with self._lock:
            group = self._scheduler.groups.get(request_id)
            members = [seq for seq in group.members if seq in self._answers] if group else []
            return [self._end(seq, "cancelled") for seq in members]

    def end_all(self, error: str | None = None) -> list[Delta]:
        """Ends every request: cancelled, or with `error` where the engine itself has failed."""
        finish = "cancelled" if error is None else "error"
        with self._lock:
            return [self._end(seq, finish, error) for seq in list(self._answers)]

    def step(self) -> list[Delta]:
        """One step of the model; nothing where there is no work. A device failure ends the requests of that step with an error, and only those."""
        with self._lock:
            step = self._scheduler.schedule()
        if not step:
            return []
        self._meter.start()
        try:
            step = self._draft(step)
            done = self._runner.run(step)
            rows = [row for seq in done.sequences for row in self._rows(seq)]
            sampled = sample(done.logits, rows, done.peaks) if rows else []
            scored = [(read.seq.group, self._score(read)) for read in done.reads]
        except RuntimeError as error:
            why = f"engine failure: {error}"
            self._meter.give_up()
            with self._lock:
                return [self._end(seq, "error", why) for seq in _concerned(step) if seq in self._answers]
        decoding = sum(item.size for item in step if _decodes(item))
        prefills = [(item.seq.computed, item.size) for item in step if not _decodes(item)]
        read = self._scheduler.running.read
        with self._lock:
            for group, tokens in scored:
                if group.scores is not None:
                    group.scores.take(tokens)
            deltas = self._advance(step, done, sampled)
        self._measure(decoding, read, prefills, deltas)
        return deltas

    def check(self) -> list[str]:
        with self._lock:
            problems = self._scheduler.check()
            live = sum(group.live for group in self._scheduler.groups.values())
            if live != len(self._answers):
                problems.append(f"{len(self._answers)} answers for {live} live sequences")
            if self._seeds.keys() != self._scheduler.groups.keys():
                problems.append("a seed is kept for a request that has ended, or missing")
        if (lasted_s := self._meter.running_s) > self._step_timeout_s:
            problems.append(f"a step has lasted {lasted_s:.0f} s")
        return problems

    def prefix_news(self, *, full: bool) -> PrefixNews:
        with self._lock:
            return self._scheduler.pool.known.published.news(full=full)

    def stats(self) -> EngineStats:
        with self._lock:
            pool = self._scheduler.pool
            meter = self._meter
            return EngineStats(
                running=len(self._scheduler.running),
                waiting=len(self._answers) - len(self._scheduler.running),
                tokens_in_flight=sum(len(seq.tokens) for seq in self._answers),
                kv_blocks_total=pool.total,
                kv_blocks_free=pool.free - pool.idle,
                kv_blocks_cached=pool.idle,
                step_ms=meter.step_ms,
                prefill_tokens_per_s=self._prompts.tokens_per_s,
                decode_tokens_per_s=meter.decode_tokens_per_s,
                drafted_tokens=self._speculation.drafted if self._speculation else 0,
                accepted_tokens=self._speculation.accepted if self._speculation else 0,
                draft_length=round(self._speculation.length, 2) if self._speculation else 0.0,
                path=getattr(self._runner, "path", ""),
            )

    def _refusal(self, work: Work, grammar: Grammar | None) -> str | None:
        if (work.sampling.constraint is None) != (grammar is None):
            return "the request's constraint was not compiled"
        if work.request_id in self._scheduler.groups:
            return f"request id {work.request_id} is in use"
        if len(self._answers) - len(self._scheduler.running) >= self._waiting_max:
            return "the engine's queue is full"
        why = problem(work, vocab_size=self._vocabulary.vocab_size, context=self._context)
        return None if why is None else REFUSED + why

    def _resume(self, seq: Sequence, grammar: Grammar | None) -> Delta | None:
        """Prepares the text state. May find the end already."""
        guide = None if grammar is None else grammar.guide()
        answer = self._answers[seq] = Answer(seq, self._vocabulary, guide)
        said = answer.resume()
        return None if said is None else self._close(seq, said)

    def _beams(self, work: Work, limit: int) -> Beams:
        ask, prompt = work.sampling, len(work.prompt_ids)
        ends = frozenset(ask.stop_token_ids) | (frozenset() if ask.ignore_eos else self._vocabulary.eos_ids)
        stops = Stops(ask.stop, partial(written, self._vocabulary, specials=not ask.skip_special_tokens))
        return Beams(ask, width=work.sequences, prompt=prompt, most=limit - prompt, ends=ends, stops=stops)

    def _draft(self, step: list[Slice]) -> list[Slice]:
        """The step with drafts, as far as there is room for them."""
        if self._speculation is None or any(seq.group.beams is not None for seq, _ in step):
            return step
        budget = self._scheduler.max_num_batched_tokens - sum(item.size for item in step)
        if not self._speculation.draft(step, self._row, budget):
            return step
        with self._lock:
            return self._scheduler.extend(step)

    def _row(self, seq: Sequence) -> Row:
        work = seq.group.work
        prompt = len(work.prompt_ids)
        seed = self._seeds[work.request_id]
        eos = self._vocabulary.eos_ids
        return Row(work.sampling, seq.tokens, prompt, seed, seq.index, len(seq.tokens) - prompt, eos=eos)

    def _score(self, read: Read) -> list[PromptToken]:
        ask = read.seq.group.work
        targets = ask.prompt_ids[read.first + 1 : read.first + 1 + len(read.logits)]
        tops, name = ask.sampling.prompt_logprobs or 0, self._vocabulary.token_name
        return score(read.logits, read.log_sums, targets, tops=tops, name=name)

    def _rows(self, seq: Sequence) -> list[Row]:
        beams = seq.group.beams
        if beams is not None:
            return [self._row(seq)._replace(sampling=beams.ask)]
        return verify.rows(self._row(seq), seq.drafts, self._answers[seq].guide)

    def _advance(self, step: list[Slice], done: Step, sampled: list[Sampled]) -> list[Delta]:
        """Keeps what was verified, first in the texts, then in the scheduler's books, and ends what is finished."""
        news: list[tuple[Sequence, Said]] = []
        kept: dict[Sequence, int] = {}
        pieces = verify.split(sampled, [1 + len(seq.drafts) for seq in done.sequences])
        searching: list[tuple[Sequence, Sampled]] = []
        for seq, piece in zip(done.sequences, pieces, strict=True):
            if seq.group.beams is not None:
                searching.append((seq, piece[0]))
                continue
            run = verify.run(seq.drafts, piece)
            if seq.drafts and self._speculation is not None:
                self._speculation.judge(seq, len(run) - 1)
            said = self._answers[seq].take(run)
            news.append((seq, said))
            if seq.drafts:
                # the last token said is known but not computed, as ever
                kept[seq] = max(1, len(said.token_ids))
        self._scheduler.commit([Slice(seq, kept.get(seq, size)) for seq, size in step] if kept else step)
        deltas = [self._tell(seq, said) for seq, said in news]
        for seq, got in searching:
            deltas += self._search(seq, got)
        return deltas

    def _search(self, seq: Sequence, got: Sampled) -> list[Delta]:
        """A beam is computed. It waits for the others of its request; with the last one, all go on or the search is over."""
        group, beams = seq.group, seq.group.beams
        if beams is None or seq not in self._answers:
            return []
        if got.token is None:
            return [self._end(member, "error", NOT_FINITE) for member in group.members]
        self._scheduler.hold(seq)
        if not beams.offer(seq.index, got.top):
            return []
        group.sampled += beams.width
        turn = beams.turn([member.tokens for member in group.members])
        self._scheduler.fork(group, turn.forks)
        results = zip(group.members, turn.ended, strict=False)
        return [self._close(member, self._answers[member].whole(result)) for member, result in results]

    def _tell(self, seq: Sequence, said: Said) -> Delta:
        return self._answers[seq].delta(said) if said.finish is None else self._close(seq, said)

    def _end(self, seq: Sequence, finish: str, error: str | None = None) -> Delta:
        """The last delta of a sequence that says nothing more."""
        return self._close(seq, Said([], "", None, finish, error))

    def _close(self, seq: Sequence, said: Said) -> Delta:
        """The last delta of a sequence; its blocks are free when this returns."""
        answer = self._answers.pop(seq)
        self._scheduler.end(seq)
        if self._speculation is not None:
            self._speculation.forget(seq)
        group, work = seq.group, seq.group.work
        usage = None
        if group.live == 0:
            del self._seeds[work.request_id]
            usage = EngineUsage(len(work.prompt_ids), group.cached or 0, group.sampled)
        return answer.delta(said, usage)

    def _measure(self, decoding: int, read: int, prefills: list[tuple[int, int]], deltas: list[Delta]) -> None:
        """Of a step's rows `decoding` were of decoding sequences, which had computed `read` tokens, the others of prefills (context, tokens). Steps with
        drafts have no others."""
        said = sum(len(delta.token_ids) for delta in deltas)
        decoded = min(said, decoding) if prefills else said
        spent_ns = self._meter.stop(decoded=decoded)
        self._prompts.learn(sum(size for _, size in prefills), spent_ns, decoding, read)
        self._scheduler.chunks.learn(decoding, read, prefills, spent_ns)
        if self._speculation is not None and deltas and not prefills:
            self._speculation.timed(decoding, len(deltas))


def _concerned(step: list[Slice]) -> list[Sequence]:
    """The sequences of a step, and the other beams of their searches."""
    alone = [[seq] if seq.group.beams is None else seq.group.members for seq, _ in step]
    return list(dict.fromkeys(seq for members in alone for seq in members))


def _decodes(item: Slice) -> bool:
    return item.size == 1 + len(item.seq.drafts)
