"""Layouts of quantised weights: written out by hand for a few numbers, then the products against plain ones."""

from __future__ import annotations

import torch

from rungway.kernels import layouts


def test_two_codes_a_byte_the_first_in_the_low_half() -> None:
    codes = torch.tensor([[1, 2, 15, 0], [7, 8, 0, 9]])
    packed = layouts.pack_int4(codes)
    assert packed.tolist() == [[0x21, 0x0F], [0x87, 0x90]]
    assert torch.equal(layouts.unpack_int4(packed).long(), codes)


def test_int4_weights_are_code_minus_zero_times_scale_by_group() -> None:
    packed = layouts.pack_int4(torch.tensor([[1, 2, 15, 0]]))
    scales, zeros = torch.tensor([[0.5, 2.0]]), torch.tensor([[8.0, 16.0]])
    assert layouts.dense_int4(packed, scales, zeros).tolist() == [[-3.5, -3.0, -2.0, -32.0]]


def test_fp8_weights_are_scaled_by_row_or_by_blocks_of_128_with_the_last_cut_off() -> None:
    codes = torch.ones(130, 257).to(torch.float8_e4m3fn)
    by_row = layouts.dense_fp8(codes, torch.arange(130.0))
    assert by_row[129].unique().tolist() == [129.0]
    by_block = layouts.dense_fp8(codes, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert [by_block[row, column].item() for row, column in ((0, 0), (127, 128), (128, 127), (129, 256))] == [
        1,
        2,
        4,
        6,
    ]


def test_a_layer_is_a_product_with_the_dense_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(3, 64, generator=generator), torch.randn(5, generator=generator)
    packed = torch.randint(0, 256, (5, 32), generator=generator, dtype=torch.uint8)
    scales, zeros = torch.rand(5, 2, generator=generator), torch.full((5, 2), 8.0)
    eight = torch.randint(-127, 128, (5, 64), generator=generator).to(torch.int8)
    tiny = torch.randn(5, 64, generator=generator).to(torch.float8_e4m3fn)
    pairs = (
        (layouts.int4_linear(x, packed, scales, zeros, bias), layouts.dense_int4(packed, scales, zeros)),
        (layouts.int8_linear(x, eight, scales[:, 0], bias), eight.float() * scales[:, :1]),
        (layouts.fp8_linear(x, tiny, scales[:, 0], bias), tiny.float() * scales[:, :1]),
    )
    for got, dense in pairs:
        assert torch.allclose(got, torch.nn.functional.linear(x, dense, bias), atol=1e-4)
    assert layouts.int4_linear(x.bfloat16(), packed, scales, zeros).dtype is torch.bfloat16
