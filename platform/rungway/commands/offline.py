"""Reading the ledger of a platform that is not running, straight from its database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rungway.commands.common import fail, load

if TYPE_CHECKING:
    from rungway.ledger.reader import LedgerReader


def open_ledger(config: Path, state: Path | None) -> LedgerReader:
    """A reader on the configuration's database. Exit 1 when there is no ledger yet."""
    from rungway.ledger.reader import LedgerReader
    from rungway.ledger.schema import database_url

    platform = load(config, state)
    if platform.database == "sqlite" and not Path(platform.state_dir).is_dir():
        raise fail(f"nothing has run here yet: there is no {platform.state_dir}")
    typer.echo("rungway: no server answers; reading the ledger from its database", err=True)
    return LedgerReader(database_url(platform))
