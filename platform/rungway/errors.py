"""Operating errors, one tree. Programmer errors are asserts and ordinary Python exceptions.

RungwayError
+- ConfigError        a file is wrong; carries every mistake found, not the first
+- RequestError       the answer to a client is an error; carries the HTTP-facing Code
+- ChannelError       a peer is gone or its buffer is full
+- ModelError         weights or tokenizer cannot be had or do not match their digest
+- LedgerError        the database refuses to open or the audit chain does not verify
"""

from __future__ import annotations

from dataclasses import dataclass

from rungway.outcomes import CODES, Code


class RungwayError(Exception):
    """Base of every operating error that Rungway raises on purpose."""


@dataclass(frozen=True)
class Mistake:
    """One thing wrong in a file: where it is and what would be right."""

    file: str
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.path}: {self.message}"


class ConfigError(RungwayError):
    """Configuration is wrong. `mistakes` holds all of them."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("\n".join(str(mistake) for mistake in mistakes))
        self.mistakes = mistakes


class RequestError(RungwayError):
    """The client gets an error answer. `param` names the field, `retry_after_s` is whole seconds, >= 1."""

    def __init__(self, code: Code, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return CODES[self.code].status

    def body(self) -> dict[str, dict[str, str | None]]:
        """The OpenAI error shape."""
        return {
            "error": {
                "message": self.message,
                "type": CODES[self.code].type,
                "param": self.param,
                "code": str(self.code),
            }
        }


class ChannelError(RungwayError):
    """A channel peer is gone, or it reads so slowly that its bounded buffer is full."""


class ModelError(RungwayError):
    """A model source cannot be fetched, does not match its digest, or is not a supported architecture."""


class LedgerError(RungwayError):
    """The ledger cannot be opened or written, or its audit chain is broken."""
