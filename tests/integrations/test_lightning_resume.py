"""Resuming in Lightning: the loader continues with the samples that were not used, whichever checkpoint it is."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.integrations.trainers import QUIET, models, pl, resume_loaders
from tests.reading.batches import write

# theirs: about workers, devices and deprecations; ours are errors
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:.*set_epoch")]
COUNT, BATCH = 40, 2
STEPS = COUNT // BATCH
MAKE: dict[str, Any] = {"Loader": tc.Loader, "torch_loader": tc.torch_loader}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("cache")
    write(folder / "x.tar", {f"{i:03d}": {"x": torch.full((4,), float(i))} for i in range(COUNT)})
    with tc.open(folder) as opened:
        yield opened


def fit(loaders: Any, *callbacks: Any, path: Any = None, has_schedule: bool = False, **options: Any) -> Any:
    """Train, and return the trainer and the batches."""
    has_checkpoints = any(isinstance(callback, pl.callbacks.ModelCheckpoint) for callback in callbacks)
    options = {"enable_checkpointing": has_checkpoints} | options
    trainer, model = pl.Trainer(callbacks=list(callbacks), **QUIET, **options), models.BatchesModel(has_schedule)
    trainer.fit(model, loaders, ckpt_path=path)
    return trainer, model.seen


def make(cache: Any, kind: str = "Loader", batch_size: int = BATCH) -> Any:
    return MAKE[kind](cache, batch_size, shuffle=True)


def whole(cache: Any, num_epochs: int = 3) -> list[Any]:
    """Return the batches of an uninterrupted run."""
    loader = make(cache)
    return [batch["x"][:, 0].int().tolist() for _ in range(num_epochs) for batch in loader]


def every_step(folder: Path) -> Any:
    return pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


# --- every checkpoint resumes exactly ---


@pytest.mark.parametrize("kind", MAKE)
def test_with_a_schedule(cache: Any, tmp_path: Path, kind: str) -> None:
    """`estimated_stepping_batches` makes Lightning set up its loaders before it has their states, which it then forgets."""
    _, seen = fit(make(cache, kind), every_step(tmp_path), resume_loaders(), has_schedule=True, max_epochs=2)
    assert seen == whole(cache, 2)
    for step in (1, 7, STEPS - 1, STEPS, STEPS + 7):
        path = tmp_path / f"step={step}.ckpt"
        trainer, rest = fit(make(cache, kind), resume_loaders(), path=path, has_schedule=True, max_epochs=2)
        assert seen[:step] + rest == seen
        assert (trainer.global_step, trainer.current_epoch) == (2 * STEPS, 2)


@pytest.mark.parametrize("saved", ["save_checkpoint", "save_last"])
@pytest.mark.parametrize("limit", [{"max_steps": 3 * STEPS}, {"max_epochs": 3}], ids=str)
def test_after_max_steps(cache: Any, tmp_path: Path, saved: str, limit: dict[str, int]) -> None:
    """Lightning counts the epoch in which it stops as finished; the loader continues it."""
    saving = [pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)] if saved == "save_last" else []
    for stop in (14, STEPS, STEPS + 14):
        trainer, seen = fit(make(cache), *saving, max_steps=stop)
        if saved == "save_checkpoint":
            trainer.save_checkpoint(tmp_path / "last.ckpt")
        trainer, rest = fit(make(cache), resume_loaders(), path=tmp_path / "last.ckpt", **limit)
        assert seen + rest == whole(cache)
        assert trainer.current_epoch == 3 or "max_steps" in limit
        (tmp_path / "last.ckpt").unlink()


def test_saved_after_a_test(cache: Any, tmp_path: Path) -> None:
    """`trainer.test` and `trainer.validate` make Lightning forget the loaders whose states it saves."""
    model = models.BatchesModel()
    model.test_step = lambda *args: None
    for stop in (14, STEPS):
        trainer = pl.Trainer(max_steps=stop, callbacks=[resume_loaders()], enable_checkpointing=False, **QUIET)
        trainer.fit(model, make(cache))
        trainer.test(model, make(cache), verbose=False)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        _, rest = fit(make(cache), resume_loaders(), path=tmp_path / "last.ckpt", max_epochs=2)
        assert model.seen + rest == whole(cache, 2)
        model.seen.clear()


class Endless:
    """A sized loader without a state, whose batches do not matter."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"x": torch.zeros(1, 4)}] * len(self))

    def __len__(self) -> int:
        return STEPS


