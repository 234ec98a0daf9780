"""The callback with which Lightning resumes exactly. It restores the states of loaders, and Lightning's counters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from wds_tensorcache.training.loader import BaseLoader

# the package that the script has imported, because the classes of the two packages do not mix
_IMPORTED = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
_INSTALLED = "lightning.pytorch" if find_spec("lightning") else "pytorch_lightning"
_NAME = _IMPORTED[0] if _IMPORTED else _INSTALLED
try:
    _lightning: Any = import_module(_NAME)
except ImportError as exc:
    raise ImportError(f"ResumeLoaders needs {_NAME}, which cannot be imported ({exc}): pip install lightning") from exc


class ResumeLoaders(_lightning.Callback):  # type: ignore[misc]
    """A callback that resumes loaders exactly when Lightning loads a checkpoint.

    It resumes each `tc.Loader` and `tc.torch_loader`. Without the callback, Lightning counts an epoch that `max_steps` has
    stopped as finished, and expects batches of the same size as before. It also forgets the loaders' states if
    `configure_optimizers` uses `trainer.estimated_stepping_batches`. Checkpoints that were saved without it resume, too.

    It works with the package that was imported before this module: `lightning.pytorch` or `pytorch_lightning`. If neither was,
    it prefers `lightning`. If neither is installed, importing this module raises ImportError.

    Raises (when training starts):
        ValueError: A state belongs to a loader with other samples or settings, or to another number of loaders.
    """

    _last: Sequence[Any] = ()  # the loaders' states at the end of training

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget the loaders' states from an earlier call of the trainer."""
        self._states: list[Any] = []
        if stage == "fit":
            self._last = ()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the loaders' states."""
        # `trainer.validate` and `trainer.test` make Lightning forget its loaders
        self._last = [loader.state_dict() for loader in _stateful_loaders(trainer)]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the states; count the batches of an unfinished step as unused."""
        loops = checkpoint["loops"]["fit_loop"]
        if self._last:
            loops["state_dict"].setdefault("combined_loader", self._last)
        states, batches = loops["state_dict"].get("combined_loader", []), loops["epoch_loop.batch_progress"]
        if not states or batches["current"]["processed"] == batches["current"]["ready"]:
            return
        for loader, state in zip(_stateful_loaders(trainer), states, strict=True):
            if isinstance(loader, BaseLoader):
                state.update(loader._sampler._plan.state(loader._sampler._before))
        for counts in (batches["total"], batches["current"]):
            counts.update(dict.fromkeys(counts, counts["processed"]))
        batches["is_last_batch"] = False

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the checkpoint's loader states, and correct Lightning's counters of epochs."""
        loops = checkpoint["loops"]["fit_loop"]
        self._states = loops["state_dict"].get("combined_loader", [])
        epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        is_over = epochs["current"]["processed"] == epochs["current"]["started"]
        if not self._states or not is_over or not batches["current"]["ready"]:
            return
        if batches["is_last_batch"]:
            # With `max_steps`, Lightning would end this epoch once more, without batches, and count it as the next epoch.
            batches["current"] = dict.fromkeys(batches["current"], 0)
            batches["is_last_batch"] = False
        else:
            for counts in epochs.values():
                counts["processed"] -= 1
        for counts in epochs.values():
            counts["completed"] = counts["processed"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the states into the loaders, and correct Lightning's counters."""
        fit = trainer.fit_loop
        if fit.restarted_mid_epoch and fit.epoch_progress.current.processed == fit.epoch_progress.current.ready:
            fit.reset_restart_stage()  # Lightning has just counted this epoch as finished, but would not count the next one
        states, self._states = self._states, []
        if not states:
            return
        stateful = _stateful_loaders(trainer)
        if len(states) != len(stateful):
            raise ValueError(
                f"the checkpoint has states of {len(states)} loaders, but {len(stateful)} loaders have a state"
            )
        pairs = zip(stateful, states, strict=True)
        ours = [(loader, state) for loader, state in pairs if isinstance(loader, BaseLoader)]
        for loader, state in ours:
            loader.load_state_dict(state)
        longest = max((loader for loader, _ in ours), key=len, default=None)
        if longest is None or len(longest) < trainer.num_training_batches:
            return  # Lightning counts the batches of another loader
        batches = trainer.fit_loop.epoch_loop.batch_progress
        if longest._sampler._continues:
            if len(longest) > trainer.num_training_batches and not batches.is_last_batch:
                return  # Lightning's epochs begin anywhere in the epochs of the loader
        else:
            # after some resumes, Lightning counts one epoch less
            epochs = trainer.fit_loop.epoch_progress
            num_missing = 0 if batches.is_last_batch else max(0, longest._sampler.epoch - epochs.current.processed)
            for progress in (epochs.total, epochs.current):
                for name, count in vars(progress).items():
                    setattr(progress, name, count + num_missing)
        counts = batches.current
        is_over = batches.is_last_batch or not counts.ready
        used = 0 if is_over else len(longest) - longest.num_batches_left
        # after a checkpoint in a hook of a batch, `completed` is one less than the other counters
        counts.completed += used - counts.ready
        counts.ready = counts.started = counts.processed = used


def _stateful_loaders(trainer: Any) -> list[Any]:
    """Return the training loaders whose states Lightning saves."""
    loaders = _lightning.utilities.CombinedLoader(trainer.train_dataloader).flattened
    return [loader for loader in loaders if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")]
