"""Ranks divide the shards of streams; with equal steps, every rank has the same number of batches, also after a resume."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import webdataset as wds
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_tensorcache as tc
from tests.children import finish, start

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",
    "ignore:epoch .* steps used:UserWarning",
    "ignore:'set_vital':UserWarning",
)
SIZES = (2, 23, 4, 5, 9)  # samples in each shard

# made before torch.distributed is initialized, as for trainers that start their processes themselves


def write(path: Path, sizes: tuple[int, ...]) -> str:
    """Write shards of these numbers of samples, and their manifest."""
    for shard, size in enumerate(sizes):
        with wds.TarWriter(str(path / f"{shard}.tar")) as sink:
            for i in range(size):
                sink.write({"__key__": f"{shard}-{i}", "cls": i})
    shards = [
        {"url": f"{shard}.tar", "nsamples": size, "filesize": (path / f"{shard}.tar").stat().st_size}
        for shard, size in enumerate(sizes)
    ]
    manifest = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("steps"), SIZES)


def pipeline(folder: str, steps: Any, rank: int = 0, world_size: int = 1, **options: Any) -> Any:
    return tc.ResumablePipeline(folder, batch_size=2, steps=steps, rank=rank, world_size=world_size, **options)


def count(loader: Any) -> list[int]:
    return [len(batch["__key__"]) for batch in loader]


@pytest.mark.parametrize("steps", ["shortest", "longest", 7])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_rank_has_the_same_steps(folder: str, steps: Any, world_size: int) -> None:
    streams = [pipeline(folder, steps, rank, world_size) for rank in range(world_size)]
    (length,) = {len(stream) for stream in streams}
    for _ in range(2):
        batches = [[batch["__key__"] for batch in stream] for stream in streams]
        assert [list(map(len, of_rank)) for of_rank in batches] == [[2] * length] * world_size
        # the longest rank leaves no sample out
        assert steps != "longest" or len({key for of_rank in batches for keys in of_rank for key in keys}) == sum(SIZES)


@pytest.mark.parametrize(
    ("stages", "options"), [((), {}), ((), {"collate": list}), ((wds.to_tuple("cls", "__position__"),), {})]
)
def test_batches_of_batches_are_refused(folder: str, stages: Any, options: dict[str, Any]) -> None:
    stream = tc.ResumablePipeline(folder, *stages, batch_size=2, **options)
    assert len(list(DataLoader(stream, batch_size=None))) == 22
    for options in ({}, {"batch_size": 4}):
        with pytest.raises(ValueError, match="items are batches: pass batch_size=None"):
            list(DataLoader(stream, **options))


@pytest.mark.parametrize("steps", ["longest", 30])
def test_resumed_at_every_step(folder: str, steps: Any) -> None:
    whole = [batch["__key__"] for batch in pipeline(folder, steps, 1, 2)]
    for taken in range(1, len(whole)):
        stream, resumed = pipeline(folder, steps, 1, 2), pipeline(folder, steps, 1, 2)
        head = [batch["__key__"] for _, batch in zip(range(taken), stream, strict=False)]
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert head + [batch["__key__"] for batch in resumed] == whole


@pytest.mark.parametrize(("steps", "num_used", "num_repeated", "num_left_out"), [(10, 20, 0, 23), (30, 43, 17, 0)])
def test_repeated_and_left_out_samples_are_counted(
    folder: str, steps: int, num_used: int, num_repeated: int, num_left_out: int
) -> None:
    stream = pipeline(folder, steps)
    with pytest.warns(UserWarning, match=f"{num_left_out} were left out") as told:
        epochs = [[key for batch in stream for key in batch["__key__"]] for _ in range(2)]
    keys = Counter(epochs[0])
    assert f"used {num_used} samples; {num_repeated} were repeated" in str(told[0].message)
    assert len(told) == 1
    assert len(keys) == num_used
    assert sum(keys.values()) - len(keys) == num_repeated == stream.num_repeated
    assert stream.num_left_out == num_left_out


def test_left_out_samples_after_a_resume_without_steps(folder: str) -> None:
    stream, resumed = pipeline(folder, None), pipeline(folder, None)
    next(iter(stream))
    resumed.load_state_dict(stream.state_dict())
    assert resumed.num_left_out == stream.num_left_out
    list(resumed)
    assert resumed.num_left_out == 0


def test_each_worker_warns_once(folder: str, tmp_path: Path) -> None:
    def note_warnings(worker: int) -> None:
        warnings.showwarning = lambda message, *_: (tmp_path / f"{worker} {time.time_ns()}").write_text(str(message))
        warnings.simplefilter("always")

    loader = DataLoader(pipeline(folder, 30), batch_size=None, num_workers=2, worker_init_fn=note_warnings)
    assert sum(len(list(loader)) for _ in range(3)) == 90
    noted = sorted(tmp_path.iterdir())
    assert [path.name[0] for path in noted] == ["0", "1"]
    assert all("were repeated" in path.read_text() for path in noted)


def test_stages_may_drop_samples(folder: str) -> None:
    stream = pipeline(folder, "longest", 0, 2, shuffle=False)
    select = wds.select(lambda sample: sample["__key__"].endswith("1"))
    kept = tc.ResumablePipeline(folder, select, batch_size=2, steps=len(stream), rank=0, world_size=2)
    assert count(kept) == [2] * len(stream)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "also pass batch_size="),
        ({"steps": 0, "batch_size": 2}, "expected 1 or more"),
        ({"steps": "most", "batch_size": 2}, "'shortest' or 'longest'"),
        ({"batch_size": 0}, "expected 1 or more"),
        ({"steps": "shortest", "batch_size": 3, "rank": 0, "world_size": 5}, "less than one batch"),
        ({"steps": "shortest", "batch_size": 2, "urls": ["0.tar"]}, "`tensorcache index FOLDER` writes a manifest"),
    ],
)
def test_wrong_use_says_what_to_do(
    folder: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message):
        tc.ResumablePipeline(**({"urls": folder} | options))


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_ranks_and_workers(folder: str, world_size: int) -> None:
    for rank in range(world_size):
        for num_workers in range(5):
            for steps in ("shortest", "longest", 7):
                stream = pipeline(folder, steps, rank, world_size)
                assert count(DataLoader(stream, batch_size=None, num_workers=num_workers)) == [2] * len(stream)


def test_resumed_with_workers(folder: str) -> None:
    def loader() -> Any:
        return StatefulDataLoader(pipeline(folder, 30), batch_size=None, num_workers=2)

    whole = [batch["__key__"] for batch in loader()]
    first, second = loader(), loader()
    head = [batch["__key__"] for _, batch in zip(range(25), first, strict=False)]
    second.load_state_dict(first.state_dict())
    assert head + [batch["__key__"] for batch in second] == whole


@pytest.mark.long
def test_torch_distributed_is_initialized_later(tmp_path: Path, folder: str) -> None:
    """As by trainers that get a stream and then start their processes."""

    def read(rank: int) -> None:
        stream = tc.ResumablePipeline(folder, collate=list)
        stepped = tc.ResumablePipeline(folder, batch_size=2, steps="shortest")
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=rank, world_size=2)
        for number, context in enumerate((None, "fork", "spawn")):
            loader = DataLoader(stream, None, num_workers=context is not None, multiprocessing_context=context)
            stream.set_epoch(0)
            (tmp_path / f"{number} {rank}").write_text(" ".join(sample["__key__"] for sample in loader))
        wanted = pipeline(folder, "shortest", rank, 2)
        assert [batch["__key__"] for batch in stepped] == [batch["__key__"] for batch in wanted]
        dist.barrier()

    assert finish([start(lambda rank=rank: read(rank)) for rank in range(2)]) == [0, 0]  # type: ignore[misc]
    for number in range(3):
        keys = [key for rank in range(2) for key in (tmp_path / f"{number} {rank}").read_text().split()]
        assert sorted(keys) == sorted(f"{shard}-{i}" for shard, size in enumerate(SIZES) for i in range(size))


def test_a_rank_without_samples_is_an_error(tmp_path: Path) -> None:
    """Also if a manifest lists its shards; ranks that have samples would wait for it."""
    write(tmp_path, (5, 0, 6))
    lengths: list[Any] = []
    for rank in range(3):
        stream = pipeline(str(tmp_path), 2, rank, 3, shuffle=False, collate=list)
        try:
            lengths.append(len(list(stream)))
        except ValueError as error:
            lengths.append(str(error))
    assert lengths.pop(1).startswith(
        "no item left the last stage in a pass over the shards of rank 1, but its worker needs 2"
    )
    assert lengths == [2, 2]


# --- without steps ---


def keys_of(urls: str, rank: int, world_size: int, num_workers: int) -> list[str]:
    stream = tc.ResumablePipeline(urls, rank=rank, world_size=world_size)
    return [sample["__key__"] for sample in DataLoader(stream, batch_size=None, num_workers=num_workers)]


@pytest.mark.parametrize(("num_shards", "num_workers", "counts"), [(3, 4, [8, 4]), (5, 0, [8, 8, 4])])
def test_ranks_share_the_shards_before_workers(
    tmp_path: Path, num_shards: int, num_workers: int, counts: list[int]
) -> None:
    """No rank goes without a shard while another has several."""
    urls = write(tmp_path, (4,) * num_shards)
    parts = [keys_of(urls, rank, len(counts), num_workers) for rank in range(len(counts))]
    assert [len(part) for part in parts] == counts
    assert len({key for part in parts for key in part}) == 4 * num_shards


def test_ranks_have_about_as_many_bytes(folder: str) -> None:
    """The same shards, whatever the number of workers."""
    parts = [[{key[0] for key in keys_of(folder, rank, 2, workers)} for rank in range(2)] for workers in (0, 1, 3)]
    assert parts[0] == parts[1] == parts[2]
    nbytes = {path.stem: path.stat().st_size for path in Path(folder).glob("*.tar")}
    first, second = (sum(nbytes[shard] for shard in part) for part in parts[0])
    assert abs(first - second) <= max(nbytes.values())
