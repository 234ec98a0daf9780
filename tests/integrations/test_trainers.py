"""Batches in Lightning, accelerate and torch's own loaders, which move, pin and rebuild them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate, default_convert
from torch.utils.data._utils.pin_memory import pin_memory

import wds_tensorcache as tc
from tests.reading.batches import write
from wds_tensorcache.reading.batch.leaves import Leaves

INSTALL = "needs Lightning and accelerate: pip install lightning accelerate"
pl: Any = pytest.importorskip("lightning.pytorch", reason=INSTALL)
accelerate: Any = pytest.importorskip("accelerate", reason=INSTALL)
from accelerate.utils import recursively_apply, send_to_device  # noqa: E402
from lightning.fabric.utilities import move_data_to_device  # noqa: E402
from lightning_utilities import apply_to_collection  # noqa: E402

# their warnings: about workers, devices and deprecations
pytestmark = pytest.mark.filterwarnings("ignore")
COUNT = 11
MOVERS = {"lightning": move_data_to_device, "accelerate": send_to_device}


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


def test_trainers_rebuild_only_tensors(cache: Any) -> None:
    for batch in batches(cache).values():
        kinds = {type(leaf) for leaf in leaves_of(batch)}
        assert Leaves in kinds
        for kind in kinds:
            assert not issubclass(kind, (Sequence, Mapping))
            assert not dataclasses.is_dataclass(kind)


@pytest.mark.parametrize("mover", MOVERS)
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
            assert not isinstance(old, Leaves) or old._list is None
    assert num_tensors >= 4
    assert num_infos == {"loader": 1, "nested": 2}.get(kind, 0)
    if mover == "accelerate":
        on_meta = [leaf for leaf in after if isinstance(leaf, torch.Tensor) and leaf.is_meta]
        assert len(on_meta) >= num_tensors * 3 // 4


@pytest.mark.parametrize("kind", ["stack", "list", "pad", "filled", "loader", "nested"])
def test_functions_over_collections(cache: Any, kind: str) -> None:
    batch = batches(cache)[kind]
    old = [leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)]
    doubled = apply_to_collection(batch, torch.Tensor, lambda tensor: tensor * 2)
    new = [leaf for leaf in leaves_of(doubled) if isinstance(leaf, torch.Tensor)]
    assert all(torch.equal(a * 2, b) for a, b in zip(old, new, strict=True))
    found = recursively_apply(lambda tensor: tensor, batch)
    assert [type(leaf) for leaf in leaves_of(found)] == [type(leaf) for leaf in leaves_of(batch)]


def test_lazy_tensors_are_moved(cache: Any) -> None:
    for mover in MOVERS.values():
        moved = mover({"x": cache[3]["x"], "name": cache[3]["name"]}, torch.device("meta"))
        assert type(moved["x"]) is torch.Tensor
        assert moved["x"].is_meta
        assert moved["name"] == "n3"
    assert cache[3]["x"].to(torch.float64).tolist() == [3.0] * 4


def test_batches_of_pipelines_are_moved(tmp_path: Path) -> None:
    dali = pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI: pip install nvidia-dali-cuda130")
    wds: Any = pytest.importorskip("webdataset")
    import dali_plugin

    samples = [{k: v for k, v in sample(i).items() if k not in ("pair", "frozen", "range")} for i in range(8)]
    folder = write(tmp_path, samples, max_samples=8)
    stream = wds.DataPipeline(wds.SimpleShardList(f"{folder}/000.tar"), wds.tarfile_to_samples(), tc.decode())
    with tc.open(folder) as opened:
        sources = {
            "cache": lambda: dali_plugin.fn.tensorcache(opened, ["x"]),
            "stream": lambda: dali_plugin.fn.tensorcache(stream, ["x"]),
            "native": lambda: dali_plugin.fn.native_reader([f"{folder}/000.tar"]),
        }
        for nodes in sources.values():
            made = dali.pipeline_def(nodes, batch_size=4, num_threads=1, device_id=None)()
            for mover in MOVERS.values():
                batch = next(dali_plugin.TensorCacheIterator(made))
                moved = mover(batch, torch.device("meta"))
                assert moved["x"].is_meta
                assert list(moved["name"]) == list(batch["name"])
                assert sorted(batch["name"])[0].startswith("n")


# --- torch ---


def test_torch_pins_and_converts(cache: Any) -> None:
    batch, info = batches(cache)["loader"]
    for name in ("name", "range", "pair", "frozen", "deque", "set", "none"):
        assert pin_memory(batch[name]) is batch[name]
        assert default_convert(batch[name]) is batch[name]
        assert batch[name]._list is None
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


# --- BatchInfo ---


def test_a_record_is_immutable_and_pickles(cache: Any) -> None:
    loader = tc.Loader(cache, 4, shuffle=True, last_batch="pad")
    infos = [info for _, info in loader.with_info()]
    info = infos[-1]
    assert info.is_padding.tolist() == [False, False, False, True]
    for change in (lambda: setattr(info, "step", 5), lambda: delattr(info, "step"), lambda: setattr(info, "other", 5)):
        with pytest.raises(AttributeError, match="immutable"):
            change()
    with pytest.raises(TypeError, match="unhashable"):
        hash(info)
    assert repr(info).startswith("BatchInfo(4 samples, 1 of them padding, indices=[")
    for made in (pickle.loads(pickle.dumps(info)), copy.copy(info), copy.deepcopy(info)):
        assert type(made) is tc.BatchInfo
        assert made == info
        assert made.cache is None
        assert made.keys == info.keys
        assert made.is_padding.tolist() == info.is_padding.tolist()
        assert made != infos[0]
    assert info == info.to("cpu")
    others = [
        tc.BatchInfo(info.indices[::-1], info.is_padding, 0, 2, None, cache),
        tc.BatchInfo(info.indices, ~info.is_padding, 0, 2, None, cache),
        tc.BatchInfo(info.indices, info.is_padding, 1, 2, None, cache),
        tc.BatchInfo(info.indices, info.is_padding, 0, 3, None, cache),
        tc.BatchInfo(info.indices, info.is_padding, 0, 2, "a", cache),
        tc.BatchInfo(info.indices, info.is_padding, 0, 2, None, cache[::-1]),
        tc.BatchInfo(info.indices[:2], info.is_padding[:2], 0, 2, None, cache),
        info.keys,
        None,
    ]
    assert [other == info for other in others] == [False] * len(others)
    assert tc.BatchInfo(info.indices, info.is_padding, 0, 2, None, cache) == info
    seeded = next(iter(tc.Loader(cache, 4, seed=3).with_info()))[1]
    assert tc.BatchInfo(seeded.indices, seeded.is_padding, 0, 0, None, cache) != seeded  # other seeds


# --- whole trainers ---


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: dict[str, list[str]] = {"fit": [], "validate": [], "predict": []}

    def look(self, stage: str, given: Any) -> torch.Tensor:
        batch = given[0] if isinstance(given, (list, tuple)) else given
        self.seen[stage] += list(batch["name"])
        assert [f"n{int(row[0])}" for row in batch["x"]] == list(batch["name"])
        return self.layer(batch["x"]).square().mean()  # type: ignore[no-any-return]

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = self.look("fit", batch)
        self.log("loss", loss, batch_size=4)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("validation loss", self.look("validate", batch), batch_size=4)

    def predict_step(self, batch: Any, number: int) -> Any:
        return self.look("predict", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


KINDS = ["Loader", "torch_loader", "torch_loader, workers", "read_batch", "workers"]


def loader_of(kind: str, cache: Any) -> Any:
    if kind == "Loader":
        return tc.Loader(cache, 4, shuffle=True, last_batch="drop")
    if kind.startswith("torch_loader"):
        return tc.torch_loader(cache, 4, shuffle=True, last_batch="drop", num_workers=2 * kind.endswith("workers"))
    workers = 2 if kind == "workers" else 0
    numbers: Any = range(8)
    return DataLoader(numbers, batch_size=4, collate_fn=cache.read_batch, num_workers=workers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer(cache: Any, plain: Any, kind: str) -> None:
    cache = plain if kind.endswith("workers") else cache
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = Model()
    trainer.fit(model, loader_of(kind, cache), loader_of(kind, cache))
    assert len(trainer.predict(model, loader_of(kind, cache))) == 2
    assert {stage: len(names) for stage, names in model.seen.items()} == {"fit": 16, "validate": 16, "predict": 8}
    assert len(set(model.seen["predict"])) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_an_accelerator(cache: Any, kind: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, loader = accelerator.prepare(model, loader_of(kind, cache))
    names: list[str] = []
    for given in loader:
        batch = given[0] if isinstance(given, (list, tuple)) else given
        names += list(batch["name"])
        accelerator.backward(model(batch["x"]).mean())
    assert len(names) == len(set(names)) == 8


class Stopped(Exception):
    """An exception that stops the trainer in the middle of an epoch."""


@pytest.mark.parametrize(
    ("before", "after"), [("Loader", "torch_loader, workers"), ("torch_loader, workers", "Loader")]
)
def test_a_trainer_resumes_in_the_middle_of_an_epoch(
    cache: Any, plain: Any, tmp_path: Path, before: str, after: str
) -> None:
    """Lightning saves and loads the loader's state, also into another kind of loader."""

    class Stopping(Model):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = super().training_step(batch, number)
            if len(self.seen["fit"]) == 12 and before == kind:
                raise Stopped
            return loss

    seen: list[str] = []
    for kind in (before, after):
        options: dict[str, Any] = {"shuffle": True, "last_batch": "drop"}
        made: Any = (
            tc.Loader(plain, 2, **options) if kind == "Loader" else tc.torch_loader(plain, 2, num_workers=2, **options)
        )
        model = Stopping()
        saving = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="last", every_n_train_steps=1, save_top_k=-1)
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            callbacks=[saving],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        if kind == before:
            with pytest.raises(Stopped):
                trainer.fit(model, made)
            trained = model.seen["fit"][:10]  # the sixth step was not saved
            seen += trained
        else:
            trainer.fit(model, made, ckpt_path=tmp_path / "last.ckpt")
            seen += model.seen["fit"]
    loader = tc.Loader(plain, 2, shuffle=True, last_batch="drop")
    expected = [name for _ in range(2) for batch in loader for name in batch["name"]]
    assert seen == expected


def test_an_accelerator_with_a_stateful_loader(plain: Any) -> None:
    """accelerate's own DataLoader has the state; the loader that it wraps raises an error that says so."""
    pytest.importorskip("torchdata", reason="needs torchdata: pip install torchdata")
    configuration = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)

    def prepared() -> tuple[Any, Any]:
        loader = tc.torch_loader(plain, 2, shuffle=True)
        return loader, accelerate.Accelerator(cpu=True, dataloader_config=configuration).prepare(loader)

    loader, made = prepared()
    names = [name for batch in tc.Loader(plain, 2, shuffle=True) for name in batch["name"]]
    for number, _ in enumerate(made, 1):
        if number == 2:
            state = copy.deepcopy(made.state_dict())
            break
    with pytest.raises(RuntimeError, match="another data loader iterates"):
        loader.state_dict()
    _, again = prepared()
    again.load_state_dict(state)
    assert [name for batch in again for name in batch["name"]] == names[4:]
