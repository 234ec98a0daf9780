"""The tree is the architecture: one direction, small folders, a light import, names that are what they say."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

import wds_tensorcache as tc

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for top in ("wds_tensorcache", "dali_plugin", "examples", "benchmarks") for path in (ROOT / top).rglob("*.py")
)


def test_public_names() -> None:
    assert tc.__all__ == sorted(tc.__all__)
    modules = {name for name, value in vars(tc).items() if type(value) is type(sys)}
    assert {name for name in vars(tc) if not name.startswith("_")} - modules == set(tc.__all__)
    for name in tc.__all__:
        assert getattr(tc, name).__doc__, name


def test_version() -> None:
    assert tc.__version__ == version("wds-tensorcache")


def test_import_is_light() -> None:
    script = "import sys, wds_tensorcache; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    loaded = {name.split(".")[0] for name in modules.split()}
    assert not loaded & {"nvidia", "ray", "fsspec", "boto3", "matplotlib", "PIL", "dali_plugin"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_say_what_they_are(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_folders_are_small() -> None:
    modules = Counter(path.parent for path in SOURCES if path.name != "__init__.py")
    assert max(modules.values()) <= 12, modules


def test_no_import_circles() -> None:
    """Nor any of imports inside of functions, or of types alone."""
    names = {_module_of(path): path for path in SOURCES}
    left = {name: _imports(path, names) - {name} for name, path in names.items()}
    # take away what imports nothing that is left: only circles, and what leads to them, stay
    while free := {name for name, imported in left.items() if not imported & left.keys()}:
        for name in free:
            del left[name]
    assert not left


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, names: dict[str, Path]) -> set[str]:
    """Return the modules of `names` that a file imports, the file's own names for them aside."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            # of a package, a module in it or a name of its own
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in names else str(node.module) for name in whole}
    return found & names.keys()


def test_import_contracts() -> None:
    subprocess.run([Path(sys.executable).with_name("lint-imports")], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
