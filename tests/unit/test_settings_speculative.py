"""`speculative:` of a version: what it may hold, and that both models are fetched and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from rungway import contracts
from rungway.errors import ConfigError
from rungway.settings import load_platform

PLATFORM = """\
cell: t
tenants_dir: tenants
tiers:
  small:
    price_usd_per_1k: {{input: 1, cached_input: 0.5, output: 2}}
    versions:
      s: {version}
"""


def load(folder: Path, version: str) -> contracts.Version:
    (folder / "tenants").mkdir(exist_ok=True)
    (folder / "tenants" / "acme.yaml").write_text("tenant: acme\n")
    path = folder / "rungway.yaml"
    path.write_text(PLATFORM.format(version=version))
    return load_platform(path).tiers[0].versions[0]


def test_drafts_are_off_unless_asked_for(tmp_path: Path) -> None:
    version = load(tmp_path, "{model: 'path:m'}")
    assert version.speculative == contracts.Speculative() and version.speculative.method == "off"
    assert version.sources == (f"path:{tmp_path / 'm'}",)
    assert load(tmp_path, "{model: 'path:m', speculative: {method: off}}") == version


def test_a_draft_model_is_a_source_like_the_model(tmp_path: Path) -> None:
    version = load(tmp_path, "{model: 'path:m', speculative: {method: draft, model: 'path:d', tokens_max: 3}}")
    assert version.sources == (f"path:{tmp_path / 'm'}", f"path:{tmp_path / 'd'}")
    assert (version.speculative.tokens_max, version.speculative.batch_max) == (3, 4)


@pytest.mark.parametrize(
    ("speculative", "why"),
    [
        ("{method: draft}", "method draft needs `model`"),
        ("{method: ngram, model: 'path:d'}", "only for `method: draft`"),
        ("{method: eagle}", "`off` | `ngram` | `draft`"),
        ("{method: ngram, tokens_max: 0}", "from 1 to 16"),
        ("{method: ngram, batch_max: 0}", "at least 1"),
        ("{method: draft, model: nonsense}", "hf:org/name"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, speculative: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"{{model: 'path:m', speculative: {speculative}}}")
    assert any(why in str(mistake) for mistake in caught.value.mistakes)


def test_the_fake_engine_has_no_drafts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculative"):
        load(tmp_path, "{backend: fake, speculative: {method: ngram}}")
