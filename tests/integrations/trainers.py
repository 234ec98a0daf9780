"""Lightning, and the adapters that docs/training.md imports from their own modules. Without Lightning, tests are skipped."""

from __future__ import annotations

from typing import Any

import pytest

pl: Any = pytest.importorskip("lightning.pytorch", reason="needs Lightning: pip install lightning")
from wds_tensorcache.integrations.accelerate import SkippableLoader  # noqa: E402
from wds_tensorcache.integrations.lightning import ResumeLoaders  # noqa: E402

__all__ = ["QUIET", "ResumeLoaders", "SkippableLoader", "pl"]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
