"""BERT-style encoders in plain torch: MiniLM, BGE, E5 and other models with `model_type: bert`.

Formula (Devlin et al. 2019, post-norm): h = norm(word + position + type); per layer h = norm(h + out(attend(h))),
h = norm(h + down(gelu(up(h)))). Attention is bidirectional. The vector is the mean of h over the text's tokens (Reimers and
Gurevych 2019), or h of its first token where the model says so, divided by its length.

Nothing is padded: linear layers and norms see the tokens of all texts one after the other ([tokens, hidden]); attention goes
over texts of equal length at a time, so that no mask is needed and no text can see another. Where products of another number
of rows round differently (`keeps_rows_apart`), linear layers take TILE rows at a time on CPU, filled up with zeros: a vector is
the same bit for bit in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rungway.engine.assemble import pick_device
from rungway.engine.embedding.encoder import Failed, Piece
from rungway.engine.errors import ModelError
from rungway.engine.precision import Maker, Projection, Role, plain
from rungway.engine.tokenizer import read_json
from rungway.engine.weights import DirectoryWeights, read_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


TILE = 16  # rows of one product, where their number matters
_COUNTS = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64)
_SEEN = 70


class Shape(NamedTuple):
    """What config.json says, checked. `gelu`: torch's name of the approximation."""

    layers: int
    hidden: int
    heads: int
    positions: int
    vocab_size: int
    norm_eps: float
    gelu: str


