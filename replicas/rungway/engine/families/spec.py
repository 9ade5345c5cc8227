"""What the model code needs to know of a model, whatever its family calls it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rungway.engine.families.rope import Rope


class Activation(StrEnum):
    """Of the gate in a gated MLP, by the names in config.json."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class Score(StrEnum):
    """How a router's logits become weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class Window:
    """Sliding-window attention: a token sees itself and the `size - 1` tokens before it, in the layers where `layers` is
    true. Those layers may have a rotary embedding of their own."""

    size: int
    layers: tuple[bool, ...]
    rope: Rope


@dataclass(frozen=True)
class Routing:
    """Experts in the layers where `layers` is true: `chosen` of `experts` for each token.

    `intermediate`: width of one expert, `shared` of the expert that every token passes (0 = none), `shared_gate`: it has
    a sigmoid gate. `groups`: experts lie in so many equal groups and only the best `groups_chosen` are eligible; a group
    counts as the sum of its best `group_best`. `corrected`: a learned bias helps to choose, not to weigh. `renormalise`:
    the chosen weights are made to sum to one, then all are multiplied by `scale`.
    """

    layers: tuple[bool, ...]
    experts: int
    chosen: int
    intermediate: int
    score: Score = Score.SOFTMAX
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_chosen: int = 1
    group_best: int = 1
    corrected: bool = False
    shared: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): the cache holds `rank + rope` values per token and
    layer. `query_rank` None = queries are not compressed. `interleaved`: the weights have rotary pairs side by side.
    `scale`: of the scores, rotary scaling included."""

    query_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool
    scale: float


@dataclass(frozen=True)
class Architecture:
    """`norm_offset` is added to stored norm weights. `score_scale` None = head_dim ** -0.5. `sandwich`: norms also after
    attention and MLP. `logit_cap`: cap * tanh(logits / cap)."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    tied: bool
    rope: Rope
    weights_dtype: str  # as stored: bfloat16 | float16 | float32
    activation: Activation = Activation.SILU
    qk_norm: bool = False
    norm_offset: float = 0.0
    sandwich: bool = False
    embedding_scale: float = 1.0
    score_scale: float | None = None
    logit_cap: float | None = None
    window: Window | None = None
    routing: Routing | None = None
    latent: Latent | None = None

    @property
    def cache_values(self) -> int:
        """Numbers that the cache holds per token, over all layers."""
        if self.latent is not None:
            return self.layers * (self.latent.rank + self.latent.rope)
        return 2 * self.layers * self.kv_heads * self.head_dim
