"""Keys: shown once, kept as hashes, revoked for good."""

from __future__ import annotations

import re
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rungway.contracts import Platform
from rungway.errors import ConfigError
from rungway.settings import add_key, generate_key, hash_key, load_platform, make_demo_keys, revoke_key
from rungway.settings.keys import key_problem

PLATFORM = """\
tenants_dir: tenants
state_dir: state
demo_keys: [acme]
tiers:
  small:
    price_usd_per_1k: {input: 1, cached_input: 1, output: 1}
    versions: {s: {backend: fake}}
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "tenants").mkdir()
    for name in ("acme", "beta", "platform"):
        (tmp_path / "tenants" / f"{name}.yaml").write_text(f"tenant: {name}\n")
    (tmp_path / "rungway.yaml").write_text(PLATFORM)
    return tmp_path / "state"


def load(state: Path) -> Platform:
    return load_platform(state.parent / "rungway.yaml")


def keys_of(state: Path, tenant: str) -> dict[str, tuple[str, bool]]:
    found = load(state).tenant(tenant)
    assert found is not None
    return {key.id: (key.sha256, key.revoked) for key in found.keys}


def test_a_key_has_256_random_bits_and_its_tenants_name() -> None:
    keys = {generate_key("acme-2") for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"rw_acme-2_[A-Za-z0-9_-]{43}", key) for key in keys)


def test_the_hash_is_plain_sha256() -> None:
    assert hash_key("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("text", ["", "two words", "schlüssel", "tab\t", "line\nbreak", "x" * 257])
def test_texts_that_no_header_can_carry_are_no_keys(text: str) -> None:
    problem = key_problem(text)
    assert problem
    assert len(text) < 3 or text not in problem


def test_an_added_key_is_in_force_and_its_text_nowhere(state: Path) -> None:
    text = add_key(state, "acme", "a1", ("inference",), datetime(2030, 1, 1, tzinfo=UTC))
    tenant = load(state).tenant("acme")
    assert tenant is not None
    (key,) = tenant.keys
    assert (key.sha256, key.scopes, key.expires_ns) == (hash_key(text), ("inference",), 1_893_456_000 * 10**9)
    for path in state.parent.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(text[at : at + 12].encode() in data for at in range(8, len(text) - 11)), path


def test_key_files_are_private(state: Path) -> None:
    add_key(state, "acme", "a1")
    assert stat.S_IMODE((state / "tenants").stat().st_mode) == 0o700
    assert stat.S_IMODE((state / "tenants" / "acme.yaml").stat().st_mode) == 0o600
    assert [path.name for path in (state / "tenants").iterdir() if path.name.startswith(".new")] == []


def test_keys_add_up_and_an_id_is_taken_once(state: Path) -> None:
    first, second = add_key(state, "acme", "a1"), add_key(state, "acme", "a2")
    assert keys_of(state, "acme") == {"a1": (hash_key(first), False), "a2": (hash_key(second), False)}
    with pytest.raises(ConfigError, match="already"):
        add_key(state, "acme", "a1")


@pytest.mark.parametrize(("key_id", "scopes"), [("has space", ("usage",)), ("rw_acme_x", ("usage",)), ("k", ("root",))])
def test_a_wrong_key_is_not_written(state: Path, key_id: str, scopes: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        add_key(state, "acme", key_id, scopes)
    assert keys_of(state, "acme") == {}


def test_revoking_works_for_keys_of_either_file_and_lasts(state: Path) -> None:
    add_key(state, "acme", "made")
    own = state.parent / "tenants" / "acme.yaml"
    own.write_text(f"tenant: acme\nkeys: [{{id: declared, sha256: {hash_key('x')}, expires: 2030-01-01}}]\n")
    before = own.read_text()
    tenant = load(state).tenant("acme")
    assert tenant is not None
    for key_id in ("made", "declared", "declared"):
        revoke_key(state, tenant, key_id)
    assert {name: revoked for name, (_, revoked) in keys_of(state, "acme").items()} == {"made": True, "declared": True}
    after = load(state).tenant("acme")
    assert after is not None
    assert {key.id: key.expires_ns for key in after.keys} == {key.id: key.expires_ns for key in tenant.keys}
    assert own.read_text() == before
    with pytest.raises(ConfigError, match="no key"):
        revoke_key(state, tenant, "other")


def test_demo_keys_are_made_on_the_first_run_only(state: Path) -> None:
    made = make_demo_keys(load(state), state)
    assert set(made) == {"acme", "admin"}
    platform = load(state)
    admin = platform.tenant("platform")
    assert admin is not None
    assert [key.sha256 for key in admin.keys] == [hash_key(made["admin"])]
    assert "admin" in admin.keys[0].scopes
    assert make_demo_keys(platform, state) == {}
    tenant = platform.tenant("acme")
    assert tenant is not None
    revoke_key(state, tenant, tenant.keys[0].id)
    assert make_demo_keys(load(state), state) == {}


def test_no_demo_key_for_who_has_one(state: Path) -> None:
    (state.parent / "tenants" / "acme.yaml").write_text(f"tenant: acme\nkeys: [{{id: a, sha256: {hash_key('x')}}}]\n")
    assert set(make_demo_keys(load(state), state)) == {"admin"}


def test_no_demo_keys_unless_asked_for(state: Path) -> None:
    (state.parent / "rungway.yaml").write_text(PLATFORM.replace("demo_keys: [acme]\n", ""))
    assert make_demo_keys(load(state), state) == {}
    assert not state.exists()


def test_a_broken_key_file_is_reported_and_kept(state: Path) -> None:
    (state / "tenants").mkdir(parents=True)
    path = state / "tenants" / "acme.yaml"
    path.write_text("tenant: acme\nkeys: [{id: z}]\n")
    with pytest.raises(ConfigError, match="sha256"):
        add_key(state, "acme", "a1")
    assert path.read_text() == "tenant: acme\nkeys: [{id: z}]\n"
