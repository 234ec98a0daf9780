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
    """The README names each folder of the packages, in the place where it is."""
    tree = README[README.index("## The tree") :]
    named, above = set(), [""]
    for indent, name in re.findall(r"^( *)([a-z_]+)/(?: |$)", tree, re.MULTILINE):
        above[len(indent) // 2 :] = [name]
        named.add("/".join(above))
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for path in ROOT.glob("*/**/__init__.py")
        if "." not in str(path.parent)
    }
    tops = {"wds_tensorcache", "dali_plugin"}
    assert {path for path in named if path.split("/")[0] in tops} == {
        path for path in packages if path.split("/")[0] in tops
    }


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.search(r"^[A-Z]{4,}$|TODO|FIXME", README, re.MULTILINE)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
