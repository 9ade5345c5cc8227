"""Our engine and transformers' `generate`, each in its own process behind JSON lines, on a tiny random model; and the file
that llama.cpp reads."""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.gguf_kit import write_gguf
from rungway.chaos.bench import engine_formats
from rungway.chaos.bench.child import BenchError
from rungway.chaos.bench.engines import data
from rungway.chaos.bench.engines.gguf_q8 import q8_file, requantise
from rungway.chaos.bench.engines.install import requirements
from rungway.chaos.bench.engines.lines import LineChild
from rungway.chaos.bench.engines.start import Setting, start_generate, start_ours
from rungway.chaos.bench.engines.timeline import Job, decode_rate
from rungway.engine.gguf_convert import convert_gguf

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", Qwen2ForCausalLM(config), "qwen2")


@pytest.fixture(scope="module")
def setting(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    model = tmp_path_factory.mktemp("model")
    convert_gguf(packed, model, lambda what, done, total: None)
    return Setting(model, "path:tiny", 1, 128, tmp_path_factory.mktemp("logs"), dtype="float32")


def test_ours_answers_jobs_and_takes_a_late_prompt(setting: Setting) -> None:
    engine = start_ours(setting)
    try:
        line = engine.run(Job(PROMPTS, 6, temperature=0.8, seed=1))
        assert [sum(event.tokens for event in line.of(stream)) for stream in (0, 1)] == [6, 6]
        assert decode_rate(line, 2).clock > 0 and line.late_at_s != line.late_at_s
        late = engine.run(Job(PROMPTS, 100, late=[3] * 60, late_after=3))
        assert min(sum(event.tokens for event in late.of(stream)) for stream in (0, 1)) >= 3
        assert late.first_s(2) > late.late_at_s > 0
        assert all(value > 0 for value in engine.ask({"bandwidth": 1 << 20})["bandwidth"])
        assert engine.facts["weight_bytes"] > 4 * 320 * 64 and engine.facts["dtype"].endswith(" float32")
    finally:
        engine.stop()


def test_a_job_that_cannot_run_is_an_error(setting: Setting) -> None:
    engine = start_ours(setting)
    try:
        with pytest.raises(BenchError, match="ours: "):
            engine.run(Job([[1] * 500], 4))
    finally:
        engine.stop()


def test_generate_gives_the_same_number_of_tokens(setting: Setting) -> None:
    engine = start_generate(setting)
    try:
        line = engine.run(Job(PROMPTS, 6))
        assert [len(line.of(stream)) for stream in (0, 1)] == [6, 6]
        assert len(engine.run(Job(PROMPTS, 6, temperature=0.8, top_p=0.9, seed=2)).events) == 12
    finally:
        engine.stop()


def test_a_format_is_measured_in_its_own_process(setting: Setting, tmp_path: Path) -> None:
    work = {"windows": {"text": [list(range(60))]}, "prompts": [[5, 6, 7], [8, 9]], "answer_tokens": 6}
    (tmp_path / "work.json").write_text(json.dumps(work))
    facts = engine_formats._measure(setting.model, "float32", tmp_path, 1)
    assert facts["precision"] == "float32" and len(facts["answers"]) == 2
    assert 4 < facts["nats"]["text"] < 8  # random weights know nothing: ln(320) = 5.8
    made = engine_formats.row("float32", facts, facts)
    assert made["answers equal"] == "2 of 2" and made["decode at 8 / float32"] == 1.0
    assert "not_here" in engine_formats._measure(setting.model, "float16", tmp_path, 1)


def test_agreement_ends_at_the_first_difference() -> None:
    reference = [[1, 2, 3, 4], [5, 6], [7, 8]]
    assert engine_formats.agreement(reference, reference) == (3, 1.0)
    assert engine_formats.agreement([[1, 2, 9, 4], [5], [7, 8, 9]], reference) == (0, (0.5 + 0.5 + 1.0) / 3)


def test_texts_are_read_compressed_or_not() -> None:
    raw = b'{"a": 1}\n\n{"a": 2}\n'
    assert data.read_lines(raw) == data.read_lines(gzip.compress(raw)) == [{"a": 1}, {"a": 2}]


def test_a_program_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="odd has ended: no such engine"):
        LineChild("odd", [sys.executable, "-c", "import sys; sys.exit('no such engine')"], tmp_path / "odd.log", {})


def test_requantised_weights_are_the_same_within_eight_bits(packed: Path, tmp_path: Path) -> None:
    requantise(packed, tmp_path / "q8.gguf")
    before, after = (gguf.GGUFReader(str(path)) for path in (packed, tmp_path / "q8.gguf"))
    values: list[dict[str, Any]] = [
        {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in file.tensors}
        for file in (before, after)
    ]
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        assert np.abs(value - values[1][name]).max() <= np.abs(value).max() / 127
    kinds = {tensor.tensor_type for tensor in after.tensors if len(tensor.shape) > 1}
    assert kinds == {gguf.GGMLQuantizationType.Q8_0}
    kept = {name for name in before.fields if name.startswith(("qwen2.", "tokenizer."))}
    assert kept and all(before.fields[name].contents() == after.fields[name].contents() for name in kept)


def test_only_packaged_models_have_a_gguf_file() -> None:
    with pytest.raises(BenchError, match="no packaged model"):
        q8_file("path:somewhere")


def test_requirements_leave_out_extras_and_what_is_not_needed(tmp_path: Path) -> None:
    lines = ("torch==2.13.0+cpu; platform_machine == 'x'", "torchvision", 'pandas; extra == "bench"', "numpy>=1,<3")
    text = "Metadata-Version: 2.1\nName: x\n" + "".join(f"Requires-Dist: {line}\n" for line in lines)
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", text)
    assert requirements(tmp_path / "x.whl") == ["numpy>=1,<3"]
