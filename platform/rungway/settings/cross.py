"""Checks between files and between entries. They look at the raw data, so that they find their mistakes even where
a field elsewhere in the same file is broken."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rungway.contracts import Tenant, TierKind
from rungway.errors import Mistake
from rungway.settings.build import alias_target
from rungway.settings.validate import mistake
from rungway.settings.yaml_lines import Document, Path_

ADMIN_TENANT = "platform"


def reading_order(first: str) -> Callable[[Mistake], tuple[bool, str, int, str]]:
    """Sort key: the platform file first, then by file and line."""
    return lambda entry: (entry.file != first, entry.file, entry.line, entry.path)


def check_aliases(platform: Document, mistakes: list[Mistake]) -> None:
    """No model has the name of a tier; no aliases in a circle."""
    models, tiers = platform.data.get("models"), platform.data.get("tiers")
    if not isinstance(models, dict):
        return
    aliases = {
        name: model["alias"]
        for name, model in models.items()
        if isinstance(model, dict) and isinstance(model.get("alias"), str)
    }
    for name in models:
        if isinstance(tiers, dict) and name in tiers:
            mistakes.append(mistake(platform, ("models", name), "is the name of a tier, which is a model already"))
        elif alias_target(aliases, name) is None:
            mistakes.append(mistake(platform, ("models", name, "alias"), "leads back to itself (allowed: no circle)"))


def check_ranks(platform: Document, mistakes: list[Mistake]) -> None:
    """`rank` stands in every tier for text or in none, each time another number."""
    tiers = platform.data.get("tiers")
    if not isinstance(tiers, dict):
        return
    ranks = {name: tier.get("rank") for name, tier in tiers.items() if isinstance(tier, dict) and not _embeds(tier)}
    declared = [rank for rank in ranks.values() if rank is not None]
    for name, rank in ranks.items():
        if declared and (rank is None or declared.count(rank) > 1):
            mistakes.append(
                mistake(platform, ("tiers", name, "rank"), "must be in every tier or in none, each time another number")
            )


def check_kinds(platform: Document, mistakes: list[Mistake]) -> None:
    """A model has tiers for text, or one tier for embeddings."""
    models, tiers = platform.data.get("models"), platform.data.get("tiers")
    if not isinstance(models, dict) or not isinstance(tiers, dict):
        return
    embedding = _embedding_tiers(platform)
    for name, model in models.items():
        listed = _list(model.get("tiers")) if isinstance(model, dict) else []
        if len(listed) > 1 and embedding.intersection(entry for entry in listed if isinstance(entry, str)):
            message = "an embedding tier stands alone in a model: its vectors cannot be compared with others"
            mistakes.append(mistake(platform, ("models", name, "tiers"), message))


def _embedding_tiers(platform: Document) -> set[str]:
    tiers = platform.data.get("tiers")
    return {name for name, tier in tiers.items() if _embeds(tier)} if isinstance(tiers, dict) else set()


def _embeds(tier: object) -> bool:
    return isinstance(tier, dict) and tier.get("kind") == TierKind.EMBEDDING


def check_tenant_names(tenants: Sequence[Document], mistakes: list[Mistake]) -> None:
    """One file per tenant."""
    first: dict[str, str] = {}
    for document in tenants:
        name = document.data.get("tenant")
        if not isinstance(name, str):
            continue
        if name in first:
            message = f"tenant `{name}` is declared twice (first in {first[name]})"
            mistakes.append(mistake(document, ("tenant",), message, ("tenants", name)))
        first.setdefault(name, document.file)


def check_keys(tenants: Sequence[Document], overlays: Sequence[Document], mistakes: list[Mistake]) -> None:
    """Key ids and hashes are unique over all tenants; an overlay may only repeat those of its own tenant. The scope
    admin is for the tenant `platform`."""
    declared = {document.data.get("tenant") for document in tenants if isinstance(document.data.get("tenant"), str)}
    owners: dict[tuple[str, str], tuple[str, bool, str]] = {}  # (field, value) -> tenant, in overlay, where
    for document in (*tenants, *overlays):
        tenant, overlay = document.data.get("tenant"), document in overlays
        if not isinstance(tenant, str) or (overlay and tenant not in declared):
            continue
        prefix: Path_ = () if overlay else ("tenants", tenant)
        for index, entry in _entries(document):
            if "admin" in _list(entry.get("scopes")) and tenant != ADMIN_TENANT:
                message = f"the scope admin is only for the tenant `{ADMIN_TENANT}`, not for `{tenant}`"
                mistakes.append(mistake(document, ("keys", index, "scopes"), message, prefix))
            for field in ("id", "sha256"):
                value = entry.get(field)
                if not isinstance(value, str) or not value:
                    continue
                value = value.lower() if field == "sha256" else value
                where = f"{os.path.basename(document.file)} line {document.line(('keys', index, field))}"
                before = owners.setdefault((field, value), (tenant, overlay, where))
                repeats = overlay and not before[1] and before[0] == tenant
                if before[2] != where and not repeats:
                    message = f"the same {field} is used twice (first in {before[2]}, tenant `{before[0]}`)"
                    mistakes.append(mistake(document, ("keys", index, field), message, prefix))


def _entries(document: Document) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, entry in enumerate(_list(document.data.get("keys"))):
        if isinstance(entry, dict):
            yield index, entry


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def check_reserved(documents: Sequence[Document], tenants: Sequence[Tenant], mistakes: list[Mistake]) -> None:
    """The reserved shares of all tenants are at most the whole."""
    total = sum(tenant.isolation.reserved_share for tenant in tenants)
    if total <= 1 + 1e-9:
        return
    shares = " + ".join(f"{t.name} {t.isolation.reserved_share:g}" for t in tenants if t.isolation.reserved_share)
    biggest = max(tenants, key=lambda tenant: tenant.isolation.reserved_share)
    document = next(document for document in documents if document.data.get("tenant") == biggest.name)
    message = f"all reserved shares together are more than 1: {shares} = {total:g}"
    mistakes.append(mistake(document, ("isolation", "reserved_share"), message, ("tenants", biggest.name)))


def check_risk(
    platform: Document, documents: Sequence[Document], tenants: Sequence[Tenant], mistakes: list[Mistake]
) -> None:
    """The least tier for high risk answers with text: any other would turn all of it away."""
    embedding = _embedding_tiers(platform)
    for tenant in tenants:
        if tenant.risk_high_tier_min in embedding:
            document = next(document for document in documents if document.data.get("tenant") == tenant.name)
            message = f"`{tenant.risk_high_tier_min}` answers with embeddings (allowed: a tier of kind text)"
            mistakes.append(mistake(document, ("risk", "high", "tier_min"), message, ("tenants", tenant.name)))
