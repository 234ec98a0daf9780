"""Batches in Lightning, accelerate and torch's own loaders, which move, pin and rebuild them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate, default_convert
from torch.utils.data._utils.pin_memory import pin_memory

import wds_tensorcache as tc
from tests.integrations.trainers import QUIET, SkippableLoader, models, moving, pl, resume_loaders
from tests.reading.batches import write

accelerate: Any = pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
from accelerate.utils import send_to_device  # noqa: E402

# their warnings: about workers, devices and deprecations
pytestmark = pytest.mark.filterwarnings("ignore")
COUNT = 11


def move_by_lightning(batch: Any, device: torch.device) -> Any:
    return moving.move_data_to_device(batch, device)


MOVERS: dict[str, Any] = {"lightning": move_by_lightning, "accelerate": send_to_device}
each_mover = pytest.mark.parametrize("mover", [pytest.param("lightning", marks=pytest.mark.long), "accelerate"])


class Pair(NamedTuple):
    tensor: Any
    value: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: Any
    value: int


ALLOW = [Pair, Frozen]


def sample(i: int) -> dict[str, Any]:
    x = torch.full((4,), float(i))
    return {
        "x": x,
        "name": f"n{i}",
        "range": range(i),
        "size": torch.Size([i, 2]),
        "deque": deque([i], maxlen=3),
        "set": {i},
        "none": None,
        "bytes": b"b%d" % i,
        "ordered": OrderedDict(y=x + 1, n=i),
        "tuple": (x + 2, (i, "t")),
        "deque of tensors": deque([x + 3, i]),
        "pair": Pair(i, i),
        "frozen": Frozen(i, i),
        "texts": np.array([f"é{i:02d}"]),
        "array": np.full(2, i),
    }


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Any]:
    folder = write(tmp_path, [sample(i) for i in range(COUNT)], allow=ALLOW)
    with tc.open(folder, allow=ALLOW) as opened:
        yield opened


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Any]:
    """A cache without ranges and frozen dataclasses, which Lightning cannot rebuild in the lists that workers send."""
    samples = [{k: v for k, v in sample(i).items() if k not in ("range", "pair", "frozen")} for i in range(COUNT)]
    with tc.open(write(tmp_path / "plain", samples)) as opened:
        yield opened


def batches(cache: Any) -> dict[str, Any]:
    with tc.Loader(cache, 4) as loader:
        pair = next(iter(loader.with_info()))
    return {
        "stack": cache.read_batch(range(4)),
        "list": cache.read_batch(range(4), collate="list"),
        "pad": cache.read_batch(range(4), collate="pad"),
        "filled": cache.nest(range(4), cache.read_tensors(range(4))),
        "loader": pair,
        "nested": {"both": [pair, pair]},
    }


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a batch in the order of a walk."""
    if isinstance(value, Mapping):
        return [leaf for part in value.values() for leaf in leaves_of(part)]
    if isinstance(value, (list, tuple, deque)):
        return [leaf for part in value for leaf in leaves_of(part)]
    return [value]


# --- trainers' walks over batches ---


