"""`mypy --strict` on a user's script: every call has its type, and no `Any` but for what a sample has."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).with_name("script.py")


def test_a_script_is_typed() -> None:
    """`assert_type` fails for `Any`, and an ignored mistake that is none is an error, too."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(SCRIPT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_script_runs(tmp_path: Path) -> None:
    extra = ["dali"] if importlib.util.find_spec("nvidia.dali") else []
    subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), str(tmp_path), *extra], cwd=ROOT, check=True, timeout=300
    )
