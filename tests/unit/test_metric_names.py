"""Documents, alerts and dashboards name the metrics that exist, and every metric is documented."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from rungway.observe.metrics import COUNTERS, GAUGES, HISTOGRAMS

ROOT = Path(__file__).resolve().parents[2]
EXPORTED = {f"rungway_{name}_total": labels for name, (_, labels) in COUNTERS.items()}
EXPORTED |= {f"rungway_{name}": labels for name, (_, labels) in GAUGES.items()}
EXPORTED |= {f"rungway_{name}": ("tenant", "class", "tier") for name in HISTOGRAMS}
FILES = ("docs/metrics.md", "config/alerts.yaml", "config/dashboards/grafana.json")


def expressions() -> list[str]:
    rules = yaml.safe_load((ROOT / "config/alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((ROOT / "config/dashboards/grafana.json").read_text())["panels"]
    return [rule["expr"] for rule in rules] + [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.mark.parametrize("name", FILES)
def test_only_metrics_that_exist_are_named(name: str) -> None:
    named = set(re.findall(r"rungway_[a-z0-9_]+", (ROOT / name).read_text()))
    assert len(named) > 5
    assert {one.removesuffix("_bucket") for one in named} <= EXPORTED.keys()


def test_every_metric_is_documented_with_its_labels() -> None:
    lines = (ROOT / "docs/metrics.md").read_text().splitlines()
    rows = {cells[1].strip(" `"): cells[2].strip() for line in lines if len(cells := line.split("|")) == 5}
    documented = {name: tuple(filter(None, labels.split(", "))) for name, labels in rows.items() if "rungway_" in name}
    assert documented == EXPORTED


def test_expressions_select_by_labels_that_exist() -> None:
    selected = [found for one in expressions() for found in re.findall(r"(rungway_[a-z0-9_]+)\{([^}]*)\}", one)]
    assert selected
    for name, selector in selected:
        labels = re.findall(r"(\w+)\s*[=!]~?", selector)
        assert set(labels) <= {*EXPORTED[name], "le"}, name
