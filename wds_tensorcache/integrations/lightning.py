"""The callback with which Lightning resumes exactly: a loader's state, and the counters that belong to it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from wds_tensorcache.training.base_loader import BaseLoader

__all__ = ["ResumeLoaders"]

# the package that the script uses: their classes do not mix
_NAMES = ["lightning.pytorch", "pytorch_lightning"]
_NAMES.sort(key=lambda name: name not in sys.modules)


def _package() -> Any:
    for name in _NAMES:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ImportError("ResumeLoaders needs Lightning: pip install lightning")


_Callback: Any = _package().Callback


class ResumeLoaders(_Callback):  # type: ignore[misc]
    """A callback that gives each `tc.Loader` and `tc.torch_loader` its state when Lightning resumes from a checkpoint.

    Without it, Lightning forgets the state if `configure_optimizers` asks for `trainer.estimated_stepping_batches`; it counts
    an epoch as finished in which `max_steps` stopped it; and it expects batches of the same size.

    Checkpoints that were saved without the callback resume, too.
    """

    def __init__(self) -> None:
        self._states: list[Any] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the states of an earlier call of the trainer."""
        self._states = []

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the states of the loaders, and reopen an epoch that was not finished."""
        loops = checkpoint["loops"]["fit_loop"]
        self._states = loops["state_dict"].get("combined_loader", [])
        epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        is_counted = epochs["current"]["processed"] == epochs["current"]["ready"]
        if self._states and is_counted and batches["current"]["ready"] and not batches["is_last_batch"]:
            for counts in epochs.values():
                counts["processed"] -= 1
                counts["completed"] = counts["processed"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the states, and count the batches of the epoch in this loader's batches."""
        if not self._states:
            return
        loaders = _package().utilities.CombinedLoader(trainer.train_dataloader).flattened
        stateful = [each for each in loaders if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")]
        for loader, state in zip(stateful, self._states, strict=True):
            if isinstance(loader, BaseLoader):
                loader.load_state_dict(state)
        self._states = []
        longest = max(loaders, key=len)
        if isinstance(longest, BaseLoader):
            batches = trainer.fit_loop.epoch_loop.batch_progress
            counts = batches.current
            used = 0 if batches.is_last_batch else len(longest) - longest.num_batches_left
            counts.completed += used - counts.ready  # one less than `ready` in the hook of a step
            counts.ready = counts.started = counts.processed = used
