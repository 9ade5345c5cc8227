"""The shape of the platform file and of the ladder file: every key, what it allows, its default and its meaning.

One model per mapping; field names are the YAML keys. docs/configuration.md is generated from these models and those of
`schema_tenant.py`, `schema_tiers.py` and `schema_processes.py`. Values come out as contracts hold them (money in
nano-dollars, `unlimited` as None); `build.py` puts them together.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rungway import contracts
from rungway.settings import rules
from rungway.settings.rules import Count, NotNegative
from rungway.settings.schema_processes import Channel, Controller, Gateway
from rungway.settings.schema_tenant import Terms
from rungway.settings.schema_tiers import Tier
from rungway.settings.section import Section, refuse

RUNGS = ("full", "rerank_off", "best_of_1", "context_trim", "small_tier", "cached_answer", "template", "defer")
_LADDER = contracts.LadderSpec(rungs=())


class Rung(Section):
    name: Annotated[str, rules.one_of(*RUNGS)] = Field(description="The rung.")
    enter: NotNegative = Field(default=0.0, description="Pressure at which this rung applies on the way up.")


def _default_rungs() -> list[Rung]:
    enter = (0.0, 0.9, 0.95, 1.0, 1.1, 2.0, 4.0, 8.0)
    return [Rung(name=name, enter=at) for name, at in zip(RUNGS, enter, strict=True)]


class LadderFile(Section):
    """ladders/NAME.yaml"""

    rungs: list[Rung] = Field(default_factory=_default_rungs, description="Rungs in order; the first is `full`.")
    leave: NotNegative = Field(default=_LADDER.leave, description="Pressure below which the ladder goes down one rung.")
    dwell_up_s: NotNegative = Field(default=_LADDER.dwell_up_s, description="Least time between steps up, seconds.")
    dwell_down_s: NotNegative = Field(
        default=_LADDER.dwell_down_s, description="Least time on a rung before a step down."
    )
    context_limit_tokens: Count = Field(
        default=_LADDER.context_limit_tokens, description="Prompt kept by `context_trim`."
    )
    template: Annotated[str, rules.text("text of 1 to 4000 characters", r"(?s).{1,4000}")] = Field(
        default=_LADDER.template, description="Answer of the rung `template` for tenants without their own."
    )

    @model_validator(mode="after")
    def _order(self) -> LadderFile:
        names = [rung.name for rung in self.rungs]
        enters = [rung.enter for rung in self.rungs]
        if not names or names[0] != "full":
            raise refuse("rungs", "the first rung must be `full`")
        if names != [name for name in RUNGS if name in names]:
            raise refuse("rungs", f"a rung stands twice or out of order (order: {', '.join(RUNGS)})")
        if enters != sorted(enters):
            raise refuse("rungs", "`enter` must not fall from one rung to the next")
        if len(enters) > 1 and self.leave >= enters[1]:
            raise refuse("leave", f"must be below the first `enter` ({enters[1]:g}), or the ladder would flutter")
        return self


class Model(Section):
    tiers: Annotated[tuple[str, ...], rules.names_of("tiers", at_least=1)] = Field(
        default=(), description="Tiers that may serve it."
    )
    alias: Annotated[str, rules.name_of("models")] = Field(default="", description="Another name for a model.")

    @model_validator(mode="after")
    def _one(self) -> Model:
        if bool(self.tiers) == bool(self.alias):
            raise refuse("alias", "has both or neither of `tiers` and `alias` (allowed: exactly one)")
        return self


class Listen(Section):
    host: Annotated[str, rules.text("a host name or address", r"[\w.:%-]+")] = Field(
        default="127.0.0.1", description="Address."
    )
    port: Annotated[int, rules.whole(1, 65535)] = Field(default=8000, description="Port.")


class PlatformFile(Section):
    """The platform file."""

    cell: rules.Name = Field(default="local", description="Name of this cell.")
    listen: Listen = Field(default_factory=Listen, description="Where HTTP is served.")
    tenants_dir: Annotated[str, rules.text("a folder")] = Field(
        default="tenants", description="Folder of tenant files, relative to this file."
    )
    state_dir: Annotated[str, rules.text("a folder")] = Field(
        default=".rungway", description="Ledger, journals, converted models; made if absent; relative to this file."
    )
    database: Annotated[str, rules.database()] = Field(
        default="sqlite", description="Ledger and audit; sqlite is in state_dir."
    )
    gateway: Gateway = Field(default_factory=Gateway, description="The HTTP side.")
    controller: Controller = Field(default_factory=Controller, description="The deciding side.")
    channel: Channel = Field(default_factory=Channel, description="Connections between the processes.")
    tiers: dict[rules.Name, Tier] = Field(min_length=1, description="Tiers by name.")
    models: dict[rules.ModelName, Model] = Field(
        default_factory=dict, description="More model names for clients; every tier name is one already."
    )
    plans: dict[rules.Name, Terms] = Field(default_factory=dict, description="Defaults for tenants, by plan name.")
    ladder: Annotated[str, rules.text("a file")] = Field(
        default="", description="The ladder's file, relative to this file. Absent: the built-in ladder."
    )
    demo_keys: Annotated[tuple[str, ...], rules.names_of("tenants")] = Field(
        default=(),
        description="Tenants that get a key on the first start, shown in `ready.json`. For a first try only.",
    )
