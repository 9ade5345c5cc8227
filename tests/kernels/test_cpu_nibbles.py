"""Products with 4-bit weights and 8-bit activations on CPU: against their formula, and each row on its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rungway.kernels import reference as plain
from rungway.kernels.cpu import bindings, layouts, reference
from rungway.kernels.cpu.build import BuildError

try:
    LIBRARY: Any = bindings.library()
    MISSING = ""
except BuildError as error:
    MISSING = str(error)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "compiled")


class Layer(NamedTuple):
    packed: bindings.Linear
    kept: tuple[object, ...]
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


def made(
    outputs: int,
    inputs: int,
    group: int,
    *,
    middled: bool = False,
    bias: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    seed: int = 1,
) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    shape = (outputs, inputs // group)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
    scales = (torch.randn(shape, generator=generator).exp() * 0.01).half()
    zeros = torch.full(shape, 8.0) if middled else torch.randint(0, 17, shape, generator=generator).float()
    nibbles = layouts.pack_nibbles(codes, scales, zeros)
    kept = (nibbles, None if bias is None else layouts.pad_row(bias), None if order is None else order.int())
    packed = bindings.Linear(
        weight=nibbles.blocks.data_ptr(),
        scales=nibbles.scales.data_ptr(),
        bias=None if kept[1] is None else kept[1].data_ptr(),
        kind=bindings.ZEROED if nibbles.zeroed else bindings.MIDDLED,
        outputs=outputs,
        inputs=inputs,
        stride=layouts.padded(inputs),
        group=group,
        offsets=nibbles.offsets.data_ptr(),
        order=None if kept[2] is None else kept[2].data_ptr(),
    )
    return Layer(packed, kept, codes, scales, zeros)


def run(layer: Layer, x: torch.Tensor, add: torch.Tensor | None = None, threads: int = 1) -> torch.Tensor:
    y = torch.full((len(x), layer.packed.outputs), 7.0) if add is None else add.clone()
    assert LIBRARY.rw_linear(layer.packed, x.data_ptr(), len(x), y.data_ptr(), add is not None, threads) == 0
    return y


def formula(layer: Layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return reference.linear_nibbles(x, layer.codes, layer.scales.float(), layer.zeros, bias)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 20),
    outputs=st.integers(1, 200),
    group=st.sampled_from([32, 64, 96, 128]),
    groups=st.integers(1, 7),
    middled=st.booleans(),
    biased=st.booleans(),
    ordered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_products_are_those_of_the_formula(
    rows: int, outputs: int, group: int, groups: int, middled: bool, biased: bool, ordered: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = group * groups
    x = torch.randn(rows, inputs, generator=generator)
    x[:1] = 0.0
    bias = torch.randn(outputs, generator=generator) if biased else None
    order = torch.randperm(inputs, generator=generator) if ordered else None
    layer = made(outputs, inputs, group, middled=middled, bias=bias, order=order, seed=seed)
    expected = formula(layer, x if order is None else x[:, order], bias)
    # sums of groups are exact: what is left is adding them up, next to the offset of unsigned activations
    least = 1e-5 * float(formula(layer, torch.ones(1, inputs)).abs().max() + 1.0)
    torch.testing.assert_close(run(layer, x), expected, rtol=1e-4, atol=least)
    torch.testing.assert_close(run(layer, x, add=expected), 2 * expected, rtol=1e-4, atol=2 * least)


@pytest.mark.parametrize("middled", [True, False], ids=["middled", "zeroed"])
def test_codes_and_zeros_at_their_ends(middled: bool) -> None:
    """The largest sums there are: every code and activation at an end, zeros at 0 and 16."""
    layer = made(64, 128, 128, middled=middled)
    assert layer.packed.kind == (bindings.MIDDLED if middled else bindings.ZEROED)
    for code, zero, sign in ((15, 0, 1.0), (0, 16, 1.0), (15, 0, -1.0), (0, 16, -1.0)):
        codes, zeros = torch.full((64, 128), code), torch.full((64, 1), 8.0 if middled else float(zero))
        nibbles = layouts.pack_nibbles(codes, torch.ones(64, 1), zeros)
        layer.packed.weight, layer.packed.scales = nibbles.blocks.data_ptr(), nibbles.scales.data_ptr()
        layer.packed.offsets = nibbles.offsets.data_ptr()
        got = run(layer, torch.full((1, 128), sign))
        expected = sign * 128 * (code - (8 if middled else zero))
        assert torch.allclose(got, torch.full_like(got, expected), rtol=1e-6)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("middled", [True, False], ids=["middled", "zeroed"])
def test_rows_do_not_know_each_other(group: int, middled: bool) -> None:
    torch.manual_seed(1)
    layer, x = made(300, 384, group, middled=middled, bias=torch.randn(300)), torch.randn(70, 384)
    together = run(layer, x)
    for count in (*range(1, 14), 24):
        assert torch.equal(run(layer, x[-count:].contiguous()), together[-count:])
    loud = x.clone()
    loud[0] *= 50.0
    loud[1] = float("nan")
    loud[2, 5] = float("inf")
    beside = run(layer, loud)
    assert torch.equal(beside[3:], together[3:]) and not beside[1:3].isfinite().any(1).all()
    assert torch.equal(run(layer, x, threads=3), together)


@pytest.mark.parametrize("middled", [True, False], ids=["middled", "zeroed"])
def test_gated(middled: bool) -> None:
    torch.manual_seed(1)
    layer = made(256, 96, 32, middled=middled, bias=torch.randn(256))
    for rows in (1, 3, 7, 13):
        x, got = torch.randn(rows, 96), torch.empty(rows, 128)
        assert LIBRARY.rw_gated_linear(layer.packed, x.data_ptr(), rows, got.data_ptr(), 2) == 0
        torch.testing.assert_close(got, plain.swiglu(run(layer, x)), rtol=1e-5, atol=1e-6)


def test_scales_of_any_size_and_sign() -> None:
    """Beside each other within an output they may lie 2^14 apart without a loss; across outputs anything goes."""
    codes, zeros = torch.randint(0, 16, (64, 64)), torch.full((64, 2), 3.0)
    for size in (1e-30, 1e-6, 1.0, 1e6):
        scales = torch.stack([torch.full((64,), size), torch.full((64,), -size * 2.0**-12)], 1).bfloat16()
        nibbles = layouts.pack_nibbles(codes, scales, zeros)
        short = nibbles.blocks[0, :, :128].contiguous().view(torch.float16).float().T
        assert torch.equal(short * nibbles.scales[:, None] * 16, scales.float())
