"""Texts to token ids for an embedding model: light enough for the gateway, no torch, no transformers.

A text is data: what looks like a special token in it (`[SEP]`) is spelled out. The model's own beginning and end are put
around every text, and stay when it is truncated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rungway.engine.errors import ModelError, PromptError
from rungway.engine.tokenizer import backend_of, read_json


class SentenceTokenizer:
    """A model directory's tokenizer.json, whatever its kind. `dimensions` are those of the model's vectors; 0 = unknown.
    Safe to share between threads. Raises ModelError."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}") from error
        self._backend = backend_of(text, file)
        config = read_json(path / "config.json")
        self.vocab_size = int(config.get("vocab_size", self._backend.get_vocab_size()))
        self.dimensions = int(config.get("hidden_size", 0))
        self._backend.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text).ids)

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def cut(self, text: str, tokens_max: int) -> list[int]:
        """The ids of the beginning of `text`: at most `tokens_max` with what the model puts around it."""
        encoding = self._backend.encode(text)
        ids, special = list(encoding.ids), encoding.special_tokens_mask
        if len(ids) <= tokens_max:
            return ids
        closing = 0
        while closing < len(ids) and special[-1 - closing]:
            closing += 1
        kept = ids[: max(0, tokens_max - closing)]
        return kept + ids[len(ids) - closing :]

    @property
    def around(self) -> int:
        """How many tokens the model puts around a text."""
        return int(self._backend.num_special_tokens_to_add(False))

    def render_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        raise PromptError("this model makes embeddings; it has no chat")
