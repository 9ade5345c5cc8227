"""Is a model in fewer bits still the same model? Both read one text; what they expect next must agree."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rungway.engine.errors import ModelError
from rungway.engine.model import Batch, Decoder
from rungway.engine.ops import Span
from rungway.engine.tokenizer import Vocabulary

_BLOCK = 16
TOKENS_MAX = 96
AGREEMENT_MIN = 0.95  # share of the decided positions with the same most likely token
DECIDED_NATS = 0.7  # the first token is about twice as likely as the second; nearer ones are a coin toss in any numbers
DIVERGENCE_MAX = 0.03  # mean Kullback-Leibler divergence in nats
TEXT = (
    "The river rises in the hills above the town, where snow melts late in spring. Its water turned three mills until "
    "1871; today one of them is a museum, and 24,000 people visit it every year.\n\n"
    "def area(width: float, height: float) -> float:\n    return width * height\n\n"
    "Question: Why is the sky blue?\nAnswer: Air scatters short waves of light more than long ones."
)


class Likeness(NamedTuple):
    agreement: float
    divergence: float

    @property
    def good(self) -> bool:
        return self.agreement >= AGREEMENT_MIN and self.divergence <= DIVERGENCE_MAX


def probe_ids(vocabulary: Vocabulary, context: int) -> list[int]:
    """A text that the model can read: prose, code and an answer; arbitrary tokens where the vocabulary cannot encode."""
    encode = getattr(vocabulary, "encode", None)
    count = min(TOKENS_MAX, context)
    ids = encode(TEXT) if encode is not None else [(7 * at + 3) % vocabulary.vocab_size for at in range(count)]
    return list(ids[:count])


@torch.inference_mode()
def check_works(model: Decoder) -> None:
    """One pass over the first and the last token: a checkpoint that does not fit its configuration, or holds no numbers, fails
    here and not with each request. Raises ModelError."""
    try:
        said = read_through(model, [0, model.arch.vocab_size - 1][: model.arch.context])
    except (RuntimeError, IndexError) as error:
        raise ModelError(f"the model cannot be computed with these weights: {error}") from error
    if torch.isnan(said).any():
        raise ModelError("the model computes no numbers with these weights")


def read_through(model: Decoder, ids: list[int]) -> torch.Tensor:
    """Log-probabilities at every position, [tokens, vocabulary], in float32."""
    count = len(ids)
    width = -(-count // _BLOCK)
    where = model.device
    mask = torch.full((count, width * _BLOCK), float("-inf"), dtype=model.dtype, device=where).triu_(1)
    positions = torch.arange(count, device=where)
    blocks, lengths = torch.arange(1, width + 1, device=where)[None], torch.tensor([count], device=where)
    starts = torch.tensor([0, count], device=where)
    span = Span(0, count, blocks, lengths, mask[None, None], chunk=True, starts=starts, most=count)
    batch = Batch(
        ids=torch.tensor(ids, device=where),
        positions=positions,
        slots=positions + _BLOCK,
        outputs=positions,
        spans=[span],
    )
    return torch.log_softmax(model.forward(batch, model.cache(width + 1, _BLOCK)).float(), -1)


def likeness(reference: torch.Tensor, other: torch.Tensor) -> Likeness:
    """Of two results of `read_through`."""
    best = torch.topk(reference, 2, -1)
    decided = best.values[:, 0] - best.values[:, 1] >= DECIDED_NATS
    same = (best.indices[:, 0] == other.argmax(-1))[decided]
    agreement = float(same.float().mean()) if len(same) else 1.0
    divergence = (reference.exp() * (reference - other)).sum(-1).mean()
    return Likeness(agreement, float(divergence))
