"""Lightning, and the adapters that docs/training.md imports from their own modules. Without it, tests that need it are skipped.

Lightning is imported on first use: that takes seconds, also in the workers of pytest that run none of its tests.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from wds_tensorcache.integrations.accelerate import SkippableLoader

__all__ = ["QUIET", "SkippableLoader", "models", "moving", "pl", "resume_loaders"]
QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "num_sanity_val_steps": 0}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False}


def _import(name: str) -> Any:
    """Import a module that needs Lightning; skip the test if that fails."""
    pytest.importorskip("lightning.pytorch", reason="needs Lightning: pip install lightning", exc_type=ImportError)
    return importlib.import_module(name)


class Lazy:
    """A module that needs Lightning, imported on first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest looks at each name in a module of tests
            raise AttributeError(name)
        return getattr(_import(self._name), name)


pl, models = Lazy("lightning.pytorch"), Lazy("tests.integrations.models")
moving = Lazy("lightning.fabric.utilities")


def resume_loaders() -> Any:
    """Return the callback of docs/training.md, `ResumeLoaders()`."""
    return _import("wds_tensorcache.integrations.lightning").ResumeLoaders()
