"""YAML with line numbers, and without YAML's traps.

A file is composed into nodes and walked here, so that every value has the line it stands on and a key written twice is
a mistake. Scalars follow YAML 1.2: only `true` and `false` are booleans (`off` is a word), `1e-3` is a number, `010` is
ten, a date is text. Anchors, aliases and `<<` work; tags other than the plain ones do not. Nesting and the number of
values are bounded, so that a file of aliases of aliases cannot fill the memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rungway.errors import Mistake

Path_ = tuple[str | int, ...]
DEPTH_MAX = 40
VALUES_MAX = 200_000
FILE_BYTES_MAX = 4_000_000

_STR, _INT, _FLOAT, _BOOL, _NULL, _MERGE, _MAP, _SEQ = (
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "merge", "map", "seq")
)
_KEY_TEXT = re.compile(r"\brw_[a-z0-9-]*_[A-Za-z0-9_-]{4,}")
_NUMBER_START = list("-+.0123456789")


class _Loader(yaml.SafeLoader):
    """Composes only; its resolvers are replaced below."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


def _resolver(tag: str, pattern: str, first: list[str]) -> None:
    _Loader.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), first)


_resolver(_BOOL, "true|True|TRUE|false|False|FALSE", list("tTfF"))
_resolver(_INT, "[-+]?[0-9][0-9_]*", list("-+0123456789"))
_resolver(_FLOAT, r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?", _NUMBER_START)
_resolver(_FLOAT, r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", _NUMBER_START)
_resolver(_NULL, "~|null|Null|NULL|", ["~", "n", "N", ""])
_resolver(_MERGE, "<<", ["<"])


@dataclass(frozen=True)
class Document:
    """One file: plain data (dict, list, str, int, float, bool, None) and the line of every path in it."""

    file: str
    data: Any
    lines: dict[Path_, int]
    unread: frozenset[Path_] = frozenset()  # values that could not be read at all, and were complained about

    def line(self, path: Path_) -> int:
        """Line of `path`, or of the nearest thing that contains it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_document(path: Path, mistakes: list[Mistake]) -> Document | None:
    """Reads one file; what is wrong with it is appended to `mistakes`. None when there is nothing to go on with."""
    name = str(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        mistakes.append(Mistake(name, 1, "file", f"cannot be read: {error.strerror or error}"))
        return None
    if len(raw) > FILE_BYTES_MAX:
        mistakes.append(Mistake(name, 1, "file", f"is too big (at most {FILE_BYTES_MAX} bytes)"))
        return None
    return parse_document(name, raw, mistakes)


def parse_document(name: str, raw: bytes, mistakes: list[Mistake]) -> Document | None:
    """As `read_document`, from bytes."""
    try:
        node = yaml.compose(raw, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        mistakes.append(Mistake(name, line, "file", f"is not valid YAML: {redact(str(error.problem))}"))
        return None
    except (yaml.YAMLError, RecursionError) as error:
        mistakes.append(Mistake(name, 1, "file", f"is not valid YAML ({type(error).__name__})"))
        return None
    walk = _Walk(name, mistakes)
    data = walk.value(node, ()) if node is not None else None
    if not isinstance(data, dict):
        if not walk.found:
            mistakes.append(Mistake(name, 1, "file", "is empty or not a mapping (allowed: `name: value` lines)"))
        return None
    return Document(name, data, walk.lines, frozenset(walk.unread))


class _Walk:
    """Turns nodes into data, notes lines and collects mistakes."""

    def __init__(self, file: str, mistakes: list[Mistake]) -> None:
        self.file = file
        self.mistakes = mistakes
        self.lines: dict[Path_, int] = {}
        self.found = False
        self.unread: set[Path_] = set()
        self._values = 0
        self._full = False
        self._open: set[int] = set()  # nodes being walked, to see one inside itself

    def wrong(self, node: yaml.Node, path: Path_, message: str) -> None:
        self.found = True
        self.mistakes.append(Mistake(self.file, node.start_mark.line + 1, show_path(path), redact(message)))

    def unreadable(self, node: yaml.Node, path: Path_, message: str) -> None:
        self.wrong(node, path, message)
        self.unread.add(path)

    def value(self, node: yaml.Node, path: Path_) -> Any:
        self._values += 1
        self.lines[path] = self.lines.get(path) or node.start_mark.line + 1
        if self._values > VALUES_MAX or len(path) > DEPTH_MAX:
            if not self._full:
                self.wrong(node, path[:4], f"is too much (at most {VALUES_MAX} values, {DEPTH_MAX} levels)")
            self._full = True  # said once
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self.unreadable(node, path, "contains itself")
            return None
        if node.tag not in (_MAP, _SEQ):
            self.unreadable(node, path, f"has the tag {node.tag}, which is not allowed (write plain values)")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.ScalarNode, path: Path_) -> Any:
        text: str = node.value
        plain = text.replace("_", "")
        match node.tag:
            case tag if tag == _STR:
                return text
            case tag if tag == _NULL:
                return None
            case tag if tag == _BOOL:
                return text.lower() == "true"
            case tag if tag in (_INT, _FLOAT):
                try:
                    return (
                        int(plain)
                        if tag == _INT
                        else float(plain.lower().replace(".inf", "inf").replace(".nan", "nan"))
                    )
                except ValueError:  # thousands of digits, or a tag written by hand
                    return text
        self.unreadable(node, path, f"has the tag {node.tag}, which is not allowed (write plain values)")
        return None

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        base: dict[str, Any] = {}
        for source in reversed([child for key, child in node.value if key.tag == _MERGE]):
            for each in reversed(source.value) if isinstance(source, yaml.SequenceNode) else (source,):
                inherited = self.value(each, path)
                if isinstance(inherited, dict):
                    base.update(inherited)
                elif inherited is not None:
                    self.wrong(each, path, "merges something that is not a mapping with `<<`")
        own: dict[str, Any] = {}
        for key, child in node.value:
            if key.tag == _MERGE:
                continue
            if not isinstance(key, yaml.ScalarNode):
                self.wrong(key, path, "has a key that is not a plain word")
                continue
            here = (*path, key.value)
            if key.value in own:
                self.wrong(key, here, f"is written twice (first on line {self.lines[here]})")
                continue
            self.lines[here] = key.start_mark.line + 1
            own[key.value] = self.value(child, here)
        return {**base, **own}


def redact(text: str) -> str:
    """`text` without anything that looks like an API key: whoever writes a key into a file must not find it in a log."""
    return _KEY_TEXT.sub("rw_***", text)


def show_path(path: Path_) -> str:
    """`("tiers", "small", "versions", 0)` -> `tiers.small.versions[0]`; the whole file is `file`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return redact(text) or "file"
