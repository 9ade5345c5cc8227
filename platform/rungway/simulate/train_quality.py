"""Trains the first quality model from published outcomes of a weak and a strong model.

    python -m rungway.simulate.train_quality TRACES_DIR OUT.json

`TRACES_DIR` holds RouteLLM's evaluation files (lm-sys/RouteLLM, routellm/evals: gsm8k_responses.csv, mmlu/*.csv and the
lists of contaminated prompts, which are left out as its authors do). Every figure in the report is of prompts that the
scoring model had not seen: 5 folds at random, and each subject left out in turn. Reads files and the date; not a policy.
"""

from __future__ import annotations

import csv
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rungway.policies.features import NAMES, features
from rungway.policies.quality import CLAMP_DEVIATIONS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WEAK = "mistralai/Mixtral-8x7B-Instruct-v0.1"
STRONG = "gpt-4-1106-preview"
FOLDS = 5
SEED = 20
RIDGE = 5.0
NEWTON_STEPS_MAX = 50
ECE_BINS = 10
RANDOM_DRAWS = 50
_LOG_CHARS = NAMES.index("log_chars")


class Outcomes(NamedTuple):
    """One row per prompt: features, whether each model was right (0/1), and its subject."""

    x: Floats
    weak: Floats
    strong: Floats
    subject: npt.NDArray[np.str_]


class Fit(NamedTuple):
    """Standardising constants and both heads, the intercept first."""

    means: Floats
    deviations: Floats
    weak: Floats
    gap: Floats


def load(traces: Path) -> Outcomes:
    """Prompts and outcomes, without those on RouteLLM's contamination lists."""
    sources = [(path, "mmlu_contaminated_prompts.jsonl") for path in sorted((traces / "mmlu").glob("*.csv"))]
    sources.append((traces / "gsm8k_responses.csv", "gsm8k_contaminated_prompts.jsonl"))
    csv.field_size_limit(1 << 24)
    rows: list[tuple[float, ...]] = []
    weak: list[float] = []
    strong: list[float] = []
    subject: list[str] = []
    for path, listed in sources:
        left_out = {json.loads(line)["eval_prompt"] for line in (traces / listed).read_text("utf-8").splitlines()}
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["prompt"] in left_out:
                    continue
                rows.append(features(row["prompt"], turns=1, max_tokens=None))
                weak.append(float(row[WEAK] == "True"))
                strong.append(float(row[STRONG] == "True"))
                subject.append(path.stem)
    return Outcomes(np.array(rows), np.array(weak), np.array(strong), np.array(subject))


def sigmoid(score: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-score)))


def fisher(design: Floats, y: Floats, floor: Floats, ridge: float) -> Floats:
    """Maximum likelihood of y ~ Bernoulli(floor + (1 - floor) * sigmoid(design @ b)) by Fisher scoring.

    `floor` = 0 is ordinary logistic regression. Column 0 of `design` is the intercept and is not penalised.
    """
    b = np.zeros(design.shape[1])
    penalty = ridge * np.eye(design.shape[1])
    penalty[0, 0] = 1e-9
    for _ in range(NEWTON_STEPS_MAX):
        s = sigmoid(design @ b)
        p = np.clip(floor + (1 - floor) * s, 1e-6, 1 - 1e-6)
        slope = (1 - floor) * s * (1 - s)
        variance = p * (1 - p)
        information = (design * (slope**2 / variance)[:, None]).T @ design + penalty
        step = np.linalg.solve(information, design.T @ ((y - p) * slope / variance) - penalty @ b)
        b = b + step
        if np.abs(step).max() < 1e-9:
            break
    return b


def design_of(x: Floats, means: Floats, deviations: Floats) -> Floats:
    z = np.clip((x - means) / deviations, -CLAMP_DEVIATIONS, CLAMP_DEVIATIONS)
    return np.column_stack([np.ones(len(x)), z])


def fit(data: Outcomes) -> Fit:
    """Both heads: the weak model's P(ok), then the gap given it."""
    means, deviations = data.x.mean(0), data.x.std(0)
    deviations[deviations < 1e-9] = 1.0  # a feature that never varies here gets weight 0
    design = design_of(data.x, means, deviations)
    weak = fisher(design, data.weak, np.zeros(len(data.weak)), RIDGE)
    gap = fisher(design, data.strong, sigmoid(design @ weak), RIDGE)
    return Fit(means, deviations, weak, gap)


def held_out_scores(data: Outcomes, folds: Ints) -> tuple[Floats, Floats]:
    """Linear scores of both heads, each row scored by a model that saw no row of its fold."""
    weak, gap = np.zeros(len(data.weak)), np.zeros(len(data.weak))
    for fold in np.unique(folds):
        test = folds == fold
        model = fit(take(data, ~test))
        design = design_of(data.x[test], model.means, model.deviations)
        weak[test], gap[test] = design @ model.weak, design @ model.gap
    return weak, gap


def platt(weak: Floats, gap: Floats, data: Outcomes) -> tuple[Floats, Floats]:
    """(offset, slope) of each head on held-out scores."""
    ones = np.ones(len(weak))
    on_weak = fisher(np.column_stack([ones, weak]), data.weak, np.zeros(len(weak)), 0.0)
    floor = sigmoid(on_weak[0] + on_weak[1] * weak)
    return on_weak, fisher(np.column_stack([ones, gap]), data.strong, floor, 0.0)


