"""The source roots hold together: no package file that shadows another, no module twice, imports only downwards."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("platform", "replicas", "kernels", "chaos")

# Package -> the packages of ours that it may import. Modules directly in rungway/ are named by their own name; what every
# package may use stands in SHARED. A package that is not listed may import anything (it is at the top).
SHARED = {"clock", "contracts", "errors", "leases", "messages", "outcomes", "overload", "types"}
ALLOWED: dict[str, set[str]] = {
    "types": {"contracts", "outcomes"},
    "contracts": {"contracts_processes", "engine_specs"},
    "contracts_processes": {"leases", "overload"},
    "engine_specs": set(),
    "overload": set(),
    "outcomes": set(),
    "errors": {"outcomes"},
    "clock": set(),
    "messages": {"contracts", "engine.protocol", "leases", "outcomes", "types"},
    "policies": {"types", "contracts", "leases", "outcomes", "overload"},
    "leases": set(),
    "kernels": set(),
    "engine": {"kernels"},
    "channel": SHARED,
    "settings": SHARED | {"policies"},
    "ledger": SHARED,
    "observe": SHARED | {"policies"},
    "cache": SHARED,
    "control": SHARED | {"policies", "ledger", "observe", "channel", "settings", "engine.protocol"},
    "replica": SHARED | {"engine", "channel"},
}
RAY_MAY_BE_IMPORTED_IN = ("platform/rungway/serve/", "replicas/rungway/replica/deployment.py", "chaos/")
ZMQ_MAY_BE_IMPORTED_IN = ("platform/rungway/channel/", "platform/rungway/channel.py")


def sources() -> list[Path]:
    return sorted(path for root in ROOTS for path in (ROOT / root).rglob("*.py"))


def module_name(path: Path) -> str:
    """The dotted name under which a source file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every absolute module name that the file imports anywhere, with its line; type-checking imports count too."""
    name = module_name(path).split(".")
    yield from imports_in(path.read_text(), name if path.name == "__init__.py" else name[:-1])


def imports_in(source: str, package: list[str]) -> Iterator[tuple[str, int]]:
    """The same for `source` inside `package`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield base, node.lineno
            if base == "rungway" or base.startswith("rungway."):
                for alias in node.names:
                    yield f"{base}.{alias.name}", node.lineno


def owner(module: str) -> str:
    """The first name below `rungway`: the package or module that a rule is about."""
    return module.split(".")[1] if module.startswith("rungway.") else ""


def may_import(importer: str, module: str) -> bool:
    """Whether package `importer` may import `module` under the rules above. Names outside rungway are always allowed."""
    imported = owner(module)
    if not imported or importer == imported or importer not in ALLOWED:
        return True
    return imported in ALLOWED[importer] or any(
        module.startswith(f"rungway.{name}") for name in ALLOWED[importer] if "." in name
    )


def test_source_roots_and_the_namespace_have_no_package_file() -> None:
    """`platform/__init__.py` would shadow the standard library's `platform` wherever the repository root is on sys.path."""
    wrong = [root for root in ROOTS if (ROOT / root / "__init__.py").exists()]
    wrong += [f"{root}/rungway" for root in ROOTS if (ROOT / root / "rungway" / "__init__.py").exists()]
    assert wrong == []


def test_every_subpackage_has_one() -> None:
    folders = {path.parent for path in sources()}
    bare = {ROOT / root for root in ROOTS} | {ROOT / root / "rungway" for root in ROOTS}
    assert sorted(str(folder) for folder in folders - bare if not (folder / "__init__.py").exists()) == []


def test_no_module_is_owned_by_two_roots() -> None:
    owners: dict[str, list[str]] = {}
    for path in sources():
        owners.setdefault(module_name(path), []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in owners.items() if len(paths) > 1} == {}


def test_the_standard_librarys_platform_is_found_from_the_repository_root() -> None:
    code = "import platform, uuid; print(platform.system(), uuid.uuid4()); assert hasattr(platform, 'machine')"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    importer = owner(module_name(path))
    wrong = [
        f"line {line}: {importer} may not import {module}"
        for module, line in imports(path)
        if not may_import(importer, module)
    ]
    assert wrong == []


def test_only_the_edges_import_ray_and_only_the_channel_imports_zmq() -> None:
    wrong = []
    for path in sources():
        place = str(path.relative_to(ROOT))
        for module, line in imports(path):
            top = module.split(".")[0]
            if top == "ray" and not place.startswith(RAY_MAY_BE_IMPORTED_IN):
                wrong.append(f"{place}:{line}: ray")
            if top == "zmq" and not place.startswith(ZMQ_MAY_BE_IMPORTED_IN):
                wrong.append(f"{place}:{line}: zmq")
    assert wrong == []


def test_policies_are_pure() -> None:
    """No clock, environment, I/O or logging: a decision depends on its arguments alone."""
    banned = {"time", "os", "socket", "asyncio", "threading", "logging", "subprocess", "sys", "uuid", "secrets"}
    wrong = []
    for path in sorted((ROOT / "platform/rungway/policies").rglob("*.py")):
        place = str(path.relative_to(ROOT))
        for module, line in imports(path):
            if module.split(".")[0] in banned:
                wrong.append(f"{place}:{line}: {module}")
    assert wrong == []


def test_the_walk_sees_imports_in_functions_and_relative_ones() -> None:
    source = "def f():\n    import ray.serve\n    from ..gateway import core\n"
    found = {module for module, _ in imports_in(source, ["rungway", "policies"])}
    assert found == {"ray.serve", "rungway.gateway", "rungway.gateway.core"}


@pytest.mark.parametrize(
    ("importer", "module", "allowed"),
    [
        ("policies", "rungway.gateway.core", False),
        ("policies", "rungway.types", True),
        ("engine", "rungway.types", False),
        ("engine", "rungway.kernels", True),
        ("control", "rungway.gateway", False),
        ("control", "rungway.engine.protocol.Work", True),
        ("control", "rungway.engine.engine", False),
        ("serve", "rungway.gateway", True),
        ("policies", "math", True),
    ],
)
def test_the_rules_refuse_what_they_should(importer: str, module: str, allowed: bool) -> None:
    assert may_import(importer, module) is allowed
