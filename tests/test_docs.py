"""What the README shows runs, and what it promises exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata looks at all of torch
def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 5
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)


def test_commands_are_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets


def test_the_tree_is_the_tree() -> None:
    tree = README[README.index("## The tree") :]
    named = set(re.findall(r"[a-z_]+\.py", tree))
    sources = [path for top in ("wds_tensorcache", "dali_plugin") for path in (ROOT / top).rglob("*.py")]
    package = {path.name for path in sources} - {"__init__.py"}
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert named == package | examples


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.search(r"^[A-Z]{4,}$|TODO|FIXME", README, re.MULTILINE)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
