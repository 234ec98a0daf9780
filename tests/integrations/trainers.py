"""Lightning, and the adapters that docs/training.md imports from their own modules. Without Lightning, tests are skipped.

Lightning is imported on first use: that takes seconds, also in the workers of pytest that run none of its tests.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from wds_tensorcache.integrations.accelerate import SkippableLoader

__all__ = ["QUIET", "SkippableLoader", "models", "pl", "resume_loaders"]
if importlib.util.find_spec("lightning") is None:
    pytest.skip("needs Lightning: pip install lightning", allow_module_level=True)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Lazy:
    """A module that is imported on first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest looks at each name in a module of tests
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


pl, models = Lazy("lightning.pytorch"), Lazy("tests.integrations.models")


def resume_loaders() -> Any:
    """Return the callback of docs/training.md, `ResumeLoaders()`."""
    return importlib.import_module("wds_tensorcache.integrations.lightning").ResumeLoaders()
