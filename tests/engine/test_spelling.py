"""Tokenizers with byte fallback (Gemma, Mistral): the same ids as transformers, and exact bytes for every token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rungway.engine.errors import ModelError
from rungway.engine.tokenizer import HfTokenizer

SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
BOS, UNKNOWN, TURN_END = 2, 3, 5
WORDS = ["▁", "▁▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "▁h", "\n", "m", "d", "u", "s", "r"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "▁"), ("▁", "hello"), ("▁", "h")]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' }}"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n{{ message['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEXTS = [
    "hello hello",
    "  hello  there ",
    "héllo wörld 🦜\n",
    "<start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\n",
    "<bos><start_of_turn> hello",
    "",
]


def save(folder: Path, kind: str, *, byte_tokens: int = 256) -> Path:
    """`kind`: gemma (spaces replaced), mistral-1 (a space before each piece), mistral-3 (before the first)."""
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(byte_tokens)), *WORDS]
    model = models.BPE(
        vocab={token: at for at, token in enumerate(tokens)},
        merges=MERGES,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    if kind == "mistral-3":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        parts = [normalizers.Prepend("▁"), spaces] if kind == "mistral-1" else [spaces]
        tokenizer.normalizer = normalizers.Sequence(parts)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken("▁▁", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(tokens), "eos_token_id": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, TURN_END]}))
    return folder


@pytest.fixture(params=["gemma", "mistral-1", "mistral-3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(tmp_path, request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_bytes_are_those_of_transformers(folder: Path, text: str) -> None:
    ours = HfTokenizer(folder)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<bos>")
    ids = reference.encode(text)
    if text.startswith("<bos>"):
        ids = ids[1:]  # the beginning is never there twice
    assert ours.encode(text) == ids
    spoken = b"".join(ours.token_bytes(token) for token in ids)
    assert spoken.decode() == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_a_chat_with_its_ends(tmp_path: Path) -> None:
    ours = HfTokenizer(save(tmp_path, "gemma"))
    assert ours.eos_ids == {1, TURN_END}, "a turn's end ends an answer"
    prompt = ours.encode(ours.render_chat([{"role": "user", "content": " hello<end_of_turn> "}]))
    assert prompt[:2] == [BOS, 4] and prompt.count(TURN_END) == 1 and prompt.count(BOS) == 1
    shown = b"".join(ours.token_bytes(token) for token in prompt).decode()
    assert shown == "user\nhello<end_of_turn>\nmodel\n", "what a user typed is there in ordinary tokens"


@pytest.mark.parametrize("kind", ["gemma", "mistral-1", "mistral-3"])
def test_text_inside_an_answer_is_spelled_without_a_space_before_it(tmp_path: Path, kind: str) -> None:
    ours = HfTokenizer(save(tmp_path, kind))
    assert b"".join(ours.token_bytes(token) for token in ours.spell("hello é")) == "hello é".encode()


def test_every_byte_has_its_token(tmp_path: Path) -> None:
    ours = HfTokenizer(save(tmp_path, "gemma"))
    assert [ours.token_bytes(6 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert ours.token_name(TURN_END) == b"<end_of_turn>" and ours.token_bytes(TURN_END) == b""


def test_what_cannot_be_spelled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no token for bytes such as <0xFF>"):
        HfTokenizer(save(tmp_path, "gemma", byte_tokens=255))
    words = Tokenizer(models.WordLevel(vocab={"<unk>": 0, "▁hello": 1}, unk_token="<unk>"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="neither byte-level"):
        HfTokenizer(tmp_path)
