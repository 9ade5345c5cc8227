"""How fast a pool works, learned from its engines' reports and from what leaves its queue."""

from __future__ import annotations

from rungway.clock import NS_PER_S
from rungway.contracts import CLASS_ORDER
from rungway.engine.protocol import EngineStats
from rungway.policies.drain import DrainRate

# Believed until a replica has measured itself. Optimistic: no deadline is refused on ignorance.
DEFAULT_PREFILL_TOKENS_PER_S = 20_000.0
DEFAULT_DECODE_MS_PER_TOKEN = 5.0
LEARNING_RATE = 0.05
# Waits scatter about what is expected; a deadline is promised only with this much to spare, or under overload, when
# everybody is admitted to the limit, half of the answers would come just too late.
WAIT_MARGIN = 1.25
# How fast a class leaves depends on what the higher ones want, which changes sooner than what the pool can do.
CLASS_MEMORY_S = 10.0
# How long work that is stopped for others will wait: twice what it has been on average, at first 5 s.
PAUSE_MARGIN = 2.0
DEFAULT_PAUSE_S = 2.5
PAUSE_LEARNING_RATE, PAUSE_LEARNING_RATE_LONGER = 0.1, 0.5
# Who expects long pauses pauses nobody, and would never learn that they have become short: what is known fades.
PAUSE_HALF_LIFE_S = 15.0


class Pace:
    """`prefill_rate` in tokens per second, `decode_ms` per output token of one sequence; `drain` of the whole queue,
    `drains` of each band, in tokens held by what was dispatched."""

    __slots__ = ("_pause_s", "_paused_ns", "decode_ms", "drain", "drains", "prefill_rate")

    def __init__(self) -> None:
        self.prefill_rate = DEFAULT_PREFILL_TOKENS_PER_S
        self.decode_ms = DEFAULT_DECODE_MS_PER_TOKEN
        self._pause_s = DEFAULT_PAUSE_S
        self._paused_ns: int | None = None  # when a pause was last learned from, or first asked for
        self.drain = DrainRate()
        self.drains = [DrainRate(memory_s=CLASS_MEMORY_S, fades=True) for _ in CLASS_ORDER]

    def reported(self, stats: EngineStats) -> None:
        """A replica says how fast it is now."""
        if stats.prefill_tokens_per_s > 0:
            self.prefill_rate = _learn(self.prefill_rate, stats.prefill_tokens_per_s, DEFAULT_PREFILL_TOKENS_PER_S)
        if stats.decode_tokens_per_s > 0 and stats.running:  # the rate of an idle engine is that of some batch long ago
            per_token = 1000.0 * stats.running / stats.decode_tokens_per_s
            self.decode_ms = _learn(self.decode_ms, per_token, DEFAULT_DECODE_MS_PER_TOKEN)

    def dispatched(self, tokens: int, band: int, now_ns: int, *, waiting: bool, waiting_in_band: bool) -> None:
        """A request of so many tokens left the queue; whether anybody waits behind it."""
        self.drain.observe(float(tokens), now_ns, waiting)
        self.drains[band].observe(float(tokens), now_ns, waiting_in_band)

    def paused(self, seconds: float, now_ns: int) -> None:
        """Work that was stopped goes on after so long."""
        known = self.pause_s(now_ns) / PAUSE_MARGIN
        rate = PAUSE_LEARNING_RATE_LONGER if seconds > known else PAUSE_LEARNING_RATE
        self._pause_s, self._paused_ns = known + rate * (seconds - known), now_ns

    def pause_s(self, now_ns: int) -> float:
        """What a pause has to be expected to take."""
        if self._paused_ns is None:
            self._paused_ns = now_ns  # ignorance fades as well, from the first question on
        faded: float = 0.5 ** ((now_ns - self._paused_ns) / (PAUSE_HALF_LIFE_S * NS_PER_S))
        return PAUSE_MARGIN * self._pause_s * faded

    def service_ms(self, prompt_tokens: int, output_tokens: int) -> float:
        """From dispatch to the last token."""
        return 1000.0 * prompt_tokens / self.prefill_rate + output_tokens * self.decode_ms

    def wait_s(self, ahead: float, ahead_in_all: float, band: int, now_ns: int) -> float:
        """Until `ahead` tokens of a band have left the queue; `ahead_in_all` = the part of the whole queue that has to
        leave first, asked only while the band has no rate of its own (what the others leave it is in that rate)."""
        if self.drains[band].rate(now_ns) is not None:
            return WAIT_MARGIN * self.drains[band].wait_s(ahead, now_ns)
        return WAIT_MARGIN * self.drain.wait_s(ahead_in_all, now_ns)


class BlockSums:
    """KV blocks of a pool's replicas, kept as sums: with hundreds of them each report would else look at all."""

    __slots__ = ("_free", "_total")

    def __init__(self) -> None:
        self._total = self._free = 0

    def moved(self, before: EngineStats | None, after: EngineStats | None) -> float:
        """A replica's report follows another (None = it was not there, or is gone); the share that is in use now."""
        if before is not None:
            self._total -= before.kv_blocks_total
            self._free -= before.kv_blocks_free + before.kv_blocks_cached
        if after is not None:
            self._total += after.kv_blocks_total
            self._free += after.kv_blocks_free + after.kv_blocks_cached
        return 1.0 - self._free / self._total if self._total else 0.0


def _learn(old: float, measured: float, default: float) -> float:
    """Moving average whose first sample replaces the default."""
    return measured if old == default else old + LEARNING_RATE * (measured - old)