class Norm(NamedTuple):
    """Layer normalisation of the last axis."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


class Layer(NamedTuple):
    qkv: Projection
    out: Projection
    attention_norm: Norm
    up: Projection
    down: Projection
    norm: Norm


class Run(NamedTuple):
    """`texts` texts of `length` tokens each, from row `start` on."""

    start: int
    texts: int
    length: int


class BertEncoder:
    """An Encoder over the tensors of a model directory."""

    def __init__(
        self,
        shape: Shape,
        weights: Tensors,
        *,
        context: int,
        first_token: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`context`: most tokens of a text, within the model's positions. `first_token`: its vector is the text's, not
        the mean."""
        self.dimensions = shape.hidden
        self.goes_by_text = False
        self.context = context
        self.vocab_size = shape.vocab_size
        self.path = f"torch {str(dtype).removeprefix('torch.')}"
        self._shape = shape
        self._first_token = first_token
        self._device = device
        self._word = weights("embeddings.word_embeddings.weight")
        self._place = (
            weights("embeddings.position_embeddings.weight") + weights("embeddings.token_type_embeddings.weight")[0]
        )
        self._norm = weights.norm("embeddings.LayerNorm", shape.norm_eps)
        make = Maker(plain(dtype))
        self._layers = [_layer(f"encoder.layer.{i}.", weights, make, shape.norm_eps) for i in range(shape.layers)]
        self._tile = TILE if device.type == "cpu" and not self._any_company(dtype) else 0

    @torch.inference_mode()
    def encode(self, batch: Sequence[Piece]) -> list[bytes | Failed | None]:
        order = sorted(range(len(batch)), key=lambda at: batch[at].tokens)
        runs: list[Run] = []
        start = 0
        for length, group in groupby(batch[at].tokens for at in order):
            runs.append(Run(start, sum(1 for _ in group), length))
            start += runs[-1].texts * length
        ids = torch.tensor([token for at in order for token in batch[at].ids], device=self._device)
        vectors = F.normalize(self._pool(self._states(ids, runs), runs).float(), dim=1).cpu().contiguous().numpy()
        found: list[bytes | Failed | None] = [None] * len(batch)
        for row, at in enumerate(order):
            found[at] = vectors[row].astype("<f4").tobytes()
        return found

    def _any_company(self, dtype: torch.dtype) -> bool:
        """Whether the shapes of the first layer keep rows apart; all layers have the same."""
        layer, hidden = self._layers[0], self._shape.hidden
        inner = layer.up(torch.zeros(2, hidden, dtype=dtype)).shape[1]
        sizes = ((layer.qkv, hidden), (layer.out, hidden), (layer.up, hidden), (layer.down, inner))
        return all(keeps_rows_apart(linear, inputs, dtype) for linear, inputs in sizes)

    def _states(self, ids: torch.Tensor, runs: list[Run]) -> torch.Tensor:
        """[tokens, hidden] after the last layer."""
        places = torch.cat([torch.arange(run.length, device=self._device).repeat(run.texts) for run in runs])
        x = self._norm(self._word[ids] + self._place[places])
        # a product of one row is another operation than one of several
        x = F.pad(x, (0, 0, 0, -len(x) % self._tile if self._tile else max(0, 2 - len(x))))
        for layer in self._layers:
            x = layer.attention_norm(self._added(layer.out, self._attend(self._product(layer.qkv, x), runs), x))
            grown = F.gelu(self._product(layer.up, x), approximate=self._shape.gelu)
            x = layer.norm(self._added(layer.down, grown, x))
        return x

    def _product(self, linear: Projection, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x[rows]) for rows in self._tiles(x)]) if self._tile else linear(x)

    def _added(self, linear: Projection, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if not self._tile:
            return linear.add(x, residual)
        return torch.cat([linear.add(x[rows], residual[rows]) for rows in self._tiles(x)])

    def _tiles(self, x: torch.Tensor) -> list[slice]:
        return [slice(at, at + self._tile) for at in range(0, len(x), self._tile)]

    def _attend(self, qkv: torch.Tensor, runs: list[Run]) -> torch.Tensor:
        """[tokens, 3 * hidden] -> [tokens, hidden]."""
        hidden, heads = self._shape.hidden, self._shape.heads
        out = qkv.new_zeros(qkv.shape[0], hidden)
        for start, texts, length in runs:
            rows = slice(start, start + texts * length)
            q, k, v = qkv[rows].view(texts, length, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v)
            out[rows] = attended.transpose(1, 2).reshape(texts * length, hidden)
        return out

    def _pool(self, states: torch.Tensor, runs: list[Run]) -> torch.Tensor:
        """[texts, hidden], in the order of the runs."""
        pooled = []
        for start, texts, length in runs:
            rows = states[start : start + texts * length].view(texts, length, -1)
            pooled.append(rows[:, 0] if self._first_token else rows.float().mean(1))
        return torch.cat(pooled)


class Tensors:
    """Weights by name, with or without the prefix that some checkpoints have, in one dtype on one device."""

    def __init__(self, weights: DirectoryWeights, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._prefix = "bert." if weights.has("bert.embeddings.word_embeddings.weight") else ""
        self._dtype = dtype
        self._device = device

    def __call__(self, name: str) -> torch.Tensor:
        """Raises ModelError where there is none."""
        try:
            return self._weights(self._prefix + name).to(device=self._device, dtype=self._dtype)
        except KeyError:
            raise ModelError(f"the checkpoint lacks {name}") from None

    def norm(self, name: str, eps: float) -> Norm:
        return Norm(self(f"{name}.weight"), self(f"{name}.bias"), eps)


def keeps_rows_apart(linear: Projection, inputs: int, dtype: torch.dtype) -> bool:
    """Whether a row's product has the same bits beside any number of others; tried with some numbers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_SEEN, inputs, generator=generator).to(dtype)
    together = linear(x)
    return all(
        torch.equal(linear(x[at : at + count].contiguous()), together[at : at + count])
        for count in _COUNTS
        for at in (0, _SEEN - count)
    )


def load_encoder(path: Path, *, max_context: int, dtype: str, device: str) -> BertEncoder:
    """The encoder of a model directory; `1_Pooling/config.json` says how it pools, absent = mean. Raises ModelError for what
    is not supported, and where `max_context` is more than the model's positions."""
    shape = read_shape(read_config(path))
    if max_context > shape.positions:
        raise ModelError(f"max_context {max_context} is more than the {shape.positions} positions of this model")
    where = pick_device(device)
    if dtype != "auto" and (dtype not in _DTYPES or (dtype == "float16" and where.type == "cpu")):
        raise ModelError(f"dtype {dtype} is not possible for embeddings here (use auto, float32 or bfloat16)")
    kind = _DTYPES[dtype] if dtype != "auto" else torch.float32 if where.type == "cpu" else torch.bfloat16
    with torch.inference_mode():
        return BertEncoder(
            shape,
            Tensors(DirectoryWeights(path), kind, where),
            context=max_context,
            first_token=_pools_first(read_json(path / "1_Pooling" / "config.json")),
            dtype=kind,
            device=where,
        )


def read_shape(config: dict[str, Any]) -> Shape:
    """Raises ModelError for another family or a variant that is not implemented."""
    if config.get("model_type") != "bert":
        raise ModelError(f"model type {config.get('model_type')!r} makes no embeddings here (have: bert)")
    activation = config.get("hidden_act", "gelu")
    if activation not in _GELU:
        raise ModelError(f"activation {activation!r} is not supported (have: {', '.join(_GELU)})")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError("only absolute position embeddings are supported")
    try:
        shape = Shape(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            heads=int(config["num_attention_heads"]),
            positions=int(config["max_position_embeddings"]),
            vocab_size=int(config["vocab_size"]),
            norm_eps=float(config.get("layer_norm_eps", 1e-12)),
            gelu=_GELU[activation],
        )
    except KeyError as missing:
        raise ModelError(f"config.json lacks {missing}") from None
    if shape.heads < 1 or shape.hidden % shape.heads:
        raise ModelError(f"{shape.heads} heads do not divide {shape.hidden} channels")
    return shape


def _pools_first(config: dict[str, Any]) -> bool:
    """Sentence Transformers names the kind of pooling by flags."""
    named = sorted(name for name, value in config.items() if name.startswith("pooling_mode_") and value is True)
    if named in ([], ["pooling_mode_mean_tokens"]):
        return False
    if named == ["pooling_mode_cls_token"]:
        return True
    raise ModelError(f"pooling by {', '.join(named)} is not supported (have: mean, first token)")


def _layer(prefix: str, weights: Tensors, make: Maker, eps: float) -> Layer:
    def of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return weights(f"{prefix}{name}.weight"), weights(f"{prefix}{name}.bias")

    parts = [of(f"attention.self.{name}") for name in ("query", "key", "value")]
    qkv = make(Role.QKV, torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts]))
    return Layer(
        qkv=qkv,
        out=make(Role.OUT, *of("attention.output.dense")),
        attention_norm=weights.norm(f"{prefix}attention.output.LayerNorm", eps),
        up=make(Role.GATE_UP, *of("intermediate.dense")),
        down=make(Role.DOWN, *of("output.dense")),
        norm=weights.norm(f"{prefix}output.LayerNorm", eps),
    )
