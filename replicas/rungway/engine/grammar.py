"""Grammars for one vocabulary: compiled once, cached, copied for every sequence."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from rungway.engine.constraint import LIMITS, TEXT_BYTES_MAX, ConstraintError, check, clean, grammar_text, unforced
from rungway.engine.guides import GrammarGuide, forces_too_much
from rungway.engine.protocol import Constraint
from rungway.engine.tokenizer import Vocabulary

CACHED_MAX = 128


@runtime_checkable
class Speller(Protocol):
    """A vocabulary that knows how its model spells a text. Forced text (`{"name": "`) is then written as the model would
    write it, not byte by byte."""

    def spell(self, text: str) -> list[int]: ...


class Grammar:
    """A compiled constraint; `guide` makes the state of one sequence at its beginning. Used from one thread at a time.
    `unforced` compiles it once more, without looking ahead (guides.py): all later guides are of that kind."""

    __slots__ = ("_matcher", "_plain", "_unforced", "_words")

    def __init__(self, matcher: LLMatcher, vocab_size: int, unforced: Callable[[], LLMatcher]) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._unforced = unforced
        self._plain: LLMatcher | None = None
        if forces_too_much(matcher):
            self._begin_plainly()

    def guide(self) -> GrammarGuide:
        if self._plain is not None:
            return GrammarGuide(self._plain.deep_copy(), self._words)
        return GrammarGuide(self._matcher.deep_copy(), self._words, self._begin_plainly)

    def _begin_plainly(self) -> LLMatcher:
        if self._plain is None:
            self._plain = self._unforced()
        return self._plain.deep_copy()


class Grammars:
    """Safe to use from several threads. The vocabulary is taken in at `warm` or the first use, half a second for 150,000 tokens."""

    def __init__(
        self, vocabulary: Vocabulary, *, cached_max: int = CACHED_MAX, text_bytes_max: int = TEXT_BYTES_MAX
    ) -> None:
        self._vocabulary = vocabulary
        self._cached_max = cached_max
        self._text_bytes_max = text_bytes_max
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Takes the vocabulary in now, where it can serve at all."""
        if self._vocabulary.eos_ids:
            self._tokens()

    def cached(self, constraint: Constraint) -> Grammar | None:
        with self._lock:
            found = self._cache.get(constraint)
            if found is not None:
                self._cache.move_to_end(constraint)
            return found

    def compile(self, constraint: Constraint) -> Grammar:
        """Raises ConstraintError."""
        found = self.cached(constraint)
        if found is not None:
            return found
        check(constraint, self._text_bytes_max)
        text = grammar_text(constraint, self._text_bytes_max)
        matcher = self._matcher(text)
        matcher.compute_bitmask()  # what a first mask costs (up to a second for a hostile expression) is spent here
        if matcher.is_error():
            raise ConstraintError(clean(matcher.get_error()))
        grammar = Grammar(matcher, self._vocabulary.vocab_size, lambda: self._matcher(unforced(text)))
        with self._lock:
            self._cache[constraint] = grammar
            while len(self._cache) > self._cached_max:
                self._cache.popitem(last=False)
        return grammar

    def _matcher(self, text: str) -> LLMatcher:
        return LLMatcher(self._tokens(), text, log_level=0, limits=LIMITS)

    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                size, ends = self._vocabulary.vocab_size, sorted(self._vocabulary.eos_ids)
                if not ends:
                    raise ConstraintError("this model has no end token, so no answer of it can be constrained")
                self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(self._vocabulary)), n_vocab=size, eos_token=ends)
            return self._tokenizer


class _Tokens:
    """The vocabulary as llguidance wants it. A token without text is special (its name behind a byte that no UTF-8 holds)
    or unused (empty), and neither can come from a grammar of text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = range(vocabulary.vocab_size)
        texts = [vocabulary.token_bytes(token) for token in ids]
        names = [b"" if text else vocabulary.token_name(token) for token, text in zip(ids, texts, strict=True)]
        self.tokens = [text or (b"\xff" + name if name else b"") for text, name in zip(texts, names, strict=True)]
        self.special_token_ids = [token for token in ids if names[token]]
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = None
        self._speller = vocabulary if isinstance(vocabulary, Speller) else None
        self._bytes = {text[0]: token for token, text in reversed(list(enumerate(texts))) if len(text) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        if self._speller is not None:
            return self._speller.spell(data.decode("utf-8", "replace"))
        return [self._bytes[byte] for byte in data if byte in self._bytes]
