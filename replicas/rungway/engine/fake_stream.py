"""State of one request and of one sequence inside the fake engine, and the profile that sets their pace."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rungway.engine.detokenize import Detokenizer
from rungway.engine.fake_script import LOGPROBS, FakeVocabulary, Script, Voice, prompt_tokens, text_of
from rungway.engine.protocol import Delta, EngineUsage, PromptToken, TokenLogprob, Work

_NS_PER_MS = 1_000_000
_DELAY_MS_MAX = 3_600_000.0
_RATE_WINDOW_NS = 500 * _NS_PER_MS
_VOCABULARY = FakeVocabulary()


@dataclass(frozen=True, kw_only=True)
class FakeProfile:
    """How the fake engine behaves; times in milliseconds. `vocab` can only be "words". `fail`: None, "start" (the engine
    does not start) or "always" (every request ends with an error). `prefix_cache`: prompts that begin alike share blocks
    and prefill time; `prefix_keys_max` of its keys are told to the controller; `kv_soft_quota` see rules.py. `step_tokens`: None = each sequence
    keeps its own pace, else they share steps of so many tokens (fake_steps.py)."""

    prefill_ms_per_1k: float = 20.0
    ttft_ms: float = 5.0
    tpot_ms: float = 5.0
    kv_blocks: int = 4096
    block_tokens: int = 16
    vocab: str = "words"
    fail: str | None = None
    prefix_cache: bool = False
    prefix_keys_max: int = 4096
    prefix_key_blocks: int = 1
    kv_soft_quota: float | None = None
    step_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.vocab != "words":
            raise ValueError(f'fake: vocab must be "words", not "{self.vocab}"')
        if self.fail not in (None, "start", "always"):
            raise ValueError(f'fake: fail must be null, "start" or "always", not "{self.fail}"')
        if self.kv_blocks < 1 or self.block_tokens < 1:
            raise ValueError("fake: kv_blocks and block_tokens must be at least 1")


class Request:
    __slots__ = ("cached", "keys", "left", "output", "prompt", "scoring", "started", "streams", "tokens", "work")

    def __init__(self, work: Work, prompt: int) -> None:
        self.work = work
        self.prompt = prompt
        self.streams: list[Stream] = []
        self.left = work.sequences
        self.output = 0
        self.started = False  # some sequence was prefilled, so the prompt counts
        self.cached: int | None = None  # prompt tokens that the first admission found
        self.tokens: list[int] = []  # of the prompt, for the prefix cache; empty without one
        self.keys: list[bytes] = []
        self.scoring = work.sampling.prompt_logprobs is not None  # the prompt's log-probabilities are still to be told

    def scores(self) -> list[PromptToken] | None:
        """The prompt's log-probabilities, once."""
        if not self.scoring:
            return None
        self.scoring = False
        return prompt_tokens(self.work)

    def usage(self) -> EngineUsage:
        return EngineUsage(self.prompt if self.started else 0, self.cached or 0, self.output)


