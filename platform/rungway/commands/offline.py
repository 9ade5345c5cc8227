"""Reading the ledger of a platform that is not running, straight from its database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rungway.commands.common import fail, load

if TYPE_CHECKING:
    from rungway.contracts import Platform
    from rungway.ledger.reader import LedgerReader


@contextmanager
def open_ledger(config: Path, state: Path | None) -> Iterator[tuple[LedgerReader, Platform]]:
    """A reader on the configuration's database. Exit 1 when there is no ledger yet."""
    from rungway.ledger.reader import LedgerReader
    from rungway.ledger.schema import database_url

    platform = load(config, state)
    url = database_url(platform)
    file = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not file.is_file():
        raise fail(f"no server answers, and there is no ledger at {file}")
    typer.echo("rungway: no server answers; reading the ledger from its database", err=True)
    reader = LedgerReader(url)
    try:
        yield reader, platform
    finally:
        reader.close()