def probabilities(weak: Floats, gap: Floats, steps: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """(P(ok | smallest), P(ok | top)) after the Platt steps."""
    p_weak = sigmoid(steps[0][0] + steps[0][1] * weak)
    return p_weak, p_weak + (1 - p_weak) * sigmoid(steps[1][0] + steps[1][1] * gap)


def cross_calibrated(data: Outcomes, folds: Ints) -> tuple[Floats, Floats]:
    """Held-out probabilities whose Platt steps were fitted on the other folds as well."""
    weak, gap = held_out_scores(data, folds)
    p_weak, p_top = np.zeros(len(weak)), np.zeros(len(weak))
    for fold in np.unique(folds):
        test = folds == fold
        steps = platt(weak[~test], gap[~test], take(data, ~test))
        p_weak[test], p_top[test] = probabilities(weak[test], gap[test], steps)
    return p_weak, p_top


def apgr(gain: Floats, data: Outcomes) -> float:
    """Average performance gap recovered (RouteLLM): area under accuracy over the share of strong calls, as a share of
    the gap between both models. Random is 0.5."""
    return _area(np.argsort(-gain, kind="stable"), data)


def cpt(gain: Floats, data: Outcomes, share: float) -> float:
    """Share of strong calls, in order of `gain`, at which `share` of the gap is first recovered."""
    curve = _recovered(np.argsort(-gain, kind="stable"), data)
    return float(np.argmax(curve >= share) / (len(curve) - 1))


def ece(p: Floats, y: Floats) -> float:
    """Expected calibration error over bins of equal count."""
    order = np.argsort(p, kind="stable")
    return float(sum(abs(p[b].mean() - y[b].mean()) * len(b) for b in np.array_split(order, ECE_BINS)) / len(p))


def take(data: Outcomes, rows: npt.NDArray[np.bool_]) -> Outcomes:
    return Outcomes(data.x[rows], data.weak[rows], data.strong[rows], data.subject[rows])


def report(data: Outcomes) -> dict[str, Any]:
    """Every figure of docs/router.md."""
    rng = np.random.default_rng(SEED)
    at_random = rng.integers(0, FOLDS, len(data.weak))
    by_subject = np.unique(data.subject, return_inverse=True)[1].astype(np.int64)
    math_set = data.subject == "gsm8k_responses"
    held: dict[str, Any] = {}
    for kind, folds in (("random_folds", at_random), ("subject_left_out", by_subject)):
        p_weak, p_top = cross_calibrated(data, folds)
        held[kind] = {"ece_weak": ece(p_weak, data.weak), "ece_top": ece(p_top, data.strong)}
        for name, rows in (("mmlu", ~math_set), ("gsm8k", math_set)):
            part, gain = take(data, rows), (p_top - p_weak)[rows]
            held[kind][name] = {"apgr": apgr(gain, part), "cpt50": cpt(gain, part, 0.5), "cpt80": cpt(gain, part, 0.8)}
    baselines = {
        name: {
            "rows": int(rows.sum()),
            "accuracy_weak": float(data.weak[rows].mean()),
            "accuracy_strong": float(data.strong[rows].mean()),
            "random_apgr": float(
                np.mean([apgr(rng.random(int(rows.sum())), take(data, rows)) for _ in range(RANDOM_DRAWS)])
            ),
            "length_apgr": apgr(data.x[rows][:, _LOG_CHARS], take(data, rows)),
        }
        for name, rows in (("mmlu", ~math_set), ("gsm8k", math_set))
    }
    model = fit(take(data, ~math_set))
    design = design_of(data.x[math_set], model.means, model.deviations)
    p_weak = sigmoid(design @ model.weak)
    transfer = apgr((1 - p_weak) * sigmoid(design @ model.gap), take(data, math_set))
    return {"baselines": baselines, "held_out": held, "mmlu_to_gsm8k_apgr": transfer}


def train(data: Outcomes) -> dict[str, Any]:
    """The model file's content."""
    folds = np.random.default_rng(SEED).integers(0, FOLDS, len(data.weak))
    steps = platt(*held_out_scores(data, folds), data)
    model = fit(data)
    prior_weak = float(data.weak.mean())
    heads = {
        name: {
            "weights": [round(float(value), 6) for value in head[1:]],
            "bias": round(float(head[0]), 6),
            "platt_slope": round(float(step[1]), 6),
            "platt_offset": round(float(step[0]), 6),
        }
        for name, head, step in (("weak", model.weak, steps[0]), ("gap", model.gap, steps[1]))
    }
    return {
        "features": list(NAMES),
        "means": [round(float(value), 6) for value in model.means],
        "deviations": [round(float(value), 6) for value in model.deviations],
        **heads,
        "prior_weak": round(prior_weak, 4),
        "prior_gap": round((float(data.strong.mean()) - prior_weak) / (1 - prior_weak), 4),
        "made": {
            "by": "python -m rungway.simulate.train_quality",
            "date": datetime.now(UTC).date().isoformat(),
            "data": "lm-sys/RouteLLM routellm/evals (Apache-2.0; MMLU and GSM8K: MIT), contaminated prompts left out",
            "weak": WEAK,
            "strong": STRONG,
            "folds": FOLDS,
            "seed": SEED,
            "ridge": RIDGE,
            **json.loads(json.dumps(report(data)), parse_float=lambda text: round(float(text), 4)),
        },
    }


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m rungway.simulate.train_quality TRACES_DIR OUT.json", file=sys.stderr)
        return 2
    content = train(load(Path(arguments[0])))
    Path(arguments[1]).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(content["made"], indent=1))
    return 0


def _recovered(order: Ints, data: Outcomes) -> Floats:
    gained = np.concatenate([[0.0], np.cumsum((data.strong - data.weak)[order])])
    return np.asarray(gained / (data.strong.sum() - data.weak.sum()))


def _area(order: Ints, data: Outcomes) -> float:
    curve = _recovered(order, data)
    return float(np.trapezoid(curve, dx=1.0 / (len(curve) - 1)))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
