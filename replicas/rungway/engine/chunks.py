"""How much of a step one prefill may take while others share it. Pure; durations are given.

A step lasts as long as everything in it, so a long prompt's part decides how long those that decode wait for their next
token. Where nothing is configured, the part is what makes a step at most `SLOWDOWN` times as long as one of the same
decodes alone would be now, with contexts as long as theirs are now (step_costs.py). A prompt that is read for hundreds of
steps does not hide what decodes cost by then: every `LOOK_AFTER` steps one has no prefills in it, and is measured; at once
where other sequences decode than before, and again as long as that is not what was expected.
"""

from __future__ import annotations

from rungway.engine.step_costs import DecodeCost, PrefillCost

SLOWDOWN = 2.25  # of a bar of 3: what is left is for noise
CHUNK_FIRST = 16  # tokens; until it is known what they cost
LOOK_AFTER = 24  # steps with prefills between two without
SURPRISE = 0.2  # so far off is not noise

_LOOKED, _USUAL = 0.5, 0.2  # weight of a faster step than expected: of a look, which is rare, and of others


class Chunks:
    """`configured` tokens, or measured: at least `least`, at most `step_tokens` / 2."""

    def __init__(self, configured: int | None, step_tokens: int, least: int = 1) -> None:
        self._configured = configured
        self._half = max(1, step_tokens // 2)
        self._least = min(least, self._half)
        self._decodes = DecodeCost()
        self._prefills = PrefillCost()
        self._mixed = 0  # steps since the last one of decodes alone
        self._seen_ns = 0.0  # what was expected of that one, once it was learnt
        self._surprised = False  # by it

    def looks(self, decoding: int, read: int) -> bool:
        """Whether a step with these decodes should have nothing else, to see what they cost."""
        if self._configured is not None or not decoding or not self._mixed:
            return False
        if self._surprised or not self._decodes.known or self._mixed >= LOOK_AFTER:
            return True
        return abs(self._decodes.of(decoding, read) - self._seen_ns) > SURPRISE * self._seen_ns

    def cap(self, decoding: int, read: int, context: int, sharing: int = 1) -> int:
        """Tokens of a prefill that has computed `context`, in a step with others. `decoding` of them decode, behind `read`
        tokens together; `sharing` of them are long prompts, which divide what there is."""
        if self._configured is not None:
            return self._configured
        if not decoding:
            return self._half
        if not (self._decodes.known and self._prefills.known):
            return min(self._half, CHUNK_FIRST)
        room_ns = (SLOWDOWN - 1.0) * self._decodes.of(decoding, read) / max(1, sharing)
        return max(self._least, int(min(self._half, self._prefills.fits(room_ns, context))))

    def learn(self, decoding: int, read: int, prefills: list[tuple[int, int]], spent_ns: int) -> None:
        """A step of `decoding` tokens of decoding sequences, which had computed `read` tokens together, and of prefills
        (context, tokens) took `spent_ns`."""
        if not prefills:
            found = self._decodes.learn(decoding, read, spent_ns, faster=_LOOKED if self._mixed else _USUAL)
            self._surprised = abs(found - 1.0) > SURPRISE
            self._seen_ns = self._decodes.of(decoding, read)
            self._mixed = 0
        elif not decoding:
            self._prefills.alone(sum(size for _, size in prefills), spent_ns)
        else:
            self._mixed += 1
            if self._decodes.known:
                self._prefills.learn(prefills, spent_ns, self._decodes.of(decoding, read))
