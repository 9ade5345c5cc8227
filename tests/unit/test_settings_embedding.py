"""An embedding tier is of another kind than the rest; settings say what of theirs it cannot have."""

from __future__ import annotations

from pathlib import Path

import pytest

from rungway.settings import load_platform
from unit.test_settings_refusals import ACME, PLATFORM, mistakes, write

EMBED = """\
  embed:
    kind: embedding
    price_usd_per_1k: {input: 1, cached_input: 1, output: 0}
    versions:
      e: {backend: fake%s}
%smodels:
"""


NATIVE = 'native, model: "path:m", tensor_parallel: 2}\nmodels'


def platform(version: str = "", more: str = "") -> str:
    return PLATFORM.replace("models:\n", EMBED % (version, more))


def test_an_embedding_tier_stands_beside_the_others(tmp_path: Path) -> None:
    loaded = load_platform(write(tmp_path, platform()))
    assert [tier.name for tier in loaded.tiers if tier.kind == "embedding"] == ["embed"]


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (platform(more="    rank: 3\n"), "tiers.embed.rank", "only for tiers of kind text"),
        (platform().replace("fake}\nmodels", NATIVE), "tiers.embed.versions", "only for tiers of kind text"),
        (platform(", dtype: int4"), "tiers.embed.versions", "dtype int4 is not for embeddings"),
        (
            platform(more='      f: {backend: native, model: "path:other"}\n'),
            "tiers.embed.versions",
            "must all have one model",
        ),
        (platform() + "  both: {tiers: [small, embed]}\n", "models.both.tiers", "stands alone"),
    ],
)
def test_what_it_cannot_have_is_refused(tmp_path: Path, text: str, path: str, says: str) -> None:
    (found,) = mistakes(write(tmp_path, text))
    assert found.path == path and says in found.message


def test_high_risk_text_cannot_need_an_embedding_tier(tmp_path: Path) -> None:
    (found,) = mistakes(write(tmp_path, platform(), acme=ACME + "risk: {high: {tier_min: embed}}\n"))
    assert (found.path, found.line) == ("tenants.acme.risk.high.tier_min", 2)
    assert "answers with embeddings" in found.message