COMBINED: dict[str, Any] = {
    "none": lambda make: [],
    "one": lambda make: make(),
    "stateless": lambda make: pl.utilities.CombinedLoader(Endless()),
    "combined": lambda make: pl.utilities.CombinedLoader([make()]),
    "two": lambda make: pl.utilities.CombinedLoader([make(), make()]),
    "mixed": lambda make: pl.utilities.CombinedLoader([make(), Endless(), make()]),
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("loaders", COMBINED)
def test_loaders_alone_and_combined(cache: Any, tmp_path: Path, loaders: str, kind: str) -> None:
    """Two steps, `save_checkpoint`, two more: the same as four, as Lightning's tests ask of every loader with a state."""

    def both() -> Any:
        return COMBINED[loaders](lambda: make(cache, kind))

    trainer, seen = fit(both(), max_steps=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    states = torch.load(tmp_path / "two.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]
    num_states = {"none": 0, "stateless": 0, "two": 2, "mixed": 2}.get(loaders, 1)
    assert len(states.get("combined_loader", [])) == num_states
    _, rest = fit(both(), resume_loaders(), path=tmp_path / "two.ckpt", max_steps=4)
    if num_states:
        assert (seen, rest) == (whole(cache)[:2], whole(cache)[2:4])
    assert len(rest) == (0 if loaders == "none" else 2)


def test_a_second_fit_begins_anew(cache: Any, tmp_path: Path) -> None:
    """The states of a checkpoint are for one `fit`."""
    resume = resume_loaders()
    fit(make(cache), every_step(tmp_path), max_steps=3)
    trainer = pl.Trainer(max_epochs=1, callbacks=[resume], enable_checkpointing=False, **QUIET)
    model = models.BatchesModel()
    trainer.fit(model, make(cache), ckpt_path=tmp_path / "step=3.ckpt")
    assert model.seen == whole(cache, 1)[3:]
    _, seen = fit(make(cache), resume, max_epochs=1)
    assert seen == whole(cache, 1)


# --- without the callback ---

REMEDY = r"callbacks=\[ResumeLoaders\(\)\].*wds_tensorcache\.integrations\.lightning"


@pytest.mark.parametrize("kind", MAKE)
def test_a_forgotten_state_is_an_error(cache: Any, tmp_path: Path, kind: str) -> None:
    fit(make(cache, kind), every_step(tmp_path), has_schedule=True, max_epochs=2)
    for step, epoch, number in ((7, 0, 7), (STEPS + 7, 1, 7)):
        with pytest.raises(RuntimeError, match=rf"(?s)resumes epoch {epoch} after {number} batches.*{REMEDY}"):
            fit(make(cache, kind), path=tmp_path / f"step={step}.ckpt", has_schedule=True, max_epochs=2)
    for step in (STEPS, 2 * STEPS):  # at the end of an epoch, there is nothing to forget
        _, rest = fit(make(cache, kind), path=tmp_path / f"step={step}.ckpt", has_schedule=True, max_epochs=2)
        assert rest == whole(cache, 2)[step:]


@pytest.mark.parametrize("limit", [{"max_steps": 3 * STEPS}, {"max_epochs": 3}], ids=str)
def test_an_epoch_that_only_seems_over_is_an_error(cache: Any, tmp_path: Path, limit: dict[str, int]) -> None:
    trainer, _ = fit(make(cache), max_steps=14)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(RuntimeError, match=rf"(?s)resumes .* after 14 batches.*{REMEDY}"):
        fit(make(cache), path=tmp_path / "last.ckpt", **limit)


def test_another_batch_size_is_an_error(cache: Any, tmp_path: Path) -> None:
    fit(make(cache), every_step(tmp_path), max_steps=8)
    with pytest.raises(RuntimeError, match=rf"(?s)resumes epoch 0 after 8 batches.* batch 4 of epoch 0.*{REMEDY}"):
        fit(make(cache, batch_size=4), path=tmp_path / "step=8.ckpt", max_epochs=2)


@pytest.mark.parametrize("every", ["step", "epoch", "at the end"])
@pytest.mark.parametrize("batch_size", [1, BATCH, 4])
def test_another_batch_size_at_the_end_of_an_epoch(cache: Any, tmp_path: Path, batch_size: int, every: str) -> None:
    """Lightning continues an epoch after the checkpoint of its last step if it has more batches than before."""
    options: dict[str, Any] = {"every_n_train_steps": STEPS} if every == "step" else {"every_n_epochs": 1}
    callback = pl.callbacks.ModelCheckpoint(tmp_path, filename="last", **options)
    callbacks = [callback] if every != "at the end" else []
    trainer, _ = fit(make(cache), *callbacks, max_steps=STEPS)
    if every == "at the end":
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    loader = make(cache, batch_size=batch_size)
    if every == "step" and batch_size == 1:
        with pytest.raises(RuntimeError, match=rf"(?s)after {STEPS} batches.* batch 0 of epoch 1.*{REMEDY}"):
            fit(loader, path=tmp_path / "last.ckpt", max_epochs=2)
        return
    _, rest = fit(loader, path=tmp_path / "last.ckpt", max_epochs=2)
    assert sorted(number for batch in rest for number in batch) == list(range(COUNT))


def test_checkpoints_that_lightning_handles_need_no_callback(cache: Any, tmp_path: Path) -> None:
    _, seen = fit(make(cache), every_step(tmp_path), max_epochs=2)
    for step in (1, 7, STEPS - 1, STEPS, STEPS + 7):
        _, rest = fit(make(cache), path=tmp_path / f"step={step}.ckpt", max_epochs=2)
        assert seen[:step] + rest == seen


def fit_until(stop: int, saving: Any, *loaders: Any, path: Any = None, **options: Any) -> Any:
    """Train until the model is killed after `stop` batches, and return the trainer and the batches."""
    trainer, model = pl.Trainer(callbacks=[saving, resume_loaders()], **QUIET, **options), models.KilledModel()
    model.stop = stop
    with contextlib.suppress(models.Killed):
        trainer.fit(model, *loaders, ckpt_path=path)
    return trainer, model.seen


@pytest.mark.parametrize("has_validation", [False, True])
@pytest.mark.parametrize(
    "options", [{"max_epochs": 4}, {"max_epochs": -1, "max_steps": 4 * STEPS}], ids=["epochs", "steps"]
)
def test_killed_twice(cache: Any, tmp_path: Path, options: dict[str, Any], has_validation: bool) -> None:
    """First at the end of an epoch, with its checkpoint or that of its last batch, then in the middle of the next epoch."""

    def run(stop: int, path: Any = None, **saved: Any) -> list[Any]:
        saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **saved)
        loaders = [make(cache), *[make(cache)] * has_validation]
        seen: list[Any] = fit_until(stop, saving, *loaders, path=path, **options)[1]
        return seen

    expected = whole(cache, 4)
    for saved in ({}, {"every_n_train_steps": STEPS}):
        seen = run(STEPS + 1, **saved)[:STEPS]
        seen += run(2, tmp_path / f"step={STEPS}.ckpt", every_n_train_steps=1)
        seen += run(-1, tmp_path / f"step={STEPS + 2}.ckpt", every_n_train_steps=1)
        assert seen == expected
        for path in tmp_path.glob("*.ckpt"):
            path.unlink()


@pytest.mark.parametrize("limit", [5, STEPS])
@pytest.mark.parametrize("on_early_exit", ["next_epoch", "continue"])
@pytest.mark.parametrize("saved", ["batch", "validation", "epoch"])
def test_resumed_twice_at_an_epochs_end(cache: Any, tmp_path: Path, saved: str, on_early_exit: str, limit: int) -> None:
    """From the checkpoint of the last batch, of the validation after it, or of the end of the epoch."""

    def run(stop: int, path: Any = None) -> Any:
        on = {"every_n_train_steps": 1} if saved == "batch" else {"save_on_train_epoch_end": saved == "epoch"}
        saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **on)
        loader = tc.Loader(cache, BATCH, shuffle=True, on_early_exit=on_early_exit)
        loaders = [loader, *[make(cache)] * (saved == "validation")]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "set_epoch")  # `limit_train_batches` leaves epochs early on purpose
            return fit_until(stop, saving, *loaders, path=path, max_epochs=4, limit_train_batches=limit)

    trainer, expected = run(-1)
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()
    seen = run(limit + 1)[1][:limit]
    seen += run(limit + 1, tmp_path / f"step={limit}.ckpt")[1][:limit]
    resumed, rest = run(-1, tmp_path / f"step={2 * limit}.ckpt")
    assert seen + rest == expected
    assert len(expected) == 4 * limit
    assert (resumed.global_step, resumed.current_epoch) == (trainer.global_step, trainer.current_epoch)