@each_mover
@pytest.mark.parametrize("kind", ["stack", "list", "pad", "filled", "loader", "nested"])
def test_batches_are_moved(cache: Any, kind: str, mover: str) -> None:
    """Tensors move to the device, and no other value is decoded or rebuilt."""
    batch = batches(cache)[kind]
    moved = MOVERS[mover](batch, torch.device("meta"))
    before, after = leaves_of(batch), leaves_of(moved)
    assert len(before) == len(after)
    num_tensors = num_infos = 0
    for old, new in zip(before, after, strict=True):
        assert type(new) is type(old)
        if isinstance(old, torch.Tensor):
            num_tensors += 1
            assert old.device.type == "cpu"
            # accelerate leaves deques as they are
            assert new.is_meta or mover == "accelerate"
        elif isinstance(old, tc.BatchInfo):
            num_infos += 1
            assert new.is_padding.is_meta
            assert not old.is_padding.is_meta
            assert (new.keys, new.epoch, new.step, new.cache) == (old.keys, 0, 0, cache)
        else:
            assert new is old
    assert num_tensors >= 4
    assert num_infos == {"loader": 1, "nested": 2}.get(kind, 0)
    if mover == "accelerate":
        on_meta = [leaf for leaf in after if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        assert len(on_meta) >= num_tensors * 3 // 4


@each_mover
def test_lazy_tensors_are_moved(cache: Any, mover: str) -> None:
    moved = MOVERS[mover]({"x": cache[3]["x"], "name": cache[3]["name"]}, torch.device("meta"))
    assert type(moved["x"]) is torch.Tensor
    assert moved["x"].is_meta
    assert moved["name"] == "n3"
    assert cache[3]["x"].to(torch.float64).tolist() == [3.0] * 4


# --- torch ---


def test_torch_pins_and_converts(cache: Any) -> None:
    batch, info = batches(cache)["loader"]
    for name in ("name", "range", "pair", "frozen", "deque", "set", "none"):
        assert pin_memory(batch[name]) is batch[name]
        assert default_convert(batch[name]) is batch[name]
    assert pin_memory(info) is info
    assert default_convert(info) is info
    converted = default_convert(batch)
    assert torch.equal(converted["array"], torch.arange(4)[:, None].expand(4, 2))
    assert converted["name"] is batch["name"]


def test_torch_collates_batches(cache: Any) -> None:
    """Collate batches, as a DataLoader over steps with a batch size does; values collate like those of lists."""
    view = cache[["000", "001", "002", "003", "004", "005"]]
    names = ("x", "name", "ordered", "tuple", "bytes")
    view = view.select(["x", "ordered.*", "tuple.*"])
    loader = tc.Loader(view, 2)
    pairs = [({name: batch[name] for name in names}, info) for batch, info in loader.with_info()]
    collated, infos = default_collate(pairs)
    assert infos == [info for _, info in pairs]
    assert collated["x"].tolist() == [[[2.0 * i + j] * 4 for j in range(2)] for i in range(3)]
    assert collated["name"] == default_collate([["n0", "n1"], ["n2", "n3"], ["n4", "n5"]])
    assert collated["ordered"]["n"][1].tolist() == [1, 3, 5]
    with pytest.raises(RuntimeError, match=r"cannot stack LazyTensor\('1', shape=\[2, 3\]"):
        default_collate(tc.decode_sample(*tc.encode_sample([torch.ones(3), torch.zeros(2, 3)])))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            [torch.ones(2), None],
            TypeError,
            r"cannot batch None and LazyTensor\('x', shape=\[2\], dtype=torch\.float32\)",
        ),
        ([None, torch.ones(2)], TypeError, r"cannot batch None and LazyTensor\('x', "),
        ([torch.ones(2), [torch.ones(2)]], TypeError, r"cannot batch list and LazyTensor\('x', "),
        ([torch.ones(2), torch.ones(2).half()], RuntimeError, r"cannot stack LazyTensor\('x', .*float16\) onto "),
        ([torch.ones(2), torch.ones(3)], RuntimeError, r"cannot stack LazyTensor\('x', shape=\[3\].* onto "),
        ([np.ones(2), 1], TypeError, r"cannot batch int and LazyArray\('x', shape=\[2\], dtype=float64\)"),
        ([np.ones(2), np.ones(3)], RuntimeError, r"cannot stack LazyArray\('x', shape=\[3\].* onto LazyArray\('x', "),
    ],
)
def test_torch_does_not_collate_these(tmp_path: Path, values: list[Any], error: type[Exception], message: str) -> None:
    remedy = r".*tc\.torch_loader\(cache, batch_size=…, collate=…\)"
    with tc.open(write(tmp_path, [{"x": x} for x in values])) as cache, pytest.raises(error, match=message + remedy):
        next(iter(DataLoader(cache, 2)))  # type: ignore[arg-type]


# --- BatchInfo ---


