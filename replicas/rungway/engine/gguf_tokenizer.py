"""Builds `tokenizer.json` and `tokenizer_config.json` from the vocabulary in a GGUF file (byte-level BPE only).

The splitting rule before BPE is not in the file, only its name (`tokenizer.ggml.pre`); `_PRE` holds the two that our
packaged models use, as their authors' own tokenizer.json files define them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from rungway.engine.errors import ModelError

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types of the GGUF specification

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _smollm(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE: dict[str, Callable[[Tokenizer], None]] = {"smollm": _smollm, "qwen2": _qwen2}

_PROBE = "Hello  world, it's 2024!\n\n\tdéjà vu 北京 🙂👩‍👩‍👧 def f(x):\r\n    return x**2  "


def write_tokenizer(fields: dict[str, Any], out: Path) -> list[int]:
    """Writes both files into `out` and returns the end-of-sequence ids. Raises ModelError for another kind of
    tokenizer, or when the result does not give back a probe text."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE:
        raise ModelError(f"GGUF tokenizer {kind!r} with rule {pre!r} is not supported (have: {', '.join(_PRE)})")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the tokenizers library raises nothing more precise
        raise ModelError(f"the GGUF file's tokenizer is broken: {error}") from error
    _PRE[pre](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    for index, kind_of in enumerate(types):
        if kind_of in (CONTROL, USER_DEFINED):
            special = kind_of == CONTROL
            tokenizer.add_tokens([AddedToken(tokens[index], special=special, normalized=False)])
    if tokenizer.decode(tokenizer.encode(_PROBE).ids) != _PROBE:
        raise ModelError("the tokenizer built from the GGUF file does not give back a probe text")
    tokenizer.save(str(out / "tokenizer.json"))
    _write_config(fields, tokens, out)
    eos = [int(fields["tokenizer.ggml.eos_token_id"])]
    end_of_text = vocab.get("<|endoftext|>")
    return eos if end_of_text is None or end_of_text in eos else [*eos, end_of_text]


def _write_config(fields: dict[str, Any], tokens: list[str], out: Path) -> None:
    def text(name: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[int(index)]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "bos_token": text("bos"),
        "eos_token": text("eos"),
        "pad_token": text("padding"),
        "unk_token": text("unknown"),
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    kept = {name: value for name, value in config.items() if value is not None}
    (out / "tokenizer_config.json").write_text(json.dumps(kept, indent=2, ensure_ascii=False), encoding="utf-8")
