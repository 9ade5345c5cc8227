"""Runs a document through its model and turns what pydantic found into mistakes with file, line and what is allowed."""

from __future__ import annotations

from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rungway.errors import Mistake
from rungway.settings.rule import NULL_TEXT, Names, Rule, close, show
from rungway.settings.section import Section
from rungway.settings.yaml_lines import Document, Path_, redact, show_path

S = TypeVar("S", bound=Section)


def validate(
    model: type[S], document: Document, names: Names, mistakes: list[Mistake], *, prefix: Path_ = (), data: Any = None
) -> S | None:
    """The document (or `data` in its place, with the document's lines) as `model`; None after adding its mistakes.
    `prefix` is put before the paths that are shown."""
    try:
        return model.model_validate(document.data if data is None else data, context=names)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            path, message = _explain(model, detail)
            if path in document.unread:
                continue
            mistakes.append(mistake(document, path, message, prefix))
        return None


def mistake(document: Document, path: Path_, message: str, prefix: Path_ = ()) -> Mistake:
    """A mistake on the line of `path`. Anything that looks like a key is cut out of the words."""
    return Mistake(document.file, document.line(path), show_path((*prefix, *path)), redact(message))


def _explain(model: type[BaseModel], detail: ErrorDetails) -> tuple[Path_, str]:
    path: Path_ = tuple(part for part in detail["loc"] if part != "[key]")
    context = detail.get("ctx") or {}
    match detail["type"]:
        case "rungway":
            at = context.get("at")
            return (*path, at) if at else path, str(context["text"]) + (
                f" (allowed: {context['allowed']})" if "allowed" in context else ""
            )
        case "extra_forbidden":
            keys = _keys(_at(model, path[:-1]))
            if path[-1] in ("key", "secret", "token") and "sha256" in keys:
                return path, "a key's text never stands in a file: write its `sha256` (from `rungway keys hash`)"
            return path, f"unknown key{close(str(path[-1]), keys)} (allowed: {', '.join(keys)})"
        case "missing":
            return path, f"is required{_allowed(_at(model, path))}"
        case "too_short":
            return path, "must not be empty"
    if detail["input"] is None:
        return path, f"{NULL_TEXT}{_allowed(_at(model, path))}"
    kind = "a list" if detail["type"] == "list_type" else "a mapping"
    return path, f"{show(detail['input'])} is not allowed (allowed: {kind})"


def _at(model: Any, path: Path_) -> Any:
    """The field (FieldInfo), model or annotation that `path` names inside `model`."""
    here: Any = model
    for part in path:
        here = inner_model(here.annotation if isinstance(here, FieldInfo) else here)
        if isinstance(here, type) and issubclass(here, BaseModel):
            here = next((field for name, field in fields(here) if name == part), None)
        elif get_origin(here) in (dict, list):
            here = get_args(here)[-1]
        if here is None:
            return None
    return here


def fields(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """YAML key and field, in order."""
    return [(field.alias or name, field) for name, field in model.model_fields.items()]


def inner_model(annotation: Any) -> Any:
    """`Fake | None` -> `Fake`; everything else as it is."""
    options = [option for option in get_args(annotation) if option is not type(None)]
    if get_origin(annotation) not in (dict, list) and len(options) == 1:
        return options[0]
    return annotation


def rule_of(field: Any) -> Rule | None:
    """The rule on a field or on an `Annotated` type."""
    metadata = field.metadata if isinstance(field, FieldInfo) else getattr(field, "__metadata__", ())
    return next((item for item in metadata if isinstance(item, Rule)), None)


def _keys(where: Any) -> tuple[str, ...]:
    where = inner_model(where.annotation if isinstance(where, FieldInfo) else where)
    if isinstance(where, type) and issubclass(where, BaseModel):
        return tuple(name for name, _ in fields(where))
    return ()


def _allowed(where: Any) -> str:
    rule = rule_of(where)
    if rule:
        return f" (allowed: {rule.allowed})"
    keys = _keys(where)
    return f" (allowed: a mapping of {', '.join(keys)})" if keys else ""
