"""Run by test_triton.py in a process of its own: launches compiled as a device would have them compiled, without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.family_kit import MODELS
from engine.native_kit import ByteVocabulary
from engine.test_cuda_graphs import decode_batch, drafts_batch
from rungway.engine import int8_kernel
from rungway.engine.architecture import read_architecture
from rungway.engine.assemble import Sizes, module_parts
from rungway.engine.formats import INT8_GPU
from rungway.engine.kernel_ops import KernelOps
from rungway.engine.model import Decoder
from rungway.kernels import ops
from rungway.kernels.compile_check import SHARED_BYTES_MAX
from rungway.kernels.decode_attention import Config
from rungway.kernels.launches import Launch, compiled_only, refusals
from rungway.kernels.registry import KERNELS


@pytest.fixture(scope="module")
def launches() -> Iterator[list[Launch]]:
    with compiled_only(90) as found:
        yield found


@pytest.mark.parametrize("family", ["gemma3"])
@torch.inference_mode()
def test_every_launch_of_an_engine_compiles(
    family: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes, several rows of a sequence, chunks; with norms of heads, windows and residuals; in bfloat16."""
    monkeypatch.setattr(ops, "get", lambda name, device: KERNELS[name].triton())
    vocabulary, sizes = ByteVocabulary(), Sizes(8, 64, 64, 60, 4)
    runner = module_parts(MODELS[family](), vocabulary, sizes, "bfloat16", torch.device("cpu"), KernelOps())[0]
    before = len(launches)
    for batch in (decode_batch([3, 4, 9], 0), drafts_batch([4, 1, 2], [9, 17, 3], 7), chunks([9, 12])):
        with NoWaiting():
            assert runner.model.forward(batch, runner._cache).shape[0] == len(batch.outputs)
    names = {launch.kernel for launch in launches[before:]}
    assert {"_attend", "_prefill"} <= names
    assert all(launch.shared <= SHARED_BYTES_MAX[90] and launch.registers <= 255 for launch in launches)


class NoWaiting(TorchDispatchMode):
    """Fails for what waits for a device or copies to it: such a step can be recorded as a graph, and runs ahead of the device
    where it is not."""

    waits = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "bincount", "is_pinned")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(function) for name in self.waits), f"{function} in a step"
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_step_of_8_bit_weights_compiles_and_waits_for_nothing(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def triton(name: str, device: torch.device) -> Any:
        return KERNELS[name].triton()

    monkeypatch.setattr(ops, "get", triton)
    monkeypatch.setattr(int8_kernel, "get", triton)
    module = MODELS["qwen3"]()
    arch, state = read_architecture(module.config.to_dict()), module.state_dict()
    model = Decoder(arch, state.__getitem__, INT8_GPU, torch.device("cpu"), KernelOps())
    before = len(launches)
    batch, cache = decode_batch([3, 4, 9], 0), model.cache(61, 4)
    with NoWaiting():
        model.forward(batch, cache)
    assert "_linear" in {launch.kernel for launch in launches[before:]}


def test_waiting_is_noticed() -> None:
    with pytest.raises(AssertionError, match="in a step"), NoWaiting():
        torch.ones(3).sum().item()
    with pytest.raises(AssertionError, match="in a step"), NoWaiting():
        torch.tensor([0, 3])


def chunks(lengths: list[int]) -> Any:
    """Whole prompts in one span."""
    batch = drafts_batch(lengths, lengths, 3)
    span = batch.spans[0]
    assert span.most > 8
    object.__setattr__(span, "chunk", True)
    return batch


@pytest.mark.parametrize("name", ["rms_norm", "int4_linear"])
def test_launches_of_the_cases_compile(name: str, launches: list[Launch]) -> None:
    assert [refusals(KERNELS[name], case, torch.bfloat16) for case in KERNELS[name].small[:3]] == [None] * 3


def test_what_a_device_would_refuse_is_said(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of which a product has fewer rows than tensor cores take: the interpreter lets it pass."""
    kernel = KERNELS["paged_decode_attention"]
    plain = kernel.triton()
    monkeypatch.setattr(
        "rungway.kernels.decode_attention.paged_decode_attention",
        lambda *args: plain(*args, config=Config(32, 512, 8, 4, 5)),
    )
    refused = refusals(kernel, kernel.small[0], torch.bfloat16)
    assert refused is not None and "paged_decode_attention" in refused and "Error" in refused
