"""`load_platform`: platform file + ladder file + tenant files + key files -> one frozen `Platform`, or every mistake."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rungway import contracts
from rungway.errors import ConfigError, Mistake
from rungway.settings.build import allowed_models, build_key, build_platform, build_tenant
from rungway.settings.cross import (
    check_aliases,
    check_keys,
    check_kinds,
    check_ranks,
    check_reserved,
    check_risk,
    check_tenant_names,
    reading_order,
)
from rungway.settings.rule import Names
from rungway.settings.schema import RUNGS, LadderFile, PlatformFile
from rungway.settings.schema_tenant import KeysFile, TenantFile
from rungway.settings.validate import mistake, validate
from rungway.settings.yaml_lines import Document, read_document

_TENANT_ONLY = ("tenant", "plan", "keys", "suspended", "template")


@dataclass(frozen=True)
class _Files:
    """All that was read, before anything is judged."""

    platform: Document
    ladder: Document | None
    tenants: tuple[Document, ...]
    keys: tuple[Document, ...]


def load_platform(
    path: Path, *, state_dir: Path | None = None, port: int | None = None, host: str | None = None
) -> contracts.Platform:
    """Reads the platform file at `path` and all it names. `state_dir`, `port` and `host` override what it says.

    Raises ConfigError with all mistakes of all files together, in the order of files and lines.
    """
    mistakes: list[Mistake] = []
    files = _read(path, state_dir, mistakes)
    if files is None:
        raise ConfigError(mistakes)
    if port is not None or host is not None:
        _override(files.platform.data, {"port": port, "host": host})
    names = _names(files)
    shape = validate(PlatformFile, files.platform, names, mistakes)
    check_aliases(files.platform, mistakes)
    check_ranks(files.platform, mistakes)
    check_kinds(files.platform, mistakes)
    ladder = validate(LadderFile, files.ladder, names, mistakes) if files.ladder else LadderFile()
    check_tenant_names(files.tenants, mistakes)
    check_keys(files.tenants, files.keys, mistakes)
    overlays = _overlays(files, names, mistakes)
    tenants = []
    for document in files.tenants:
        terms = _merged(files.platform, document, names, mistakes)
        if terms and shape and ladder:
            keys = tuple((overlays.get(terms.tenant) or {}).values())
            own = tuple(build_key(entry) for entry in terms.keys)
            models = allowed_models(shape, terms.models)
            tenants.append(build_tenant(terms, _merge_keys(own, keys), models, ladder))
    check_reserved(files.tenants, tenants, mistakes)
    check_risk(files.platform, files.tenants, tenants, mistakes)
    if mistakes or shape is None or ladder is None:
        raise ConfigError(sorted(set(mistakes), key=reading_order(files.platform.file)))
    return build_platform(shape, ladder, tuple(tenants), path.resolve().parent, state_dir=state_dir)


def _read(path: Path, state_dir: Path | None, mistakes: list[Mistake]) -> _Files | None:
    platform = read_document(path, mistakes)
    if platform is None:
        return None
    ladder = None
    if isinstance(name := platform.data.get("ladder"), str) and name:
        ladder = read_document(_beside(path, name), mistakes)
    folder = _beside(path, _folder(platform, "tenants_dir", "tenants"))
    if not folder.is_dir():
        mistakes.append(mistake(platform, ("tenants_dir",), f"there is no folder {folder}"))
    state = state_dir or _beside(path, _folder(platform, "state_dir", ".rungway"))
    return _Files(platform, ladder, _read_all(folder, mistakes), _read_all(state / "tenants", mistakes))


def _folder(platform: Document, name: str, default: str) -> str:
    value = platform.data.get(name, default)
    return value if isinstance(value, str) and value else default


def _beside(path: Path, name: str) -> Path:
    """`name` relative to the folder of `path`, in its shortest spelling."""
    return Path(os.path.normpath(path.parent / Path(name).expanduser()))


def _read_all(folder: Path, mistakes: list[Mistake]) -> tuple[Document, ...]:
    paths = sorted(path for path in folder.glob("*") if path.suffix in (".yaml", ".yml") and path.name[0] != ".")
    documents = [read_document(path, mistakes) for path in paths]
    return tuple(document for document in documents if document)


def _override(data: dict[str, Any], values: dict[str, Any]) -> None:
    """Puts the caller's port and host in place of the file's, so that they pass the same checks."""
    listen = data.get("listen", {})
    if isinstance(listen, dict):
        data["listen"] = listen | {name: value for name, value in values.items() if value is not None}


def _names(files: _Files) -> Names:
    """The names that fields may refer to, taken from the raw data so that one broken field hides nothing else."""

    def keys(name: str) -> tuple[str, ...] | None:
        section = files.platform.data.get(name, {})
        return tuple(section) if isinstance(section, dict) else None

    tiers, models, plans = keys("tiers"), keys("models"), keys("plans")
    rungs: tuple[str, ...] | None = RUNGS
    if files.ladder is not None:
        raw = files.ladder.data.get("rungs")
        rungs = (
            tuple(str(rung.get("name")) for rung in raw if isinstance(rung, dict)) if isinstance(raw, list) else None
        )
    elif files.platform.data.get("ladder"):
        rungs = None
    return Names(
        tiers=tiers,
        models=None if tiers is None or models is None else (*tiers, *models),
        rungs=rungs,
        plans=None if plans is None else tuple(dict.fromkeys((*plans, "default"))),
        tenants=tuple(str(document.data.get("tenant")) for document in files.tenants),
    )


def _merged(platform: Document, document: Document, names: Names, mistakes: list[Mistake]) -> TenantFile | None:
    """The tenant with its plan underneath and the built-in defaults under that."""
    prefix = ("tenants", str(document.data.get("tenant", "?")))
    own = validate(TenantFile, document, names, mistakes, prefix=prefix)
    plans = platform.data.get("plans", {})
    plan = plans.get(own.plan, {}) if own and isinstance(plans, dict) else None
    if own is None or not isinstance(plan, dict) or any(name in plan for name in _TENANT_ONLY):
        return None  # said already, here or by the platform file
    found: list[Mistake] = []
    terms = validate(TenantFile, document, names, found, prefix=prefix, data=deep_merge(plan, document.data))
    plan_path = f"plans.{own.plan}"
    if found and not any(entry.path.startswith(plan_path) for entry in mistakes):
        mistakes.extend(found)  # right each by itself, wrong together
    return terms


def deep_merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Mappings are merged key by key; everything else in `over` replaces what is `under`."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = deep_merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _overlays(files: _Files, names: Names, mistakes: list[Mistake]) -> dict[str, dict[str, contracts.ApiKey]]:
    """Keys by tenant and id from the state folder. Files of tenants that are gone have no effect."""
    found: dict[str, dict[str, contracts.ApiKey]] = {}
    for document in files.keys:
        overlay = validate(KeysFile, document, names, mistakes)
        if overlay is not None:
            found.setdefault(overlay.tenant, {}).update({entry.id: build_key(entry) for entry in overlay.keys})
    return found


def _merge_keys(own: tuple[contracts.ApiKey, ...], over: tuple[contracts.ApiKey, ...]) -> tuple[contracts.ApiKey, ...]:
    """An overlay entry replaces the one with its id; what either side revoked stays revoked."""
    merged = {key.id: key for key in own}
    for key in over:
        before = merged.get(key.id)
        revoked = key.revoked or (before is not None and before.revoked)
        merged[key.id] = contracts.ApiKey(
            id=key.id, sha256=key.sha256, expires_ns=key.expires_ns, scopes=key.scopes, revoked=revoked
        )
    return tuple(merged.values())
