"""The HTML report of a simulation: one file, no scripts, nothing fetched. Charts are SVG made here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

from rungway.simulate.measure import Sample

WIDTH, HEIGHT, LEFT, BOTTOM = 860, 220, 64, 26
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#6b7280")
LINES_MAX = len(COLOURS)
POINTS_MAX = 600
STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:62rem;padding:0 1rem;color:#111827;background:#fff}
table{border-collapse:collapse;margin:.5rem 0 1.5rem;width:100%}th,td{padding:.2rem .6rem;border-bottom:1px solid #e5e7eb;
text-align:right;white-space:nowrap}th:first-child,td:first-child{text-align:left}h2{margin-top:2rem}
.narrow{width:auto}code{overflow-wrap:anywhere}.bad{color:#b91c1c}.box{overflow-x:auto}svg text{font:11px system-ui,sans-serif;fill:#374151}
"""

Line = tuple[str, list[tuple[float, float]]]


def html(title: str, command: str, result: dict[str, Any], samples: Sequence[Sample]) -> str:
    """The whole page. `command` reproduces it."""
    parts = [
        f"<h1>{escape(title)}</h1><p>Reproduce with <code>{escape(command)}</code></p>",
        _violations(result["violations"]),
        "<h2>Totals</h2>" + _totals(result),
        "<h2>Weighted tokens per second (prompt x 1 + output x 2), the tenants served most</h2>"
        + chart(_rates(samples)),
        "<h2>Waiting requests by tier</h2>" + chart(_series(samples, "depth")),
        "<h2>Sequences in flight by tier</h2>" + chart(_series(samples, "in_flight")),
        "<h2>Rung by tier, class and side (0 = full)</h2>" + chart(_moving(_series(samples, "rungs"))),
        "<h2>Classes</h2>" + _table(result["classes"], "class"),
        "<h2>Time to first token, p99, ms: the 30 slowest tenants</h2>"
        + bars(_column(result["tenants"], "ttft_ms_p99")),
        "<h2>Cost, USD: the 30 dearest tenants</h2>" + bars(_column(result["tenants"], "cost_usd")),
        "<h2>Tenants</h2>" + _table(result["tenants"], "tenant"),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>{''.join(parts)}</html>\n"
    )


# -- data -----------------------------------------------------------------------------------------------------------