@pytest.mark.parametrize("kind", MAKE)
def test_the_batch_of_a_failed_step_is_used_again(cache: Any, tmp_path: Path, kind: str) -> None:
    saving, path = pl.callbacks.OnExceptionCheckpoint(tmp_path), tmp_path / "on_exception.ckpt"
    for stop in (0, 7, STEPS - 1, STEPS + 7):
        seen = fit_until(stop, saving, make(cache, kind), max_epochs=2)[1]
        trainer, rest = fit(make(cache, kind), resume_loaders(), path=path, max_epochs=2)
        assert seen + rest == whole(cache, 2)
        assert (trainer.global_step, trainer.current_epoch) == (2 * STEPS, 2)
        path.unlink()  # Lightning would resume the next training from it


def test_a_failed_step_without_the_callback_is_an_error(cache: Any, tmp_path: Path) -> None:
    model = models.KilledModel()
    model.stop = 7
    with pytest.raises(models.Killed):
        pl.Trainer(callbacks=[pl.callbacks.OnExceptionCheckpoint(tmp_path)], **QUIET).fit(model, make(cache))
    with pytest.raises(RuntimeError, match=r"(?s)after 7 batches.* batch 8 of epoch 0"):
        fit(make(cache), path=tmp_path / "on_exception.ckpt", max_epochs=2)


