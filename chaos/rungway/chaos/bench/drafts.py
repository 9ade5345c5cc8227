"""Speculative decoding beside plain decoding of the same model: code prompts, one at a time."""

from __future__ import annotations

from pathlib import Path

from rungway.chaos.bench.report import Report, Say, surroundings
from rungway.engine.bench_drafts import CODE_PROMPTS, draft_ratio
from rungway.engine.loader import fetch_model

BAR = 1.2
OFF_MAX = 0.1  # drafts for each token: the switch has left drafting off, but for its looks


def bench_drafts(*, source: str, draft_source: str, models_dir: Path, quick: bool, say: Say) -> Report:
    """Time without drafts / with them, of processor time, for drafts from the text and from a draft model. A method that the
    switch leaves off passes where that costs next to nothing."""
    report = Report("drafts", notes=[surroundings(), f"{source}, draft model {draft_source}, processor time"])
    path, draft = fetch_model(source, models_dir), fetch_model(draft_source, models_dir)
    for name, folder in (("ngram", None), ("draft", draft)):
        prompts = CODE_PROMPTS[:2] if quick else CODE_PROMPTS
        row = draft_ratio(path, folder, prompts=prompts, new_tokens=32 if quick else 96, rounds=1 if quick else 2)
        say(", ".join(f"{key} {value}" for key, value in row.items()))
        report.control.append(row)
        off = row["drafted_per_token"] <= OFF_MAX
        report.at_least(f"{name}: {'left off' if off else 'faster'}", row["ratio_cpu"], 0.97 if off else BAR)
        report.at_most(f"{name}: answers that differ", row["answers"] - row["same"], 0, "")
    return report
