"""docs/configuration.md says what the schema says."""

from __future__ import annotations

from pathlib import Path

from rungway.settings.reference import render

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == render(), "run: python -m rungway.settings.reference > docs/configuration.md"


def test_every_field_has_a_meaning() -> None:
    rows = [line.split(" | ") for line in render().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert not [row for row in rows if len(row) != 4 or not row[3].strip(" |")]