def test_records_pickle(cache: Any) -> None:
    loader = tc.Loader(cache, 4, shuffle=True, last_batch="pad")
    infos = [info for _, info in loader.with_info()]
    info = infos[-1]
    assert info.is_padding.tolist() == [False, False, False, True]
    with pytest.raises(TypeError, match="unhashable"):
        hash(info)
    assert repr(info).startswith("BatchInfo(4 samples, 1 of them padding, indices=[")
    assert len(repr(tc.BatchInfo(np.arange(20_000), torch.zeros(20_000), source="y" * 10_000))) < 400
    for made in (pickle.loads(pickle.dumps(info)), copy.copy(info), copy.deepcopy(info)):
        assert made == info != infos[0]
        assert made.cache is None
        assert (made.keys, made.is_padding.tolist()) == (info.keys, info.is_padding.tolist())
    assert info == info.to("cpu")
    arguments = (info.indices, info.is_padding, 0, 2, None, cache)
    plain = tc.BatchInfo(*arguments)
    changes = (info.indices[::-1], ~info.is_padding, 1, 3, "a", cache[::-1])
    others = [tc.BatchInfo(*arguments[:at], change, *arguments[at + 1 :]) for at, change in enumerate(changes)]
    others += [tc.BatchInfo(info.indices[:2], info.is_padding[:2], *arguments[2:]), info.keys, None]
    assert [other == plain for other in others] == [False] * len(others)
    assert tc.BatchInfo(*arguments) == plain
    seeded = next(iter(tc.Loader(cache, 4, seed=3).with_info()))[1]
    assert tc.BatchInfo(seeded.indices, seeded.is_padding, 0, 0, None, cache) != seeded  # other seeds


# --- whole trainers ---


def make(kind: str, cache: Any, batch_size: int, **options: Any) -> Any:
    if kind == "Loader":
        return tc.Loader(cache, batch_size, **options)
    return tc.torch_loader(cache, batch_size, num_workers=2 * kind.endswith("workers"), **options)


