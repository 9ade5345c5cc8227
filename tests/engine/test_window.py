"""A windowed layer's spans: exactly the keys of the window, through few blocks, whatever the sizes."""

from __future__ import annotations

import pytest
import torch

from rungway.engine.ops import Span
from rungway.engine.window import windowed


def seen(span: Span, block_tokens: int) -> list[list[int]]:
    """Positions that each row may see, by way of the block that holds them: block 100 + n holds those of the nth."""
    assert span.mask is not None
    rows = []
    masks = span.mask.flatten(0, 2)
    for at, mask in enumerate(masks):
        blocks = span.blocks[0 if span.chunk else at]
        keys = ((blocks - 100)[:, None] * block_tokens + torch.arange(block_tokens)).flatten()
        rows.append(sorted(keys[mask == 0].tolist()))
    return rows


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 50])
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_exactly_the_window(size: int, block_tokens: int) -> None:
    positions = torch.tensor([0, 1, 3, 4, 7, 8, 21, 38])
    width = 38 // block_tokens + 1
    blocks = 100 + torch.arange(width).expand(len(positions), -1)
    decodes = windowed(
        Span(0, 8, blocks, positions + 1, None, chunk=False), positions, size, block_tokens, torch.float32
    )
    expected = [list(range(max(0, at - size + 1), at + 1)) for at in positions.tolist()]
    assert seen(decodes, block_tokens) == expected
    assert decodes.blocks.shape[1] <= (size - 2) // block_tokens + 2

    rows = torch.arange(17, 39)
    chunk = windowed(
        Span(0, 22, blocks[:1], torch.tensor([39]), None, chunk=True), rows, size, block_tokens, torch.float32
    )
    assert seen(chunk, block_tokens) == [list(range(max(0, at - size + 1), at + 1)) for at in rows.tolist()]
