"""docs/configuration.md, written from the schema: `python -m rungway.settings.reference > docs/configuration.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rungway.contracts import NUSD_PER_USD
from rungway.settings.rule import Rule
from rungway.settings.schema import LadderFile, PlatformFile
from rungway.settings.schema_tenant import KeysFile, TenantFile, Terms
from rungway.settings.validate import fields, inner_model, rule_of

_HEAD = """\
# Configuration

Generated from the schema by `python -m rungway.settings.reference`; do not edit by hand.

A platform file names everything else: tenant files, the ladder, the state folder. `rungway check-config` reads them all
and reports every mistake of every file together, with file, line, field and what is allowed; so do `rungway serve`, which
then does not start, and a reload, which then changes nothing. `GET /admin/config` and `rungway check-config --json` show
the effective values with every default filled in.

- **absent**: the plan's value, and where the plan has none, the default below.
- **`0`**: nothing is allowed. For prices: free.
- **`unlimited`**: no limit; it must be written out.
- **`null`** or an empty value is refused, wherever it stands, except where the table names it.
- Unknown keys, keys written twice, numbers that are not finite and amounts finer than a nano-dollar are refused.
- Only `true` and `false` are booleans; `off` is a word. Anchors, aliases and `<<` work.
- Relative paths start at the folder of the platform file.
"""

_PARTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("Platform file", "For example config/quickstart.yaml.", PlatformFile),
    (
        "Tenant files and plans",
        "One file per tenant in `tenants_dir`. A plan (`plans.<name>` in the platform file) may hold the fields marked "
        "*plan*; the tenant's value wins, mappings are merged key by key, lists are replaced. A tenant without `plan` has "
        "the plan `default`, which need not be declared.",
        TenantFile,
    ),
    ("Ladder file", "For example config/ladders/default.yaml.", LadderFile),
    (
        "Key files",
        "`state_dir/tenants/<tenant>.yaml`, written by `rungway keys`; merged into the tenant's keys. What is revoked in "
        "either file is revoked. Files of tenants that no longer exist have no effect.",
        KeysFile,
    ),
)


def render() -> str:
    """The whole page."""
    plan = {name for name, _ in fields(Terms)}
    parts = [_HEAD]
    for title, about, model in _PARTS:
        marked = plan if model is TenantFile else set()
        rows = list(_rows(model, "", marked))
        head = "| field | allowed | default | meaning |\n|---|---|---|---|\n"
        parts.append(f"\n## {title}\n\n{about}\n\n{head}" + "\n".join(rows) + "\n")
    return "".join(parts)


def _rows(model: type[BaseModel], prefix: str, plan: set[str], more: str = "") -> Iterator[str]:
    """One line per field; `plan` holds the names that a plan may say, too, `more` is added to each meaning."""
    for name, field in sorted(fields(model), key=lambda item: item[0] in plan):
        path, note = f"{prefix}{name}", "*plan*" if name in plan else more
        inner, suffix = _inside(field.annotation)
        if inner is Terms:
            yield _row(path, "a mapping of plans", "none", field, "Fields: see tenant files.")
        elif inner is not None:
            yield from _rows(inner, f"{path}{suffix}.", set(), note)
        else:
            rule = rule_of(field)
            assert rule is not None, f"{path} has no rule"
            yield _row(path, rule.allowed, _default(field, rule), field, note)


def _inside(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The model inside a field and how the path goes on: nothing, `[]` for a list, `.<name>` for a mapping of them."""
    kind = inner_model(annotation)
    suffix = ""
    if get_origin(kind) in (list, dict):
        suffix = "[]" if get_origin(kind) is list else ".<name>"
        kind = get_args(kind)[-1]
    return (kind, suffix) if isinstance(kind, type) and issubclass(kind, BaseModel) else (None, "")


def _row(path: str, allowed: str, default: str, field: FieldInfo, more: str) -> str:
    meaning = " ".join(part for part in (field.description or "", more) if part)
    return "| " + " | ".join(text.replace("|", "\\|") for text in (f"`{path}`", allowed, default, meaning)) + " |"


def _default(field: FieldInfo, rule: Rule) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        words = [word for word in ("unlimited", "all", "auto", "never") if f"`{word}`" in rule.allowed]
        return f"`{words[0]}`" if words else "none"
    if value in ("", (), {}):
        return "none"
    if rule.allowed.startswith("US dollars"):
        return f"`{value / NUSD_PER_USD:g}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    print(render(), end="")
