"""Cheap numeric features of a prompt, for the estimate of how likely a tier answers it well.

Counts of characters and a few marks, nothing that needs a tokenizer or a model. Long prompts are judged by a bounded
head and tail (`HEAD_CHARS`, `TAIL_CHARS`), because the task stands at one of the two ends and the cost must not grow
with the text. Only `log_chars` looks at the whole length.
"""

from __future__ import annotations

import math

HEAD_CHARS = 1000
TAIL_CHARS = 500

NAMES: tuple[str, ...] = (
    "log_chars",
    "mean_word_chars",
    "digit_share",
    "math_share",
    "code_share",
    "upper_share",
    "non_ascii_share",
    "log_newlines",
    "log_questions",
    "comma_share",
    "quote_share",
    "choice_marks",
    "light_task",
    "heavy_task",
    "log_turns",
    "log_max_tokens",
)

_DIGITS = b"0123456789"
_MATH = b"+*/=^<>%$\\"
_CODE = b"{}[]();_`#|&"
_UPPER = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_QUOTES = b"\"'"
_HIGH = bytes(range(128, 256))

# Marks of work that a small model usually does well, and of work that usually needs a bigger one.
_LIGHT = ("summar", "translat", "rewrite", "rephrase", "extract", "classif", "list ", "correct the", "define ")
_HEAVY = ("prove", "derive", "step by step", "explain why", "calculate", "how many", "how much", "implement", "compute")
_CHOICES = ("\na. ", "\nb. ", "\na) ", "(a)", "\n- ", "\n* ", "\n1. ")


def window(text: str) -> str:
    """The part of `text` that is looked at: all of it when short, else its head and its tail."""
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return text[:HEAD_CHARS] + text[-TAIL_CHARS:]


def features(text: str, *, turns: int, max_tokens: int | None) -> tuple[float, ...]:
    """Features of one prompt in the order of `NAMES`.

    `text` is what the client wrote (message contents, no chat template); `turns` is the number of messages;
    `max_tokens` is the client's bound or None. Shares are fractions of the UTF-8 bytes of the window, 0 to 1.
    """
    seen = window(text)
    raw = seen.encode("utf-8", "replace")
    size = len(raw) or 1
    low = seen.lower()

    def share(marks: bytes) -> float:
        return (size - len(raw.translate(None, marks))) / size if raw else 0.0

    return (
        math.log1p(len(text)),
        len(seen) / (seen.count(" ") + seen.count("\n") + 1),
        share(_DIGITS),
        share(_MATH),
        share(_CODE),
        share(_UPPER),
        share(_HIGH),
        math.log1p(seen.count("\n")),
        math.log1p(seen.count("?")),
        seen.count(",") / size,
        share(_QUOTES),
        float(sum(mark in low for mark in _CHOICES)),
        float(sum(mark in low for mark in _LIGHT)),
        float(sum(mark in low for mark in _HEAVY)),
        math.log1p(max(turns, 0)),
        math.log1p(max(max_tokens or 0, 0)),
    )
