"""Random models of both families, and ways to drive the engine's core without threads."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rungway.engine.assemble import Sizes, module_parts
from rungway.engine.blocks import BlockPool
from rungway.engine.chain import chained
from rungway.engine.core import Core
from rungway.engine.drafts import Speculation
from rungway.engine.grammar import Grammars
from rungway.engine.ops import Ops
from rungway.engine.prefix import Hasher
from rungway.engine.protocol import Delta, EngineUsage, Sampling, Work
from rungway.engine.scheduler import Scheduler

VOCAB = 300
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class ByteVocabulary:
    """Tokens 0..255 are the bytes, 256 the end, the rest stand for `<id>`."""

    vocab_size = VOCAB
    eos_ids = frozenset({256})

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"" if token == 256 else f"<{token}>".encode()

    def token_name(self, token: int) -> bytes:
        return self.token_bytes(token) or b"<end>"


GRAMMARS = Grammars(ByteVocabulary())


def random_model(family: str) -> Any:
    """A small float32 model: llama (untied), llama3 (its rotary scaling), qwen2 (tied, with biases)."""
    torch.manual_seed(7)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    if family == "llama3":
        return LlamaForCausalLM(LlamaConfig(**shape, head_dim=16, rope_parameters=LLAMA3_ROPE)).eval()
    model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)).eval()
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value, std=0.2)
    return model


def random_prompts(count: int, longest: int = 60, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def make_core(
    model: Any,
    *,
    seqs: int = 8,
    batched: int = 256,
    blocks: int = 256,
    block_tokens: int = 4,
    context: int = 256,
    ops: Ops | None = None,
    prefix_cache: bool = True,
    hasher: Hasher = chained,
    speculation: Speculation | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> tuple[Core, Scheduler]:
    wish = Sizes(seqs, context, batched, blocks, block_tokens)
    runner, vocabulary, sizes = module_parts(model, ByteVocabulary(), wish, dtype, torch.device(device), ops)
    scheduler = Scheduler(
        BlockPool(blocks, block_tokens, hasher=hasher),
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        prefix_cache=prefix_cache,
    )
    core = Core(
        runner,
        vocabulary,
        scheduler,
        context=sizes.context,
        waiting_max=1000,
        clock_ns=time.perf_counter_ns,
        speculation=speculation,
    )
    return core, scheduler


def work(request_id: str, prompt: list[int], *, sequences: int = 1, **more: Any) -> Work:
    """Greedy and without an end token unless said otherwise; `resume`, `share`, `priority`, `weight` go to the Work."""
    outer = {name: more.pop(name) for name in ("resume", "share", "priority", "weight") if name in more}
    sampling = Sampling(**{"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, **more})
    return Work(
        request_id=request_id,
        attempt=1,
        prompt_ids=prompt,
        prompt_text="",
        sampling=sampling,
        sequences=sequences,
        **outer,
    )


class Heard:
    """Everything that came out, by (request, sequence)."""

    def __init__(self) -> None:
        self.deltas: dict[tuple[str, int], list[Delta]] = defaultdict(list)

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            heard = self.deltas[delta.request_id, delta.index]
            assert not heard or heard[-1].finish is None, "a delta after the last one"
            heard.append(delta)

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token for delta in self.deltas[request_id, index] for token in delta.token_ids]

    def text(self, request_id: str, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas[request_id, index])

    def usage(self, request_id: str) -> EngineUsage:
        """The one usage of an attempt; fails where there are more or none."""
        deltas = [delta for (name, _), heard in self.deltas.items() if name == request_id for delta in heard]
        (usage,) = [delta.usage for delta in deltas if delta.usage is not None]
        return usage

    def last(self, request_id: str, index: int = 0) -> Delta:
        return self.deltas[request_id, index][-1]


def drain(core: Core, heard: Heard | None = None, *, steps_max: int = 5000) -> Heard:
    """Runs until nothing is left, with the self-check after every step."""
    heard = heard or Heard()
    for _ in range(steps_max):
        if not core.busy:
            return heard
        heard.take(core.step())
        assert core.check() == []
    raise AssertionError("the engine did not come to an end")


def run_all(core: Core, works: list[Work]) -> Heard:
    heard = Heard()
    for item in works:
        constraint = item.sampling.constraint
        heard.take(core.add(item, None if constraint is None else GRAMMARS.compile(constraint)))
    return drain(core, heard)


def generate(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers makes of one prompt, greedy."""
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
