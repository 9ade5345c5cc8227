"""Latent attention keeps what it says it keeps, and its two ways to attend are one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.family_kit import LATENT, MODELS
from engine.native_kit import ByteVocabulary, generate, make_core, random_prompts, run_all, work
from rungway.engine import assemble
from rungway.engine.architecture import read_architecture
from rungway.engine.assemble import Sizes, module_parts
from rungway.engine.int4 import quantised
from rungway.engine.latent import LatentAttention, _mask
from rungway.engine.model import Decoder
from rungway.engine.ops import Span
from rungway.engine.precision import plain
from rungway.engine.stored import Fp8Weight, Int4Weight, rows_picked
from rungway.simulate.shapes import read_shape

CPU = torch.device("cpu")
PER_TOKEN = 3 * (LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"])  # three layers


@pytest.fixture(scope="module")
def model() -> Any:
    return MODELS["deepseek-v3"]()


def test_the_cache_holds_one_latent_and_one_rotated_key_per_token(model: Any) -> None:
    arch = read_architecture(model.config.to_dict())
    decoder = Decoder(arch, model.state_dict().__getitem__, plain(torch.float32), CPU)
    blocks, block_tokens = 7, 4
    held = sum(stored.numel() * stored.element_size() for stored in decoder.cache(blocks, block_tokens))
    assert held == blocks * block_tokens * PER_TOKEN * 4
    assert arch.cache_values == PER_TOKEN
    heads = arch.heads * (LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"] + LATENT["v_head_dim"])
    assert 3 * heads > PER_TOKEN * 6, "keys and values of all heads would be more than six times as much"


def test_the_planner_counts_the_same_bytes(model: Any) -> None:
    config = model.config.to_dict()
    assert read_shape("tiny", config).kv_bytes_per_token(2) == 2 * read_architecture(config).cache_values


def test_memory_holds_as_many_blocks_as_fit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "_kv_bytes", lambda _: PER_TOKEN * 4 * 16 * 9 + 1)
    _, _, sizes = module_parts(model, ByteVocabulary(), Sizes(8, 512, 64, 0, 16), "float32", CPU)
    assert sizes.kv_blocks == 9


@pytest.mark.parametrize("always", ["absorbed", "expanded"])
def test_both_ways_to_attend_are_one(model: Any, always: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts read whole and in chunks of every size, with only one of the two ways for chunks."""
    attend = LatentAttention._attend
    ran = []

    def forced(self: LatentAttention, plain_: torch.Tensor, turned: torch.Tensor, stored: Any, span: Any) -> Any:
        if not span.chunk:
            return attend(self, plain_, turned, stored, span)
        ran.append(len(plain_))
        entries = stored.index_select(0, span.blocks.view(-1)).view(1, -1, stored.shape[-1])
        if always == "absorbed":
            return self._absorbed(plain_, turned, entries, span.mask, True)
        return self._expanded(plain_, turned, entries[0], span.mask)

    monkeypatch.setattr(LatentAttention, "_attend", forced)
    prompts = random_prompts(4, seed=5)
    for batched in (9, 256):
        core, _ = make_core(model, batched=batched)
        heard = run_all(core, [work(str(at), prompt, max_tokens=8) for at, prompt in enumerate(prompts)])
        assert [heard.tokens(str(at)) for at in range(4)] == [generate(model, prompt, 8) for prompt in prompts]
    assert ran


def test_long_chunks_are_expanded_and_decodes_are_not(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, int]] = []
    for name in ("_absorbed", "_expanded"):
        inner = getattr(LatentAttention, name)

        def noted(self: Any, plain_: torch.Tensor, *rest: Any, name: str = name, inner: Any = inner) -> Any:
            taken.append((name, len(plain_)))
            return inner(self, plain_, *rest)

        monkeypatch.setattr(LatentAttention, name, noted)
    core, _ = make_core(model)
    run_all(core, [work("r", list(range(60)), max_tokens=2)])
    assert set(taken) == {("_expanded", 60), ("_absorbed", 1)}


def test_masks_that_nobody_made() -> None:
    """Where kernels need none, latent attention makes its own: decodes by length, chunks by place."""
    entries = torch.zeros(2, 12, 3)
    decodes = Span(0, 2, torch.zeros(2, 3), torch.tensor([4, 12]), None, chunk=False)
    seen = (_mask(decodes, entries) == 0).sum(-1).flatten()
    assert seen.tolist() == [4, 12]
    chunk = Span(5, 9, torch.zeros(1, 3), torch.tensor([10]), None, chunk=True)
    mask = _mask(chunk, entries)
    assert mask.shape == (1, 1, 4, 12) and (mask == 0).sum(-1).flatten().tolist() == [7, 8, 9, 10]


def test_rows_of_a_quantised_weight_in_another_order() -> None:
    """Rotary pairs are brought to halves in a checkpoint's own bits, where its scales allow it."""
    torch.manual_seed(0)
    codes, order = torch.randn(256, 128).to(torch.float8_e4m3fn), torch.randperm(256)
    by_row, by_block = Fp8Weight(codes, torch.rand(256)), Fp8Weight(codes, torch.rand(2, 1))
    four = quantised(torch.randn(256, 128), 32)
    for weight, kept in ((four, Int4Weight), (by_row, Fp8Weight), (by_block, torch.Tensor)):
        picked = rows_picked(weight, order, torch.bfloat16)
        assert isinstance(picked, kept)
        if isinstance(picked, torch.Tensor):
            assert torch.equal(picked, weight.dense()[order].bfloat16())
        else:
            assert torch.equal(picked.dense(), weight.dense()[order])
