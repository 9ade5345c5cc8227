"""Mixtures of experts: whom the router picks depends on the token alone, each expert runs once a step, and checkpoints are
read under every name that their publishers use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.family_kit import MODELS
from rungway.engine.architecture import read_architecture
from rungway.engine.experts import Experts, Router
from rungway.engine.families.spec import Routing, Score
from rungway.engine.model import Decoder
from rungway.engine.ops import PlainOps
from rungway.engine.parts import Builder, Stream
from rungway.engine.precision import INT8, Maker, plain
from rungway.engine.selftest import likeness, read_through
from rungway.engine.weights import DirectoryWeights, read_config

CPU = torch.device("cpu")
FLOAT = plain(torch.float32)
IDS = [(37 * at + 11) % 300 for at in range(48)]


def builder(name: str, weights: Callable[[str], torch.Tensor]) -> Builder:
    arch = read_architecture(MODELS[name]().config.to_dict())
    return Builder(arch, weights, FLOAT, CPU, PlainOps(), Maker(FLOAT))


def router(routing: Routing, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Router:
    tensors = {"mlp.gate.weight": weight, "mlp.gate.e_score_correction_bias": bias}
    return Router(builder("mixtral", tensors.__getitem__), "", routing)  # type: ignore[arg-type]


@pytest.mark.parametrize("score", list(Score))
def test_a_token_is_routed_alike_alone_and_in_any_batch(score: Score) -> None:
    torch.manual_seed(0)
    routing = Routing((True,), experts=60, chosen=6, intermediate=8, score=score)
    choose = router(routing, torch.randn(60, 512))
    x = torch.randn(200, 512)
    weights, chosen = choose(x)
    for at in range(0, 200, 7):
        for rows in (slice(at, at + 1), slice(max(0, at - 3), at + 1)):
            alone = choose(x[rows])
            assert torch.equal(alone[0][-1], weights[at]) and torch.equal(alone[1][-1], chosen[at])


def test_equal_scores_go_to_the_lower_expert() -> None:
    weights, chosen = router(Routing((True,), experts=9, chosen=3, intermediate=8), torch.ones(9, 4))(torch.ones(2, 4))
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_groups_limit_the_choice_and_the_correction_changes_no_weight() -> None:
    """The best expert is in a group that falls out; the correction lifts an expert and is not in its weight."""
    routing = Routing(
        (True,), 4, 1, 8, Score.SIGMOID, renormalise=False, groups=2, groups_chosen=1, group_best=2, corrected=True
    )
    weight = torch.tensor([[3.0], [-9.0], [2.0], [1.0]])
    weights, chosen = router(routing, weight, torch.zeros(4))(torch.ones(1, 1))
    assert chosen.tolist() == [[2]]
    weights, chosen = router(routing, weight, torch.tensor([0.0, 0.0, 0.0, 0.5]))(torch.ones(1, 1))
    assert chosen.tolist() == [[3]]
    torch.testing.assert_close(weights, torch.tensor([[1.0]]).sigmoid())


def test_each_wanted_expert_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["mixtral"]()
    build = builder("mixtral", model.state_dict().__getitem__)
    assert build.arch.routing is not None
    layer = Experts(build, "model.layers.0.", "model.layers.0.post_attention_layernorm", build.arch.routing)
    ran: list[tuple[int, int]] = []

    def watched(number: int, inner: Any) -> Any:
        return lambda x: ran.append((number, len(x))) or inner(x)

    monkeypatch.setattr(layer, "_experts", [watched(at, inner) for at, inner in enumerate(layer._experts)])
    with torch.inference_mode():
        layer(Stream(torch.randn(40, build.arch.hidden)))
        assert sum(rows for _, rows in ran) == 80 and len({number for number, _ in ran}) == len(ran)
        ran.clear()
        layer(Stream(torch.randn(1, build.arch.hidden)))
    assert [rows for _, rows in ran] == [1, 1]


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2-groups", "deepseek-v3", "gemma3"])
def test_read_from_a_checkpoint_as_published(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    stored, arch = DirectoryWeights(tmp_path), read_architecture(read_config(tmp_path))
    if arch.routing is not None:
        inner = "block_sparse_moe.experts.3.w1" if name == "mixtral" else "mlp.experts.3.up_proj"
        one = stored(f"model.layers.{arch.routing.layers.index(True)}.{inner}.weight")
        assert one.shape == (arch.routing.intermediate, arch.hidden), "experts by themselves, not stacked as in memory"
    with torch.inference_mode():
        got = read_through(Decoder(arch, stored, FLOAT, CPU), IDS)
        expected = torch.log_softmax(model(torch.tensor([IDS])).logits[0], -1)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "qwen3", "mixtral", "qwen2-moe", "deepseek-v2-groups", "deepseek-v3"])
def test_fewer_bits_are_still_the_same_model(name: str) -> None:
    """bfloat16, and 8 bits with float32 between the layers: close to the exact model, far from another one."""
    model = MODELS[name]()
    arch, weights = read_architecture(model.config.to_dict()), model.state_dict().__getitem__
    with torch.inference_mode():
        exact, half, small = (
            read_through(Decoder(arch, weights, kind, CPU), IDS) for kind in (FLOAT, plain(torch.bfloat16), INT8)
        )
    spread = likeness(exact, torch.roll(exact, 1, -1)).divergence
    assert likeness(exact, half).divergence < 0.05 * spread
    assert likeness(exact, small).divergence < 0.05 * spread