class Stream:
    """One sequence. `position` counts all its tokens, resumed ones too; it may move up to `end`, where `how` says
    what happens: length | stop | fail | hang. `slot` is the grid time at which it is next looked at, -1 = none."""

    __slots__ = (
        "attempt",
        "blocks",
        "born",
        "closed",
        "detokenizer",
        "due_ns",
        "end",
        "first",
        "found",
        "how",
        "index",
        "order",
        "plain",
        "position",
        "request",
        "request_id",
        "room",
        "slot",
        "start_ns",
        "tpot_ns",
        "voice",
    )

    def __init__(self, request: Request, index: int, order: tuple[int, int], script: Script) -> None:
        sampling = request.work.sampling
        self.request = request
        self.request_id = request.work.request_id
        self.attempt = request.work.attempt
        self.index = index
        self.order = order
        self.voice = Voice(request.work, index, script.emit)
        resumed = request.work.resume[index] if index < len(request.work.resume) else []
        self.position = self.born = len(resumed)
        self.blocks: list[int] = []
        self.room = self.found = 0
        self.slot = self.due_ns = -1
        self.first = True
        self.closed = False
        self.detokenizer: Detokenizer | None = None
        if sampling.stop or script.emit is not None:
            self.detokenizer = Detokenizer(_VOCABULARY, sampling.stop, keep=sampling.include_stop_str_in_output)
            for token in resumed:
                self.detokenizer.push(token)
        scored = sampling.prompt_logprobs is not None
        self.plain = self.detokenizer is None and sampling.logprobs is None and not scored
        self.end = self.position
        self.how = "length"
        self.start_ns = self.tpot_ns = 0

    def direct(self, script: Script, profile: FakeProfile, max_context: int) -> None:
        """Set the stream's pace, where it ends and how."""
        sampling = self.request.work.sampling
        end, how = min(sampling.max_tokens, max_context - self.request.prompt), "length"
        if script.tokens is not None and script.tokens < end:
            end, how = script.tokens, "stop"
        if script.eos_after is not None and script.eos_after <= end and not sampling.ignore_eos:
            end, how = script.eos_after, "stop"
        if script.emit is not None and len(script.emit) <= end:
            end, how = len(script.emit), "stop"
        if script.hang is not None and script.hang <= end:
            end, how = script.hang, "hang"
        if script.fail_after is not None and script.fail_after <= end:
            end, how = script.fail_after, "fail"
        if profile.fail == "always":
            end, how = self.position, "fail"
        self.end, self.how = max(end, self.position), how
        ttft_ms = profile.ttft_ms if script.ttft_ms is None else script.ttft_ms
        tpot_ms = profile.tpot_ms if script.tpot_ms is None else script.tpot_ms
        self.start_ns = int(min(ttft_ms, _DELAY_MS_MAX) * _NS_PER_MS)
        self.tpot_ns = max(1, int(min(tpot_ms, _DELAY_MS_MAX) * _NS_PER_MS))

    @property
    def speaks(self) -> bool:
        """Whether more tokens will come without anybody's doing: not of one that hangs."""
        return self.position < self.end or self.how != "hang"

    @property
    def context(self) -> int:
        return self.request.prompt + self.position

    def delta(
        self,
        text: str,
        ids: list[int],
        logprobs: list[TokenLogprob] | None,
        finish: str | None = None,
        error: str | None = None,
        score: float = 0.0,
        usage: EngineUsage | None = None,
    ) -> Delta:
        """News of this sequence, with the prompt's log-probabilities where it is the first to have computed the prompt."""
        scores = None if self.first else self.request.scores()
        return Delta(
            self.request_id, self.attempt, self.index, text, ids, logprobs, finish, error, score, usage, None, scores
        )

    def score(self) -> float:
        """Log-probability of all that this attempt said."""
        return math.fsum(LOGPROBS[token] for token in self.voice.ids(self.born, self.position))

    def speak(self, ids: list[int]) -> tuple[str, int]:
        """(text that may go out, how many of `ids` were used: fewer than all where a stop string was met)."""
        if self.detokenizer is None:
            return text_of(ids), len(ids)
        parts = []
        for used, token in enumerate(ids, 1):
            parts.append(self.detokenizer.push(token))
            if self.detokenizer.stopped:
                return "".join(parts), used
        return "".join(parts), len(ids)


class Rate:
    """Increase of a counter per second of work, over windows of half a second or, when steps are rarer, more."""

    __slots__ = ("_busy_ns", "_counted", "_since_ns", "per_s")

    def __init__(self) -> None:
        self.per_s = 0.0
        self._counted = 0
        self._busy_ns = 0
        self._since_ns: int | None = None

    def measure(self, counter: int, now_ns: int, *, busy: bool) -> None:
        """`busy`: work goes on after this step. Time without work is part of no window."""
        if self._since_ns is not None:
            self._busy_ns += now_ns - self._since_ns
        self._since_ns = now_ns if busy else None
        if self._busy_ns >= _RATE_WINDOW_NS:
            self.per_s = (counter - self._counted) * 1e9 / self._busy_ns
            self._counted, self._busy_ns = counter, 0


def refused(work: Work, error: str) -> list[Delta]:
    """Last deltas of a request that cannot run."""
    usage = EngineUsage(0, 0, 0)
    return [
        Delta(work.request_id, work.attempt, index, "", [], None, "error", error, 0.0, None if left else usage)
        for index, left in enumerate(reversed(range(work.sequences)))
    ]
