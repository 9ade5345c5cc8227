"""Text <-> token ids, light enough for the gateway: no torch, no transformers.

Only tokenizers are accepted whose tokens are fixed byte strings (spelling.py). What `encode` does with special tokens: literals such as `<|im_end|>` become the control token,
unless they were shielded by `render_chat` (see chat.py). A raw completions prompt is the caller's own in full, so its
literals count, as in other servers; a chat message's never do. Added tokens that the model does not call special
(`<tool_call>`) are ordinary text with an id of their own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from rungway.engine.chat import GUARD, ChatTemplate, shield_all
from rungway.engine.errors import ModelError, PromptError
from rungway.engine.spelling import begins_each_piece, continued, spelling_of
from rungway.engine.tools_text import without_tools


class Tokenizer(Protocol):
    """What gateway and replica need of a tokenizer. `render_chat` raises PromptError. Messages and `tools` are OpenAI's,
    but for `arguments` of calls: objects, not text."""

    vocab_size: int
    eos_ids: frozenset[int]

    def encode(self, text: str) -> list[int]: ...

    def count(self, text: str) -> int: ...

    def render_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str: ...


class Vocabulary(Protocol):
    """What the engine needs beyond ids: the bytes that each token adds to the text (special tokens: none)."""

    vocab_size: int
    eos_ids: frozenset[int]

    def token_bytes(self, token: int) -> bytes: ...

    def token_name(self, token: int) -> bytes: ...


def load_tokenizer(backend: str, path: Path | None) -> Tokenizer:
    """The tokenizer for a backend: words for `fake`, else the model directory's own. Raises ModelError."""
    if backend == "fake":
        return WordTokenizer()
    if path is None:
        raise ModelError(f"backend {backend!r} needs a model directory for its tokenizer")
    return HfTokenizer(path)


class WordTokenizer:
    """For the fake engine: one token per whitespace-separated word, at least one; ids carry no meaning."""

    vocab_size = 1 << 16
    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(range(self.count(text)))

    def count(self, text: str) -> int:
        return max(1, len(text.split()))

    def render_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        listed = without_tools(messages, tools or [])
        return "".join(f"{message['role']}: {message['content']}\n" for message in listed)


class HfTokenizer:
    """A model directory's tokenizer.json. Safe to share between threads."""

    def __init__(self, path: Path) -> None:
        self._config = read_json(path / "tokenizer_config.json")
        file = path / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}") from error
        self._backend = backend_of(text, file)
        description = json.loads(text)
        self._spelling = spelling_of(self._backend, description)
        later = continued(description)
        self._later = self._backend if later is None else backend_of(json.dumps(later), file)
        self._each_begins = begins_each_piece(description)
        model_config = read_json(path / "config.json")
        self.vocab_size = int(model_config.get("vocab_size", self._backend.get_vocab_size()))
        self.eos_ids = frozenset(token for token in _eos_ids(path, model_config) if 0 <= token < self.vocab_size)
        self._specials = {
            token.content: index for index, token in self._backend.get_added_tokens_decoder().items() if token.special
        }
        self._added = {index: token.content for index, token in self._backend.get_added_tokens_decoder().items()}
        self._literals = sorted(self._specials, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._literals))) if self._literals else None
        self._prefix = self._backend.encode("", add_special_tokens=True).ids
        for backend in (self._backend, self._later):
            backend.encode_special_tokens = True  # from here on, plain runs only
        self._template = self._load_template(path)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the model's own beginning token where it has one (never twice)."""
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            ids += self._plain(text[start : match.start()], begins=start == 0 or self._each_begins)
            ids.append(self._specials[match[0]])
            start = match.end()
        ids += self._plain(text[start:], begins=start == 0 or self._each_begins)
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def render_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt for `messages`; for `encode` only, as it may hold GUARD characters. A template that knows no tools
        gets them as text (tools_text.py). Raises PromptError."""
        if self._template is None:
            raise PromptError("this model has no chat template; use the completions endpoint")
        if not self._template.takes_tools and (tools or any(_of_tools(message) for message in messages)):
            messages, tools = without_tools(messages, tools or []), None
        shielded = [shield_all(message, self._pattern, self._literals) for message in messages]
        listed = [shield_all(tool, self._pattern, self._literals) for tool in tools] if tools else None
        return self._template.render(shielded, listed)

    def token_bytes(self, token: int) -> bytes:
        """What `token` adds to the text; nothing for special tokens and for ids that the vocabulary leaves unused."""
        added = self._added.get(token)
        if added is not None:
            return b"" if added in self._specials else self._spelling.added(added)
        return self.token_name(token)

    def token_name(self, token: int) -> bytes:
        """Bytes that stand for `token` in a list of alternatives: special tokens show their literal."""
        added = self._added.get(token)
        if added is not None:
            return added.encode()
        text = self._backend.id_to_token(token)
        return b"" if text is None else self._spelling.token(text)

    def difference(self, other: HfTokenizer) -> str | None:
        """A token that means something else in `other`, in words; None where all ids mean the same."""
        mine, theirs = (tokenizer._backend.get_vocab(with_added_tokens=True) for tokenizer in (self, other))
        if mine == theirs:
            return None
        token = min(token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token))
        ids = (str(vocabulary.get(token, "nothing")) for vocabulary in (mine, theirs))
        return f"token {token!r} is {' and '.join(ids)}"

    def spell(self, text: str) -> list[int]:
        """Token ids of text as the model would write it; special-token literals in it are spelled out."""
        return self._plain(text, begins=False)

    def _plain(self, text: str, *, begins: bool) -> list[int]:
        """`begins`: whether a tokenizer that puts a space before its input does so here."""
        if not text:
            return []
        backend = self._backend if begins else self._later
        return list(backend.encode(text.replace(GUARD, ""), add_special_tokens=False).ids)

    def _load_template(self, path: Path) -> ChatTemplate | None:
        file = path / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else self._config.get("chat_template")
        if isinstance(source, list):  # named templates: [{"name": "default", "template": ...}]
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        if not source:
            return None
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        values = {name: self._config[name] for name in names if self._config.get(name)}
        variables = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}
        return ChatTemplate(source, variables)


def _of_tools(message: dict[str, Any]) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def backend_of(text: str, path: Path) -> Backend:
    """The tokenizer described by `text`, which comes from `path`; it neither cuts nor pads. Raises ModelError."""
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the tokenizers library raises nothing more precise
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no such file. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _eos_ids(path: Path, config: dict[str, Any]) -> list[int]:
    """As the model's files name them, which may be more than it can say. Raises ModelError."""
    value = read_json(path / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    given = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in given):
        raise ModelError(f"eos_token_id of {path.name} is {value!r}, not a number or a list of numbers")
    return given
