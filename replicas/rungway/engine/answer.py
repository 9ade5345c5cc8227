"""What one sequence says: tokens to text, and where it ends."""

from __future__ import annotations

from typing import NamedTuple

from rungway.engine.beams import Hypothesis
from rungway.engine.constraint import DEAD_END
from rungway.engine.detokenize import Detokenizer
from rungway.engine.guide import Guide
from rungway.engine.protocol import Delta, EngineUsage, TokenLogprob, Work
from rungway.engine.sampler import Sampled
from rungway.engine.sequence import Sequence
from rungway.engine.tokenizer import Vocabulary
from rungway.engine.validate import INPUTS_MAX, SEQUENCES_MAX

NOT_FINITE = "the model gave no finite distribution over the tokens that may come"


class Said(NamedTuple):
    """News of one step: `token_ids` were taken over and make `text`. `finish` None: it goes on."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None
    finish: str | None
    error: str | None = None


class Answer:
    """The text of one sequence so far. `tokens` of the sequence grow only here. `guide` holds what may come next, None =
    anything; it moves with the tokens."""

    __slots__ = ("_seq", "_vocabulary", "cum_logprob", "detokenizer", "guide")

    def __init__(self, seq: Sequence, vocabulary: Vocabulary, guide: Guide | None) -> None:
        self._seq = seq
        self._vocabulary = vocabulary
        self.guide = guide
        ask = seq.group.work.sampling
        self.detokenizer = Detokenizer(
            vocabulary, ask.stop, keep=ask.include_stop_str_in_output, specials=not ask.skip_special_tokens
        )
        self.cum_logprob = 0.0

    def resume(self) -> Said | None:
        """Feeds in and drops what earlier attempts emitted; tells the end where that was all."""
        resumed = self._seq.tokens[len(self._seq.group.work.prompt_ids) :]
        for position, token in enumerate(resumed):
            self._push(token, position)
            if self.guide is not None and not self.guide.accept(token):
                return Said([], "", None, "error", DEAD_END)
        finish = self._finish(resumed[-1]) if resumed else None
        return None if finish is None else Said([], "", None, finish)

    def take(self, run: list[Sampled]) -> Said:
        """Takes over the tokens of a run up to the one that ends the sequence; later ones were never said."""
        ask = self._seq.group.work.sampling
        said: list[Sampled] = []
        text = ""
        finish = error = None
        if ask.max_tokens == 0:  # only the prompt was wanted
            return Said([], "", None if ask.logprobs is None else [], "length")
        for got in run:
            if got.token is None:
                finish, error = "error", DEAD_END if got.stuck else NOT_FINITE
                break
            if self.guide is not None and not self.guide.accept(got.token):
                finish, error = "error", DEAD_END
                break
            position = len(self._seq.tokens) - len(self._seq.group.work.prompt_ids)
            self._seq.tokens.append(got.token)
            self._seq.group.sampled += 1
            self.cum_logprob += got.logprob
            text += self._push(got.token, position)
            said.append(got)
            if (finish := self._finish(got.token)) is not None:
                break
        tokens = [got.token for got in said if got.token is not None]
        logprobs = None if ask.logprobs is None else [self._logprob(got) for got in said]
        return Said(tokens, text, logprobs, finish, error)

    def whole(self, result: Hypothesis) -> Said:
        """All at once: the result of a search."""
        text = "".join([self._push(token, position) for position, token in enumerate(result.tokens)])
        self.cum_logprob = result.total
        wanted = self._seq.group.work.sampling.logprobs is not None
        logprobs = [self._logprob(got) for got in result.said] if wanted else None
        ended = self.detokenizer.stopped or self._ends(result.tokens[-1])
        return Said(result.tokens, text, logprobs, "stop" if ended else "length")

    def delta(self, said: Said, usage: EngineUsage | None = None) -> Delta:
        """`said` as a message; where it has a finish, with the text that was held back."""
        work, scores = self._seq.group.work, self._seq.group.scores
        prompt = None
        if scores is not None and self._seq.index == 0:
            prompt = scores.give(self._vocabulary.token_name(work.prompt_ids[0]))
        return Delta(
            request_id=work.request_id,
            attempt=work.attempt,
            index=self._seq.index,
            text=said.text if said.finish is None else said.text + self.detokenizer.flush(),
            token_ids=said.token_ids,
            logprobs=said.logprobs,
            finish=said.finish,
            error=said.error,
            cum_logprob=0.0 if said.finish is None else self.cum_logprob,
            usage=usage,
            prompt_logprobs=prompt,
        )

    def _push(self, token: int, position: int) -> str:
        """The text that the token at a position of the answer makes certain."""
        ask = self._seq.group.work.sampling
        if self._ends(token) and not ask.include_stop_str_in_output:
            return ""
        return self.detokenizer.push(token, early=position < ask.min_tokens)

    def _ends(self, token: int) -> bool:
        """It ends the sequence by itself."""
        ask = self._seq.group.work.sampling
        return (token in self._vocabulary.eos_ids and not ask.ignore_eos) or token in ask.stop_token_ids

    def _finish(self, token: int) -> str | None:
        if self.detokenizer.stopped or self._ends(token):
            return "stop"
        if self.guide is not None and self.guide.complete:
            return "stop"
        return "length" if len(self._seq.tokens) >= self._seq.limit else None

    def _logprob(self, got: Sampled) -> TokenLogprob:
        assert got.token is not None
        name = self._vocabulary.token_name
        top = [(name(token).decode("utf-8", "replace"), name(token), value) for token, value in got.top]
        return TokenLogprob(name(got.token).decode("utf-8", "replace"), name(got.token), got.logprob, top)


def refused(work: Work, why: str | None) -> list[Delta]:
    """The end of a request that never ran, cancelled where there is no `why`; nothing was computed, so nothing is billed."""
    most = SEQUENCES_MAX if work.kind == "generate" else INPUTS_MAX
    count = work.sequences if 1 <= work.sequences <= most else 1
    return [
        Delta(
            request_id=work.request_id,
            attempt=work.attempt,
            index=index,
            text="",
            token_ids=[],
            finish="cancelled" if why is None else "error",
            error=why,
            usage=EngineUsage(0, 0, 0) if index == count - 1 else None,
        )
        for index in range(count)
    ]