def test_at_the_start_of_an_epoch(cache: Any, tmp_path: Path) -> None:
    def save(trainer: Any, _: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    _, seen = fit(make(cache), pl.callbacks.LambdaCallback(on_train_epoch_start=save), max_epochs=3)
    for epoch in range(3):
        trainer, rest = fit(make(cache), resume_loaders(), path=tmp_path / f"{epoch}.ckpt", max_epochs=3)
        assert (rest, trainer.current_epoch) == (seen[epoch * STEPS :], 3)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_a_shorter_loader(cache: Any, tmp_path: Path, mode: str, kind: str) -> None:
    """Within an epoch, Lightning repeats the shorter loaders, takes None for their batches, or ends the epoch early."""

    class All(models.BatchesModel):  # type: ignore[misc]
        def training_step(self, batches: Any, number: int) -> torch.Tensor:
            self.seen.append([batch and batch["x"][:, 0].int().tolist() for batch in batches])
            return self.layer(batches[0]["x"]).mean()  # type: ignore[no-any-return]

    def run(callbacks: list[Any], path: Any = None) -> list[Any]:
        trainer, model = pl.Trainer(callbacks=[*callbacks, every_step(tmp_path)], max_epochs=2, **QUIET), All()
        loaders = pl.utilities.CombinedLoader([make(cache, kind), make(cache[:10], kind), make(cache[:26], kind)], mode)
        with warnings.catch_warnings():
            # "min_size" ends epochs early
            warnings.filterwarnings("ignore", r"set_epoch\(1\) leaves out (30 of the 40|16 of the 26) samples")
            trainer.fit(model, loaders, ckpt_path=path)
        return model.seen  # type: ignore[no-any-return]

    for callbacks in ([], [resume_loaders()]):
        seen = run(callbacks)
        # also from the end of an epoch, where a shorter loader may be in the middle of its second pass
        for step in (*range(1, len(seen) - 1, 4), len(seen) // 2):
            assert seen[:step] + run(callbacks, tmp_path / f"step={step}.ckpt") == seen
        # from a checkpoint of a resumed run
        assert run(callbacks, tmp_path / f"step={len(seen) - 1}.ckpt") == seen[-1:]


def test_a_shorter_loader_without_its_state_is_an_error(cache: Any, tmp_path: Path) -> None:
    def both() -> Any:
        return pl.utilities.CombinedLoader([make(cache), make(cache[:10])], "max_size_cycle")

    fit(both(), every_step(tmp_path), has_schedule=True, max_epochs=1)
    with pytest.raises(RuntimeError, match=rf"(?s)resumes epoch 0 after 13 batches.*{REMEDY}"):
        fit(both(), path=tmp_path / "step=13.ckpt", has_schedule=True, max_epochs=1)


def test_limited_epochs_warn_once(cache: Any, tmp_path: Path) -> None:
    """`limit_train_batches` leaves each epoch early on purpose; a resumed run has the same batches."""
    with pytest.warns(UserWarning, match=r"set_epoch\(1\) leaves out 30 of the 40 samples of epoch 0") as caught:
        _, seen = fit(make(cache), every_step(tmp_path), max_epochs=3, limit_train_batches=5)
    assert sum("set_epoch" in str(each.message) for each in caught) == 1
    assert seen == [whole(cache)[epoch * STEPS + number] for epoch in range(3) for number in range(5)]
    for step in (3, 5, 8):
        for callbacks in ([], [resume_loaders()]):
            options: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 5}
            with pytest.warns(UserWarning, match=r"set_epoch\(\d\) leaves out 30 of the 40 samples"):
                _, rest = fit(make(cache), *callbacks, path=tmp_path / f"step={step}.ckpt", **options)
            assert seen[:step] + rest == seen


def test_limited_validation_does_not_warn(cache: Any) -> None:
    trainer = pl.Trainer(max_epochs=3, limit_val_batches=2, enable_checkpointing=False, **QUIET)

    class Validated(models.BatchesModel):  # type: ignore[misc]
        def validation_step(self, batch: Any, number: int) -> None:
            self.log("loss", self.layer(batch["x"]).mean(), batch_size=BATCH)

    trainer.fit(Validated(), make(cache), make(cache))


# --- the other name of Lightning ---

OTHER = """
import sys, warnings
warnings.simplefilter("ignore")
import pytorch_lightning
from wds_tensorcache.integrations.lightning import ResumeLoaders
assert issubclass(ResumeLoaders, pytorch_lightning.Callback)
assert "lightning.pytorch" not in sys.modules
pytorch_lightning.Trainer(accelerator="cpu", logger=False, callbacks=[ResumeLoaders()])
"""


def test_pytorch_lightning() -> None:
    pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning: pip install pytorch-lightning")
    subprocess.run([sys.executable, "-c", OTHER], check=True, capture_output=True)
