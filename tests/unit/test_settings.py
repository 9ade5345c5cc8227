"""What settings mean: absent, 0, `unlimited`, plans, models, overlays, digests, the effective view."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest
import yaml

from rungway import contracts
from rungway.engine.rules import DEFAULT_RULES, Rules, Schedule
from rungway.errors import ConfigError
from rungway.replica.build import rules_of
from rungway.settings import effective, hash_key, load_platform
from rungway.settings.schema import LadderFile
from rungway.settings.schema_processes import Channel, Controller, Gateway
from rungway.settings.schema_tenant import TenantCache
from rungway.settings.schema_tiers import Fake, Version
from rungway.settings.validate import fields

ROOT = Path(__file__).parents[2]
PLATFORM = """\
cell: t
tenants_dir: tenants
state_dir: state
tiers:
  small:
    price_usd_per_1k: {input: 0.0002, cached_input: 0.00005, output: 0.0006}
    versions:
      s: {backend: fake}
  large:
    price_usd_per_1k: {input: 10, cached_input: 5, output: 20}
    versions:
      l: {backend: fake}
models:
  auto: {tiers: [small, large]}
  gpt-4o: {alias: auto}
  chat: {alias: gpt-4o}
"""


def write(folder: Path, tenant: str = "tenant: acme\n", platform: str = PLATFORM) -> Path:
    (folder / "tenants").mkdir(exist_ok=True)
    (folder / "tenants" / "acme.yaml").write_text(dedent(tenant))
    path = folder / "rungway.yaml"
    path.write_text(dedent(platform))
    return path


def acme(folder: Path, tenant: str, platform: str = PLATFORM) -> contracts.Tenant:
    found = load_platform(write(folder, tenant, platform)).tenant("acme")
    assert found is not None
    return found


def test_absent_zero_and_unlimited_are_three_different_things(tmp_path: Path) -> None:
    for word, expected in (("0", 0), ("unlimited", None), ("7", 7)):
        limits = f"{{requests_per_minute: {word}, tokens_per_minute: {word}, concurrent_requests: {word}}}"
        tenant = acme(tmp_path, f"tenant: acme\nquotas: {limits}\nbudget: {{usd: {word}}}\n")
        assert tenant.quotas.requests_per_minute == expected
        assert tenant.quotas.tokens_per_minute == expected
        assert tenant.quotas.concurrent_requests == expected
        assert tenant.budget.nusd == (None if expected is None else expected * contracts.NUSD_PER_USD)
    absent = acme(tmp_path, "tenant: acme\n")
    assert absent.quotas == contracts.Quotas(
        requests_per_minute=600, tokens_per_minute=200_000, concurrent_requests=16, queue_max=100
    )
    assert absent.budget.nusd is None
    assert acme(tmp_path, "tenant: acme\nquotas: {queue_max: 0}\nmodels: []\n").models == ()


def test_what_a_tenant_leaves_out_comes_from_its_plan_key_by_key(tmp_path: Path) -> None:
    plans = """\
plans:
  default: {weight: 9}
  gold:
    class: interactive
    weight: 3
    models: [auto]
    quotas: {requests_per_minute: 100, tokens_per_minute: unlimited}
    value_usd: {interactive: 0.5}
    isolation: {reserved_share: 0.25}
    budget: {usd: 5, at_limit: degrade}
    slo: {ttft_ms_p99: 100}
    ladder: {floor: small_tier}
    cache: {mode: exact}
    risk: {high: {tier_min: large}}
