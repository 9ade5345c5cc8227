"""Decode of the small quickstart model by the native engine beside `transformers.generate`, same batch, same machine."""

from __future__ import annotations

from pathlib import Path

from rungway.chaos.bench.report import Report, Say, surroundings

BATCH = 8
BAR = 2.0


def bench_engine(*, source: str, models_dir: Path, quick: bool, say: Say) -> Report:
    """`source` is a `model:` of the platform file; it is fetched into `models_dir` where it is missing."""
    from rungway.engine.bench import decode_ratio
    from rungway.engine.loader import fetch_model

    report = Report("engine", notes=[surroundings()])
    say(f"model {source}")
    found = decode_ratio(
        fetch_model(source, models_dir), batch=BATCH, new_tokens=32 if quick else 64, rounds=1 if quick else 3
    )
    say(
        f"native {found['native_tokens_per_s']} tokens/s ({found['native_dtype']}), "
        f"generate {found['generate_tokens_per_s']} tokens/s ({found['generate_dtype']}), {found['threads']} threads"
    )
    report.at_least(f"decode tokens/s at batch {BATCH} / transformers.generate", float(found["ratio"]), BAR)
    report.control.append({"model": source, **found})
    return report
