"""The ledger: one row per request, one hash-chained audit row per downgrade or refusal, the engines' own token log."""

from rungway.ledger.chain import Head, VerifyResult
from rungway.ledger.reader import LedgerReader
from rungway.ledger.schema import database_url
from rungway.ledger.writer import LedgerWriter

__all__ = ["Head", "LedgerReader", "LedgerWriter", "VerifyResult", "database_url"]