"""
    tenant = acme(tmp_path, "tenant: acme\nplan: gold\nquotas: {requests_per_minute: 0}\nweight: 4\n", PLATFORM + plans)
    assert tenant.quotas.requests_per_minute == 0
    assert tenant.quotas.tokens_per_minute is None
    assert tenant.quotas.concurrent_requests == 16
    assert (tenant.weight, tenant.tenant_class) == (4, contracts.TenantClass.INTERACTIVE)
    assert tenant.value_nusd == {"interactive": 500_000_000, "standard": 5_000_000, "batch": 500_000}
    assert tenant.isolation == contracts.Isolation(reserved_share=0.25)
    assert tenant.budget == contracts.Budget(nusd=5 * contracts.NUSD_PER_USD, at_limit="degrade")
    assert (tenant.slo.ttft_ms_p99, tenant.slo.availability) == (100, 0.99)
    assert (tenant.ladder.floor, tenant.cache.mode, tenant.risk_high_tier_min) == ("small_tier", "exact", "large")
    assert acme(tmp_path, "tenant: acme\n", PLATFORM + plans).weight == 9
    assert acme(tmp_path, "tenant: acme\n", PLATFORM).plan == "default"


def test_lists_of_a_tenant_replace_those_of_the_plan(tmp_path: Path) -> None:
    plans = PLATFORM + "plans:\n  default: {models: [large], ladder: {opt_out: [template]}}\n"
    tenant = acme(tmp_path, "tenant: acme\nmodels: [small]\nladder: {opt_out: []}\n", plans)
    assert (tenant.models, tenant.ladder.opt_out) == (("small",), ())


def test_tiers_are_models_and_aliases_lead_to_tiers(tmp_path: Path) -> None:
    platform = load_platform(write(tmp_path))
    assert {model.name: model.tiers for model in platform.models} == {
        "small": ("small",),
        "large": ("large",),
        "auto": ("small", "large"),
        "gpt-4o": ("small", "large"),
        "chat": ("small", "large"),
    }
    assert acme(tmp_path, "tenant: acme\nmodels: [auto]\n").models == ("auto", "gpt-4o", "chat")
    assert acme(tmp_path, "tenant: acme\nmodels: [gpt-4o]\n").models == ("gpt-4o", "chat")
    assert acme(tmp_path, "tenant: acme\nmodels: all\n").models == ("small", "large", "auto", "gpt-4o", "chat")


def test_money_is_exact(tmp_path: Path) -> None:
    price = load_platform(write(tmp_path)).tier("small").price
    assert price == contracts.Price(input=200_000, cached_input=50_000, output=600_000)
    free = PLATFORM.replace("input: 10, cached_input: 5, output: 20", "input: 0, cached_input: 0, output: 0")
    assert load_platform(write(tmp_path, platform=free)).tier("large").price.output == 0
    finest = PLATFORM.replace("input: 10,", "input: 0.000000001,")
    assert load_platform(write(tmp_path, platform=finest)).tier("large").price.input == 1


def test_the_cheaper_tier_is_the_smaller_one_wherever_it_stands(tmp_path: Path) -> None:
    data = yaml.safe_load(PLATFORM)
    sorted_text = yaml.safe_dump(data, sort_keys=True)
    assert sorted_text.index("large:") < sorted_text.index("small:")
    platform = load_platform(write(tmp_path, platform=sorted_text))
    assert [(tier.name, tier.rank) for tier in platform.tiers] == [("small", 0), ("large", 1)]
    for name, rank in (("small", 5), ("large", 1)):
        data["tiers"][name]["rank"] = rank
    platform = load_platform(write(tmp_path, platform=yaml.safe_dump(data)))
    assert [(tier.name, tier.rank) for tier in platform.tiers] == [("large", 0), ("small", 1)]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2027-12-31T00:00:00Z", 1830211200),
        ('"2027-12-31T01:00:00+01:00"', 1830211200),
        ("2027-12-31 00:00:00", 1830211200),
        ("2027-12-31", 1830211200),
    ],
)
def test_expiry_in_every_usual_spelling(tmp_path: Path, text: str, seconds: int) -> None:
    tenant = acme(tmp_path, f'tenant: acme\nkeys: [{{id: k, sha256: "{hash_key("x")}", expires: {text}}}]\n')
    assert tenant.keys[0].expires_ns == seconds * 10**9


def test_words_stay_words_and_numbers_numbers(tmp_path: Path) -> None:
    tenant = acme(tmp_path, "tenant: acme\ncache: {mode: off, ttl_s: 1e-1}\nquotas: {requests_per_minute: 1_000}\n")
    assert (tenant.cache.mode, tenant.cache.ttl_s, tenant.quotas.requests_per_minute) == ("off", 0.1, 1000)


def test_anchors_and_merges_work_and_keep_their_lines(tmp_path: Path) -> None:
    versions = PLATFORM.replace("s: {backend: fake}", "s: &v {backend: fake, max_num_seqs: 3}").replace(
        "l: {backend: fake}", "l:\n        <<: *v\n        max_context: 4096"
    )
    large = load_platform(write(tmp_path, platform=versions)).tier("large").versions[0]
    assert (large.max_num_seqs, large.max_context, large.backend) == (3, 4096, "fake")
    with pytest.raises(ConfigError) as caught:
        load_platform(write(tmp_path, platform=versions.replace("max_context: 4096", "max_context: 0")))
    assert [entry.line for entry in caught.value.mistakes] == [14]


def overlay(folder: Path, *entries: dict[str, Any], tenant: str = "acme") -> None:
    (folder / "state" / "tenants").mkdir(parents=True, exist_ok=True)
    path = folder / "state" / "tenants" / f"{tenant}.yaml"
    path.write_text(yaml.safe_dump({"tenant": tenant, "keys": list(entries)}))


def test_key_files_add_replace_and_revoke(tmp_path: Path) -> None:
    own = f'tenant: acme\nkeys:\n  - {{id: a, sha256: "{hash_key("a")}"}}\n  - {{id: b, sha256: "{hash_key("b")}", revoked: true}}\n'
    overlay(
        tmp_path,
        {"id": "a", "sha256": hash_key("a"), "revoked": True},
        {"id": "b", "sha256": hash_key("b")},
        {"id": "c", "sha256": hash_key("c")},
    )
    overlay(tmp_path, {"id": "a", "sha256": hash_key("gone")}, tenant="left-long-ago")
    keys = {key.id: key for key in acme(tmp_path, own).keys}
    assert {name: key.revoked for name, key in keys.items()} == {"a": True, "b": True, "c": False}
    overlay(tmp_path, {"id": "a", "sha256": hash_key("new")})
    assert acme(tmp_path, own).keys[0].sha256 == hash_key("new")
    elsewhere = tmp_path / "elsewhere"
    platform = load_platform(tmp_path / "rungway.yaml", state_dir=elsewhere)
    assert platform.state_dir == str(elsewhere)
    assert not platform.tenants[0].keys[0].revoked


def test_overrides_pass_the_same_checks(tmp_path: Path) -> None:
    path = write(tmp_path)
    platform = load_platform(path, port=8123, host="0.0.0.0")
    assert (platform.host, platform.port) == ("0.0.0.0", 8123)
    with pytest.raises(ConfigError, match=r"listen\.port"):
        load_platform(path, port=0)


def test_the_digest_names_what_is_decided_not_where_or_with_which_hash(tmp_path: Path) -> None:
    key = 'tenant: acme\nkeys: [{{id: k, sha256: "{}"}}]\n'
    first = load_platform(write(tmp_path, key.format(hash_key("x"))))
    assert load_platform(write(tmp_path, key.format(hash_key("y")))).digest == first.digest
    assert load_platform(tmp_path / "rungway.yaml", port=9, state_dir=tmp_path / "z").digest == first.digest
    assert load_platform(write(tmp_path, "tenant: acme\nweight: 2\n")).digest != first.digest
    ladder = PLATFORM + "ladder: l.yaml\n"
    (tmp_path / "l.yaml").write_text("dwell_up_s: 1\n")
    second = load_platform(write(tmp_path, key.format(hash_key("x")), ladder))
    assert second.ladder.digest != first.ladder.digest
    assert second.digest != first.digest


def test_the_effective_view_shows_defaults_and_hides_secrets(tmp_path: Path) -> None:
    text = PLATFORM.replace("cell: t", "database: postgresql://me:hunter2-very-secret@db/ledger")
    platform = load_platform(write(tmp_path, f'tenant: acme\nkeys: [{{id: k, sha256: "{hash_key("x")}"}}]\n', text))
    view = effective(platform)
    shown = msgspec.json.encode(view).decode()
    assert hash_key("x") not in shown
    assert "hunter2" not in shown
    assert view["database"] == "postgresql://me:***@db/ledger"
    tenant = view["tenants"]["acme"]
    assert tenant["keys"][0]["sha256"] == hash_key("x")[:8] + "..."
    assert tenant["quotas"]["requests_per_minute"] == 600
    assert tenant["budget"]["usd"] == "unlimited"
    assert view["tiers"]["small"]["price_usd_per_1k"]["input"] == 0.0002


def test_the_effective_view_is_a_configuration_with_the_same_digest(tmp_path: Path) -> None:
    platform = load_platform(ROOT / "config" / "quickstart.yaml", state_dir=tmp_path / "state")
    view = effective(platform)
    tenants, ladder = view.pop("tenants"), view.pop("ladder")
    assert view.pop("digest") == platform.digest
    assert ladder.pop("digest") == platform.ladder.digest
    view["models"] = {name: model for name, model in view["models"].items() if name not in view["tiers"]}
    view |= {"tenants_dir": "tenants", "ladder": "ladder.yaml"}
    view["plans"] = {tenant["plan"]: {} for tenant in tenants.values()}
    (tmp_path / "tenants").mkdir()
    for name, tenant in tenants.items():
        (tmp_path / "tenants" / f"{name}.yaml").write_text(yaml.safe_dump({"tenant": name, **tenant}, sort_keys=False))
    (tmp_path / "ladder.yaml").write_text(yaml.safe_dump(ladder))
    (tmp_path / "platform.yaml").write_text(yaml.safe_dump(view, sort_keys=False))
    assert load_platform(tmp_path / "platform.yaml").digest == platform.digest


def test_without_a_ladder_file_the_shipped_ladder_applies(tmp_path: Path) -> None:
    shipped = load_platform(ROOT / "config" / "quickstart.yaml", state_dir=tmp_path).ladder
    assert load_platform(write(tmp_path)).ladder == shipped


@pytest.mark.parametrize("name", ["quickstart", "fake"])
def test_shipped_configurations_load(tmp_path: Path, name: str) -> None:
    platform = load_platform(ROOT / "config" / f"{name}.yaml", state_dir=tmp_path)
    assert [tier.name for tier in platform.tiers] == ["small", "large", "embed"]
    assert {"acme", "globex", "platform"} <= {tenant.name for tenant in platform.tenants}
    assert platform.demo_keys == ("acme", "globex")
    assert {model.name for model in platform.models} == {"small", "large", "embed", "auto", "gpt-4o", "gpt-4o-mini"}
    assert not any(tenant.keys for tenant in platform.tenants)


def test_a_fake_engine_has_the_standard_behaviour_when_nothing_is_said(tmp_path: Path) -> None:
    assert load_platform(write(tmp_path)).versions()[0].fake == contracts.FakeSpec()


@pytest.mark.parametrize(
    ("shape", "struct", "extra"),
    [
        (Gateway, contracts.GatewaySpec, set()),
        (Controller, contracts.ControllerSpec, set()),
        (Channel, contracts.ChannelSpec, set()),
        (Fake, contracts.FakeSpec, set()),
        (TenantCache, contracts.CacheTerms, set()),
        (LadderFile, contracts.LadderSpec, {"digest"}),
        (
            Version,
            contracts.Version,
            {"name", "tier", "kind", "replicas_min", "replicas_max", "replica_cost_nusd_per_hour"},
        ),
    ],
)
def test_every_contract_field_can_be_set_with_the_same_default(shape: Any, struct: Any, extra: set[str]) -> None:
    wanted = {field.name: field for field in msgspec.structs.fields(struct)}
    given = dict(fields(shape))
    only_here = {"replicas", "replica_cost_usd_per_hour"} if shape is Version else set()
    assert set(wanted) - extra == set(given) - only_here, "settings/ and contracts.py have come apart"
    for name, field in wanted.items():
        if name in given and given[name].default_factory is None and not field.required:
            assert given[name].default == field.default, name


def test_an_engines_scheduling_is_set_per_version_and_shown_as_written(tmp_path: Path) -> None:
    def shown(more: str) -> tuple[Rules, dict[str, Any]]:
        text = PLATFORM.replace("s: {backend: fake}", f"s: {{backend: fake{more}}}")
        loaded = load_platform(write(tmp_path, platform=text))
        return rules_of(loaded.tier("small").versions[0]), effective(loaded)["tiers"]["small"]["versions"]["s"]

    rules, view = shown("")
    assert rules == DEFAULT_RULES and (view["kv_soft_quota"], view["long_prefill_tokens"]) == ("off", "auto")
    assert shown(", kv_soft_quota: off, long_prefill_tokens: auto")[0] == DEFAULT_RULES
    rules, view = shown(
        ", schedule: lpm, long_prefill_tokens: 64, long_prefill_tokens_min: 8, kv_watermark: 0.1, kv_soft_quota: 0.25, prefix_keys_max: 0"
        ", step_timeout_s: 30"
    )
    assert rules == Rules(
        schedule=Schedule.LPM,
        long_prefill_tokens=64,
        long_prefill_tokens_min=8,
        kv_watermark=0.1,
        kv_soft_quota=0.25,
        prefix_keys_max=0,
        step_timeout_s=30.0,
    )
    assert (view["schedule"], view["kv_soft_quota"], view["long_prefill_tokens"]) == ("lpm", 0.25, 64)
    for wrong in (
        "schedule: newest",
        "kv_soft_quota: 0",
        "kv_soft_quota: 1.5",
        "long_prefill_tokens: 0",
        "long_prefill_tokens_min: 0",
    ):
        with pytest.raises(ConfigError):
            shown(f", {wrong}")