def loader_of(kind: str, cache: Any) -> Any:
    if kind != "workers":
        return make(kind, cache, 4, shuffle=True, last_batch="drop")
    numbers: Any = range(8)
    return DataLoader(numbers, batch_size=4, collate_fn=cache.read_batch, num_workers=2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Loader", "torch_loader, workers", "workers"])
def test_a_trainer(cache: Any, plain: Any, kind: str) -> None:
    cache = plain if kind.endswith("workers") else cache
    trainer = pl.Trainer(max_epochs=2, enable_checkpointing=False, **QUIET)
    model = models.NamesModel()
    trainer.fit(model, loader_of(kind, cache), loader_of(kind, cache))
    assert len(trainer.predict(model, loader_of(kind, cache))) == 2
    assert {stage: len(names) for stage, names in model.seen.items()} == {"fit": 16, "validate": 16, "predict": 8}
    assert len(set(model.seen["predict"])) == 8


@pytest.mark.parametrize("kind", ["Loader", "torch_loader, workers", "workers"])
def test_an_accelerator(cache: Any, kind: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, loader = accelerator.prepare(model, loader_of(kind, cache))
    names: list[str] = []
    for loaded in loader:
        batch = loaded[0] if isinstance(loaded, (list, tuple)) else loaded
        names += list(batch["name"])
        accelerator.backward(model(batch["x"]).mean())
    assert len(names) == len(set(names)) == 8


def test_a_loader_that_skips_batches_has_no_state(plain: Any) -> None:
    loader = tc.torch_loader(plain, 2)
    next(iter(accelerate.skip_first_batches(accelerate.Accelerator(cpu=True).prepare(loader), 1)))
    with pytest.raises(
        RuntimeError, match="skip_first_batches made it, it has none: to resume, load this loader's state"
    ):
        loader.state_dict()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_not_skipped_twice(plain: Any, num_workers: int) -> None:
    """accelerate counts from the beginning of the epoch, also if a state is loaded."""
    loader = tc.torch_loader(plain, 2, shuffle=True, num_workers=num_workers)
    batches = [(list(batch["name"]), loader.state_dict()) for batch in loader]
    for number, (_, state) in enumerate(batches[:-1], 1):
        loader.load_state_dict(state)
        rest = [list(batch["name"]) for batch in accelerate.skip_first_batches(loader, number)]
        assert rest == [names for names, _ in batches[number:]]
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="used more batches of the epoch than the trainer skips"):
            next(iter(accelerate.skip_first_batches(loader, number - 1)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second", "before", "after"),
    [("torch_loader, workers", "Loader", 1, 4), ("Loader", "torch_loader", 4, 1)],
)
@pytest.mark.parametrize("saved", [{"every_n_train_steps": 1}, {"every_n_epochs": 1, "save_on_train_epoch_end": True}])
def test_a_trainer_resumes_with_steps_of_any_size(
    plain: Any, tmp_path: Path, saved: dict[str, Any], before: int, after: int, first: str, second: str
) -> None:
    """From each checkpoint, also from one at the end of an epoch, other loaders and batch sizes continue with the same samples.

    Lightning does not load the state of a loader that it saved at the end of an epoch; it calls `set_epoch`.
    """

    class Saving(models.NamesModel):  # type: ignore[misc]
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            self.seen["rows"] += batch["rows"]
            return super().training_step(batch, number)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["rows"] = list(self.seen["rows"])

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen["rows"] = checkpoint["rows"]

    def add_rows(batch: Any, info: tc.BatchInfo) -> Any:
        return batch | {"rows": [(info.epoch, *row) for row in zip(info.keys, info.seeds.tolist(), strict=True)]}

    def fit(kind: str, batch_size: int, callback: Any, **options: Any) -> list[Any]:
        model = Saving()
        model.seen["rows"] = []
        trainer = pl.Trainer(max_epochs=2, callbacks=[callback], enable_checkpointing=not options, **QUIET)
        by: dict[str, Any] = {"shuffle": True, "bucket_by": lambda entry: int(entry.key) % 2, "transform": add_rows}
        trainer.fit(model, make(kind, plain, batch_size, **by), loader_of(kind, plain), **options)
        return sorted(model.seen["rows"])

    saving = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", filename="{step}", save_top_k=-1, **saved)
    whole = fit(first, before, saving)
    assert len(set(whole)) == 2 * COUNT
    paths = list((tmp_path / "saved").glob("*.ckpt"))
    assert len(paths) == 2 * (1 if "every_n_epochs" in saved else {1: 11, 4: 4}[before])
    for path in paths:
        assert fit(second, after, resume_loaders(), ckpt_path=path) == whole


@pytest.mark.parametrize("is_stateful", [False, True])
def test_an_accelerator_on_one_process(plain: Any, is_stateful: bool) -> None:
    """As on several processes, `prepare` returns the loader itself, whose state follows the last batch used."""
    configuration = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=is_stateful)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
    made, again = accelerator.prepare(*(tc.torch_loader(plain, 2, shuffle=True) for _ in range(2)))
    names = [name for batch in tc.Loader(plain, 2, shuffle=True) for name in batch["name"]]
    for number, _ in enumerate(made, 1):
        if number == 2:
            break
    again.load_state_dict(made.state_dict())
    assert [name for batch in again for name in batch["name"]] == names[4:]


def test_accumulated_gradients_at_the_end_of_an_epoch(plain: Any) -> None:
    """The last batch of an epoch uses the gradients so far, also if another loop begins in between, or one is left."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, made, other = accelerator.prepare(torch.nn.Linear(4, 1), *(tc.torch_loader(plain, 2) for _ in range(2)))
    for _ in range(2):
        synced = []
        for number, _ in enumerate(made):
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
            if number == 1:
                assert len(list(other)) == 6
        assert synced == [False, False, False, True, False, True]
        assert not accelerator.gradient_state.in_dataloader
        next(iter(other))
        other.close()
        assert not accelerator.gradient_state.in_dataloader


def test_an_accelerators_device(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = accelerate.Accelerator(cpu=True).prepare(tc.torch_loader(plain, 2))
    monkeypatch.setitem(accelerate.PartialState._shared_state, "device", torch.device("meta"))
    batch, info = next(iter(made.with_info()))
    assert batch["x"].is_meta
    assert info.is_padding.is_meta
    unprepared, _ = next(iter(tc.torch_loader(plain, 2).with_info()))
    assert unprepared["x"].device.type == "cpu"


@pytest.mark.parametrize("options", [{"bucket_by": "x"}, {"weights": [*range(1, 24)]}, {"last_batch": "pad"}], ids=str)
@pytest.mark.parametrize("num_threads", [0, 2])
def test_accelerate_skips_batches(tmp_path: Path, options: dict[str, Any], num_threads: int) -> None:
    """From every step of two epochs: the same batches and states, without reading those that are skipped."""
    write(tmp_path / "x.tar", {f"{i:03d}": {"x": torch.full((1 + i % 3,), float(i)), "i": i} for i in range(23)})
    read: list[int] = []

    def note(batch: Any, info: tc.BatchInfo) -> Any:
        read.append(info.step)
        return batch

    def make() -> tc.Loader:
        return tc.Loader(cache, 4, shuffle=True, collate="pad", transform=note, num_threads=num_threads, **options)

    with tc.open(tmp_path / "x.tar") as cache:
        whole = make()
        expected = [[(batch["i"].tolist(), whole.state_dict()) for batch in whole] for _ in range(2)]
        for epoch, batches in enumerate(expected):
            for number in range(len(batches) + 1):
                loader = make()
                loader.set_epoch(epoch)
                read.clear()
                rest = accelerate.skip_first_batches(SkippableLoader(loader), number)
                rest.batch_sampler.batch_sampler.set_epoch(epoch)  # as the Trainer does
                found = [(batch["i"].tolist(), loader.state_dict()) for batch in rest]
                assert [rows for rows, _ in found] == [rows for rows, _ in batches[number:]]
                for (_, state), (_, right) in zip(found, batches[number:], strict=True):
                    assert state["position"]["counts"] == right["position"]["counts"]
                    assert state["position"]["epoch"] == right["position"]["epoch"]
                assert len(read) == len(found)
                if found:
                    loader.set_epoch(epoch + 1)
                    assert loader.epoch == epoch + 1
                    assert epoch or [batch["i"].tolist() for batch in loader] == [rows for rows, _ in expected[1]]
                loader.close()
                if number:  # trainers count from the beginning of the epoch, also if a state is loaded
                    loader.load_state_dict(batches[number - 1][1])
                    if number < len(batches):
                        rest = accelerate.skip_first_batches(SkippableLoader(loader), number)
                        assert [batch["i"].tolist() for batch in rest] == [rows for rows, _ in batches[number:]]
                        loader.load_state_dict(batches[number - 1][1])
                        with pytest.raises(ValueError, match="used more batches of the epoch than the trainer skips"):
                            next(iter(accelerate.skip_first_batches(SkippableLoader(loader), number - 1)))


def test_skipping_in_a_mix_with_weights(plain: Any) -> None:
    """Its epochs continue each other, so a new loader warns, and a loaded state continues."""

    def make() -> tc.Loader:
        return tc.Loader(mix={"a": (plain, 2), "b": (plain, 1)}, batch_size=3, shuffle=True)

    whole = make()
    states = [whole.state_dict() for _ in range(2) for _ in whole]
    middle, rest = len(whole) + 2, len(whole) - 2
    expected = make()
    expected.load_state_dict(states[middle - 1])
    names = [list(batch["name"]) for batch in expected]
    assert len(names) == rest
    loader = make()
    loader.load_state_dict(states[middle - 1])
    skipping = accelerate.skip_first_batches(SkippableLoader(loader), 2)
    skipping.batch_sampler.batch_sampler.set_epoch(1)  # as the Trainer does
    assert [list(batch["name"]) for batch in skipping] == names
    with pytest.warns(UserWarning, match="epoch 1 begins with the first samples of each cache"):
        make().set_epoch(1)


def test_batches_by_position_in_several_epochs(plain: Any) -> None:
    """A data loader that skips batches may be used again: each use is a whole epoch."""
    loader, expected = (tc.Loader(plain, 2, shuffle=True, collate="list") for _ in range(2))
    skipping = accelerate.skip_first_batches(SkippableLoader(loader), 0)
    epochs = [[list(batch["name"]) for batch in skipping] for _ in range(3)]
    assert epochs == [[list(batch["name"]) for batch in expected] for _ in range(3)]


def test_batches_by_position_after_another_state(plain: Any) -> None:
    """A run that goes back to a state, with the same adapter, has the batches after the state again."""
    loader = tc.Loader(plain, 2, shuffle=True)
    adapter, batches = SkippableLoader(loader), [(batch["name"], loader.state_dict()) for batch in loader]
    for number in (3, 3, 2):
        loader.load_state_dict(batches[number - 1][1])
        rest = [
            batch["name"] for batch, _ in zip(accelerate.skip_first_batches(adapter, number), range(2), strict=False)
        ]
        assert rest == [names for names, _ in batches[number : number + 2]]


def test_batches_by_position_after_other_weights(plain: Any) -> None:
    def run(adapt: Any) -> list[Any]:
        loader = tc.Loader(mix={"a": (plain[:5], 1), "b": (plain[5:], 1)}, batch_size=1)
        return [
            (batch["name"], batch["name"] == ["n2"] and loader.set_weights({"a": 0, "b": 1})) for batch in adapt(loader)
        ]

    assert run(lambda loader: accelerate.skip_first_batches(SkippableLoader(loader), 0)) == run(lambda loader: loader)


# --- training by iterations ---


@pytest.mark.long
@pytest.mark.parametrize(("kind", "callbacks"), [("Loader", []), ("Loader", [resume_loaders]), ("torch_loader", [])])
def test_limited_epochs_continue(plain: Any, tmp_path: Path, kind: str, callbacks: list[Any]) -> None:
    """Lightning's epochs of 4 batches see all 6 batches of the loader, also after each checkpoint and with `max_steps`."""

    def loader() -> Any:
        return make(kind, plain, 2, shuffle=True, on_early_exit="continue")

    unbroken = make("Loader", plain, 2, shuffle=True)
    expected = [name for _ in range(3) for batch in unbroken for name in batch["name"]]
    saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)

    def fit(num_steps: int, path: Path | None = None, *more: Any) -> Any:
        options = {"max_steps": num_steps, "limit_train_batches": 4, "default_root_dir": tmp_path / "root"} | QUIET
        trainer = pl.Trainer(callbacks=[*more, *(call() for call in callbacks)], **options)
        model = models.ValidatedModel()
        trainer.fit(model, loader(), tc.Loader(plain, 4), ckpt_path=path)
        return trainer, model

    trainer, model = fit(12, None, saving)
    assert (model.seen["fit"], model.num_validations, trainer.current_epoch) == (expected[:22], 3, 3)
    for step in (1, 4, 6, 7) if kind == "Loader" else (7,):
        trainer, resumed = fit(12, tmp_path / f"step={step}.ckpt")
        used = 2 * step - (step >= 6)  # the last batch of an epoch has 1 sample
        assert (resumed.seen["fit"], trainer.global_step) == (expected[used:22], 12)
        assert (resumed.num_validations, trainer.current_epoch) == (3 - step // 4, 3)
    checkpoint = torch.load(tmp_path / "step=7.ckpt", weights_only=False)
    del checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    torch.save(checkpoint, tmp_path / "stateless.ckpt")
    with pytest.raises(RuntimeError, match=r"^Lightning resumes after 7 batches, but this loader has no state of them"):
        fit(12, tmp_path / "stateless.ckpt")