def _rates(samples: Sequence[Sample]) -> list[Line]:
    """Service per second between samples, of the tenants that got most; over all tiers."""
    if len(samples) < 2:
        return []
    total: dict[str, float] = {}
    for (_, tenant), served in samples[-1].served.items():
        total[tenant] = total.get(tenant, 0.0) + served
    step = max(1, len(samples) // 200)
    picked = list(samples)[::step]
    lines = []
    for tenant in sorted(total, key=lambda name: -total[name])[:LINES_MAX]:
        points = []
        for before, after in pairwise(picked):
            gain = sum(v - before.served.get(key, 0.0) for key, v in after.served.items() if key[1] == tenant)
            points.append((after.at_s, gain / max(1e-9, after.at_s - before.at_s)))
        lines.append((tenant, points))
    return lines


def _series(samples: Sequence[Sample], field: str) -> list[Line]:
    names: dict[str, None] = {}
    for sample in samples:
        names.update(dict.fromkeys(getattr(sample, field)))
    return [(name, [(s.at_s, float(getattr(s, field).get(name, 0))) for s in samples]) for name in names]


def _moving(lines: list[Line]) -> list[Line]:
    """Only what is not 0 all the time."""
    return [line for line in lines if any(y for _, y in line[1])][:LINES_MAX]


def _column(rows: dict[str, dict[str, Any]], field: str) -> list[tuple[str, float]]:
    pairs = [(name, float(row[field])) for name, row in rows.items() if row[field] is not None]
    return sorted(pairs, key=lambda pair: -pair[1])[:30]


# -- drawing --------------------------------------------------------------------------------------------------------


def chart(lines: list[Line]) -> str:
    """Lines over seconds, with a legend; a note where there is nothing to draw."""
    points = [point for _, line in lines for point in line]
    if not points:
        return "<p>Nothing to show.</p>"
    x_max, y_max = max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0
    drawn = [_axes(x_max, y_max)]
    for number, (name, line) in enumerate(lines[:LINES_MAX]):
        thin = line[:: max(1, len(line) // POINTS_MAX)]
        path = " ".join(f"{_x(x, x_max):.1f},{_y(y, y_max):.1f}" for x, y in thin)
        drawn.append(
            f'<polyline fill="none" stroke="{COLOURS[number]}" stroke-width="1.4" points="{path}">'
            f"<title>{escape(name)}</title></polyline>"
        )
        at = LEFT + 8 + (number % 4) * 200
        drawn.append(f'<rect x="{at}" y="{4 + 14 * (number // 4)}" width="9" height="9" fill="{COLOURS[number]}"/>')
        drawn.append(f'<text x="{at + 13}" y="{13 + 14 * (number // 4)}">{escape(name[:30])}</text>')
    return f'<div class="box"><svg viewBox="0 0 {WIDTH} {HEIGHT + 46}" role="img">{"".join(drawn)}</svg></div>'


def bars(pairs: list[tuple[str, float]]) -> str:
    """Horizontal bars, longest first."""
    if not pairs:
        return "<p>Nothing to show.</p>"
    most = max(value for _, value in pairs) or 1.0
    rows = [
        f'<text x="150" y="{18 * i + 13}" text-anchor="end">{escape(name[:24])}</text>'
        f'<rect x="156" y="{18 * i + 3}" width="{max(1.0, 560 * value / most):.1f}" height="13" fill="{COLOURS[0]}"/>'
        f'<text x="{162 + 560 * value / most:.1f}" y="{18 * i + 13}">{_cell(value)}</text>'
        for i, (name, value) in enumerate(pairs)
    ]
    return f'<div class="box"><svg viewBox="0 0 {WIDTH} {18 * len(pairs) + 6}" role="img">{"".join(rows)}</svg></div>'


def _axes(x_max: float, y_max: float) -> str:
    marks = []
    for part in range(5):
        x, y = x_max * part / 4, y_max * part / 4
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{_y(y, y_max)}" y2="{_y(y, y_max)}" stroke="#e5e7eb"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{_y(y, y_max) + 4}" text-anchor="end">{_tick(y)}</text>')
        marks.append(f'<text x="{_x(x, x_max)}" y="{HEIGHT + 40}" text-anchor="middle">{_tick(x)} s</text>')
    return "".join(marks)


def _tick(value: float) -> str:
    """Never an exponent, at most three digits that mean nothing."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _x(x: float, x_max: float) -> float:
    return round(LEFT + (WIDTH - LEFT - 24) * x / x_max, 1)


def _y(y: float, y_max: float) -> float:
    return round(46 + (HEIGHT - BOTTOM) * (1.0 - y / y_max), 1)


# -- tables ---------------------------------------------------------------------------------------------------------


def _violations(found: list[str]) -> str:
    if not found:
        return "<p>Every invariant held.</p>"
    return '<ul class="bad">' + "".join(f"<li>{escape(what)}</li>" for what in found) + "</ul>"


def _totals(result: dict[str, Any]) -> str:
    rows = [(name, value) for name, value in result.items() if not isinstance(value, dict | list) and name != "command"]
    rows += [
        (f"{group} {name}", value)
        for group in ("fairness", "outcomes", "codes")
        for name, value in result[group].items()
    ]
    return (
        '<table class="narrow">'
        + "".join(f"<tr><td>{escape(n)}</td><td>{_cell(v)}</td></tr>" for n, v in rows)
        + "</table>"
    )


def _table(rows: dict[str, dict[str, Any]], first: str) -> str:
    if not rows:
        return "<p>Nothing to show.</p>"
    columns = list(next(iter(rows.values())))
    head = "".join(f"<th>{escape(column)}</th>" for column in (first, *columns))
    body = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{_cell(row[column])}</td>" for column in columns) + "</tr>"
        for name, row in rows.items()
    )
    return f'<div class="box"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:,.4g}" if isinstance(value, float) else escape(str(value))
