"""What settings must refuse, each by file, line and field; and what absent, 0, `unlimited` and null mean."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from rungway.errors import ConfigError, Mistake
from rungway.settings import load_platform
from rungway.settings.keys import hash_key

PLATFORM = """\
cell: t
tenants_dir: tenants
state_dir: state
tiers:
  small:
    price_usd_per_1k: {input: 1, cached_input: 0.5, output: 2}
    versions:
      s: {backend: fake}
  large:
    price_usd_per_1k: {input: 10, cached_input: 5, output: 20}
    versions:
      l: {backend: fake}
models:
  auto: {tiers: [small, large]}
"""
ACME = "tenant: acme\n"


def write(folder: Path, platform: str = PLATFORM, **tenants: str) -> Path:
    (folder / "tenants").mkdir(exist_ok=True)
    for name, text in (tenants or {"acme": ACME}).items():
        (folder / "tenants" / f"{name}.yaml").write_text(dedent(text))
    path = folder / "rungway.yaml"
    path.write_text(dedent(platform))
    return path


def mistakes(path: Path) -> list[Mistake]:
    with pytest.raises(ConfigError) as caught:
        load_platform(path)
    return caught.value.mistakes


def tenant_key(key_id: str = "k", text: str = "x", more: str = "") -> str:
    return f'keys: [{{id: {key_id}, sha256: "{hash_key(text)}"{more}}}]\n'


TENANT_REFUSED = {
    "fractional limit": ("quotas: {requests_per_minute: 1.5}", "quotas.requests_per_minute", "whole number"),
    "endless limit": ("quotas: {requests_per_minute: 1e9999}", "quotas.requests_per_minute", "finite"),
    "limit of thousands of digits": (
        f"quotas: {{tokens_per_minute: {'9' * 5000}}}",
        "quotas.tokens_per_minute",
        "whole",
    ),
    "negative limit": ("quotas: {tokens_per_minute: -1}", "quotas.tokens_per_minute", "at least 0"),
    "null limit": ("quotas: {requests_per_minute: null}", "quotas.requests_per_minute", "null is not a value"),
    "empty limit": ("quotas: {requests_per_minute: }", "quotas.requests_per_minute", "unlimited"),
    "null section": ("quotas:", "quotas", "null is not a value"),
    "limit as a word": ("quotas: {requests_per_minute: many}", "quotas.requests_per_minute", "unlimited"),
    "limit as true": ("quotas: {requests_per_minute: true}", "quotas.requests_per_minute", "whole number"),
    "endless queue": ("quotas: {queue_max: unlimited}", "quotas.queue_max", "whole number"),
    "nan budget": ("budget: {usd: .nan}", "budget.usd", "finite"),
    "null budget": ("budget: {usd: ~}", "budget.usd", "null is not a value"),
    "negative budget": ("budget: {usd: -1}", "budget.usd", "at least 0"),
    "budget too fine": ("budget: {usd: 0.0000000001}", "budget.usd", "finer than a nano-dollar"),
    "unknown window": ("budget: {per: year}", "budget.per", "month"),
    "unknown timezone": ("budget: {timezone: Mars/Base}", "budget.timezone", "no timezone"),
    "timezone that climbs": ("budget: {timezone: ../../etc/passwd}", "budget.timezone", "no timezone"),
    "weight 0": ("weight: 0", "weight", "more than 0"),
    "nan weight": ("weight: .nan", "weight", "finite"),
    "misspelt class": ("class: hgih", "class", "interactive"),
    "misspelt class, nearly right": ("class: interactiv", "class", "did you mean `interactive`"),
    "unknown floor": ("ladder: {floor: huge}", "ladder.floor", "`huge` is not one of the rungs"),
    "unknown opt-out": ("ladder: {opt_out: [huge]}", "ladder.opt_out", "rungs"),
    "unknown model": ("models: [auto, gigantic]", "models", "`gigantic`"),
    "unknown tier for risk": ("risk: {high: {tier_min: huge}}", "risk.high.tier_min", "tiers"),
    "unknown plan": ("plan: platinum", "plan", "plans"),
    "share above one": ("isolation: {in_flight_share_max: 1.1}", "isolation.in_flight_share_max", "at most 1"),
    "reserve above cap": (
        "isolation: {in_flight_share_max: 0.2, reserved_share: 0.3}",
        "isolation.reserved_share",
        "in_flight_share_max",
    ),
    "unknown key": ("qoutas: {}", "qoutas", "did you mean `quotas`"),
    "empty hash": ('keys: [{id: k, sha256: ""}]', "keys[0].sha256", "64 hex"),
    "hash of an empty key": (tenant_key(text=""), "keys[0].sha256", "empty key"),
    "short hash": ("keys: [{id: k, sha256: abcd}]", "keys[0].sha256", "64 hex"),
    "expiry that is no time": (tenant_key(more=", expires: soon"), "keys[0].expires", "ISO 8601"),
    "unknown scope": (tenant_key(more=", scopes: [root]"), "keys[0].scopes", "inference"),
    "admin for a tenant": (tenant_key(more=", scopes: [admin]"), "keys[0].scopes", "only for the tenant `platform`"),
    "key without hash": ("keys: [{id: k}]", "keys[0].sha256", "is required"),
    "a key written twice": ("weight: 1\nweight: 2", "weight", "written twice"),
    "python tag": ("weight: !!python/object/apply:os.getpid []", "weight", "not allowed"),
}

READING = ("a key written twice", "python tag")  # found before the file is known to be a tenant's


@pytest.mark.parametrize("case", TENANT_REFUSED)
def test_tenant_field_is_refused_with_file_line_and_field(tmp_path: Path, case: str) -> None:
    text, field, words = TENANT_REFUSED[case]
    (found,) = mistakes(write(tmp_path, acme=f"tenant: acme\n\n{text}\n"))
    assert found.file.endswith("tenants/acme.yaml")
    assert found.line == (4 if case == "a key written twice" else 3)
    assert found.path == (field if case in READING else f"tenants.acme.{field}")
    assert words in found.message


PLATFORM_REFUSED = {
    "negative price": (("input: 1,", "input: -1,"), "tiers.small.price_usd_per_1k.input", "at least 0", 6),
    "absent price": (("input: 1, ", ""), "tiers.small.price_usd_per_1k.input", "is required", 6),
    "nan price": (("input: 1,", "input: .nan,"), "tiers.small.price_usd_per_1k.input", "finite", 6),
    "null price": (("input: 1,", "input: null,"), "tiers.small.price_usd_per_1k.input", "null", 6),
    "price finer than we count": (
        ("input: 1,", "input: 1e-10,"),
        "tiers.small.price_usd_per_1k.input",
        "nano-dollar",
        6,
    ),
    "unknown backend": (("s: {backend: fake}", "s: {backend: magic}"), "tiers.small.versions.s.backend", "native", 8),
    "native without a model": (("s: {backend: fake}", "s: {}"), "tiers.small.versions.s.backend", "needs `model`", 8),
    "strange model source": (
        ("s: {backend: fake}", "s: {model: 'ftp://x'}"),
        "tiers.small.versions.s.model",
        "pypi:name==version",
        8,
    ),
    "replicas in the wrong order": (
        ("s: {backend: fake}", "s: {backend: fake, replicas: {min: 3, max: 2}}"),
        "tiers.small.versions.s.replicas.min",
        "more than max",
        8,
    ),
    "no place in the batch": (
        ("s: {backend: fake}", "s: {backend: fake, max_num_seqs: 0}"),
        "tiers.small.versions.s.max_num_seqs",
        "at least 1",
        8,
    ),
    "fake settings for a real engine": (
        ("s: {backend: fake}", "s: {model: 'hf:a/b', fake: {}}"),
        "tiers.small.versions.s.fake",
        "only for",
        8,
    ),
    "no versions": (("      s: {backend: fake}", "      {}"), "tiers.small.versions", "must not be empty", 7),
    "unknown tier in a model": (("[small, large]", "[small, huge]"), "models.auto.tiers", "`huge`", 14),
    "model without tiers": (("[small, large]", "[]"), "models.auto.tiers", "not empty", 14),
    "alias to nothing": (("{tiers: [small, large]}", "{alias: nobody}"), "models.auto.alias", "nobody", 14),
    "alias to itself": (("{tiers: [small, large]}", "{alias: auto}"), "models.auto.alias", "circle", 14),
    "model named as a tier": (("auto:", "small:"), "models.small", "name of a tier", 14),
    "unknown database": (("cell: t", "database: mysql://u:pw@h/d"), "database", "postgresql", 1),
    "zero duration": (("cell: t", "gateway: {request_timeout_s: 0}"), "gateway.request_timeout_s", "more than 0", 1),
    "port out of range": (("cell: t", "listen: {port: 70000}"), "listen.port", "65535", 1),
    "demo key for nobody": (("cell: t", "demo_keys: [ghost]"), "demo_keys", "ghost", 1),
    "class shares above one": (
        ("cell: t", "controller: {class_shares: {batch: 0.9}}"),
        "controller.class_shares",
        "1",
        1,
    ),
    "plan with a wrong value": (("cell: t", "plans: {gold: {weight: 0}}"), "plans.gold.weight", "more than 0", 1),
    "plan with a tenant's field": (
        ("cell: t", "plans: {gold: {suspended: true}}"),
        "plans.gold.suspended",
        "unknown",
        1,
    ),
    "rank in one tier only": (("  large:", "  large:\n    rank: 2"), "tiers.small.rank", "every tier or in none", 5),
    "missing ladder file": (("cell: t", "ladder: nowhere.yaml"), "file", "cannot be read", 1),
    "missing tenants folder": (("tenants_dir: tenants", "tenants_dir: nowhere"), "tenants_dir", "no folder", 2),
}


@pytest.mark.parametrize("case", PLATFORM_REFUSED)
def test_platform_field_is_refused_with_file_line_and_field(tmp_path: Path, case: str) -> None:
    (old, new), field, words, line = PLATFORM_REFUSED[case]
    assert old in PLATFORM
    (found,) = mistakes(write(tmp_path, PLATFORM.replace(old, new, 1)))
    assert (found.path, found.line) == (field, line)
    assert words in found.message
    assert found.file.endswith("nowhere.yaml" if case == "missing ladder file" else "rungway.yaml")


LADDER_REFUSED = {
    "unknown rung": ("rungs: [{name: full}, {name: sideways, enter: 1}]", "rungs[1].name"),
    "rung twice": ("rungs: [{name: full}, {name: defer, enter: 1}, {name: defer, enter: 2}]", "rungs"),
    "not starting full": ("rungs: [{name: defer, enter: 1}]", "rungs"),
    "falling thresholds": ("rungs: [{name: full}, {name: small_tier, enter: 2}, {name: defer, enter: 1}]", "rungs"),
    "leave above enter": ("leave: 0.95", "leave"),
}


@pytest.mark.parametrize("case", LADDER_REFUSED)
def test_ladder_is_refused(tmp_path: Path, case: str) -> None:
    text, field = LADDER_REFUSED[case]
    path = write(tmp_path, PLATFORM + "ladder: ladder.yaml\n")
    (tmp_path / "ladder.yaml").write_text(text + "\n")
    found = mistakes(path)[0]
    assert (found.file, found.path, found.line) == (str(tmp_path / "ladder.yaml"), field, 1)


def test_tenant_floor_must_be_a_rung_of_the_declared_ladder(tmp_path: Path) -> None:
    path = write(tmp_path, PLATFORM + "ladder: l.yaml\n", acme=ACME + "ladder: {floor: small_tier}\n")
    (tmp_path / "l.yaml").write_text("rungs: [{name: full}, {name: defer, enter: 1}]\n")
    (found,) = mistakes(path)
    assert found.path == "tenants.acme.ladder.floor"


@pytest.mark.parametrize("name", ["Acme", "a b", "", "1a", "é", "a" * 42, "a_b"])
def test_tenant_name_is_refused(tmp_path: Path, name: str) -> None:
    (found,) = mistakes(write(tmp_path, acme=f'tenant: "{name}"\n'))
    assert found.path.endswith("tenant")
    assert found.line == 1


def test_tenant_default_declared_twice_is_refused(tmp_path: Path) -> None:
    (found,) = mistakes(write(tmp_path, one="tenant: default\n", two="# again\ntenant: default\n"))
    assert (Path(found.file).name, found.line, found.path) == ("two.yaml", 2, "tenants.default.tenant")


def test_one_key_for_two_tenants_and_one_id_for_two_keys_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, a="tenant: a\n" + tenant_key("k1", "same"), b="tenant: b\n" + tenant_key("k2", "same"))
    (found,) = mistakes(path)
    assert (found.path, found.line) == ("tenants.b.keys[0].sha256", 2)
    assert hash_key("same") not in found.message
    path = write(tmp_path, a="tenant: a\n" + tenant_key("k", "x"), b="tenant: b\n" + tenant_key("k", "y"))
    (found,) = mistakes(path)
    assert found.path == "tenants.b.keys[0].id"


def test_reserved_shares_together_above_one_are_refused(tmp_path: Path) -> None:
    share = "isolation: {in_flight_share_max: 0.9, reserved_share: 0.6}\n"
    (found,) = mistakes(write(tmp_path, a="tenant: a\n" + share, b="tenant: b\n" + share))
    assert "a 0.6 + b 0.6 = 1.2" in found.message


def test_right_each_by_itself_but_wrong_together(tmp_path: Path) -> None:
    plans = PLATFORM + "plans:\n  p: {isolation: {in_flight_share_max: 0.2}}\n"
    (found,) = mistakes(write(tmp_path, plans, acme="tenant: acme\nplan: p\nisolation: {reserved_share: 0.4}\n"))
    assert (found.path, found.line) == ("tenants.acme.isolation.reserved_share", 3)


def test_all_mistakes_of_all_files_come_together_in_reading_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        PLATFORM.replace("input: 1,", "input: -1,").replace("[small, large]", "[small, huge]")
        + "ladder: l.yaml\nnope: 1\n",
        acme="tenant: acme\nweight: 0\nquotas:\n  requests_per_minute: 1.5\n  queue_max: null\nladder: {floor: huge}\n",
        beta="tenant: beta\nclass: hgih\n" + tenant_key(more=", scopes: [admin]"),
    )
    (tmp_path / "l.yaml").write_text("rungs: [{name: full}]\ndwell_up_s: -1\n")
    (tmp_path / "state" / "tenants").mkdir(parents=True)
    (tmp_path / "state" / "tenants" / "acme.yaml").write_text("tenant: acme\nkeys:\n  - {id: z}\n")
    found = [(Path(entry.file).name, entry.line, entry.path) for entry in mistakes(path)]
    assert found == [
        ("rungway.yaml", 6, "tiers.small.price_usd_per_1k.input"),
        ("rungway.yaml", 14, "models.auto.tiers"),
        ("rungway.yaml", 16, "nope"),
        ("l.yaml", 2, "dwell_up_s"),
        ("acme.yaml", 3, "keys[0].sha256"),
        ("acme.yaml", 2, "tenants.acme.weight"),
        ("acme.yaml", 4, "tenants.acme.quotas.requests_per_minute"),
        ("acme.yaml", 5, "tenants.acme.quotas.queue_max"),
        ("acme.yaml", 6, "tenants.acme.ladder.floor"),
        ("beta.yaml", 2, "tenants.beta.class"),
        ("beta.yaml", 3, "tenants.beta.keys[0].scopes"),
    ]


@pytest.mark.parametrize(
    "where", ["key: {text}", "{text}: 1", "{text}: 1, {text}: 2", "id: {text}", "sha256: {text}", "expires: {text}"]
)
def test_a_key_text_in_a_file_is_refused_and_never_repeated(tmp_path: Path, where: str) -> None:
    text = "rw_acme_SECRET-0123456789abcdef0123456789abcdefghijklm"
    found = mistakes(write(tmp_path, acme=f"tenant: acme\nkeys:\n  - {{{where.replace('{text}', text)}}}\n"))
    said = "\n".join(map(str, found))
    assert not any(text[at : at + 12] in said for at in range(8, len(text) - 12))


@pytest.mark.parametrize("text", ["a: [", "a: &x [*x]", "\x00", "- 1", "", "a: 1\n---\nb: 2", "{}: 1", "a: *nobody"])
def test_what_is_not_a_mapping_is_refused_with_a_line(tmp_path: Path, text: str) -> None:
    found = mistakes(write(tmp_path, acme=text))
    assert all(entry.line >= 1 and entry.file.endswith("acme.yaml") for entry in found)


def test_aliases_of_aliases_are_bounded(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    assert any("too much" in entry.message for entry in mistakes(write(tmp_path, acme=bomb)))
