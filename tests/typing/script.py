"""A script as users write it, checked by `mypy --strict`, and run; `assert_type` says what each call gives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import wds_tensorcache as tc
from wds_tensorcache.checking.report import Fault, RepairReport, Report
from wds_tensorcache.errors import Kind
from wds_tensorcache.integrations.torch_dataloader import TorchLoader
from wds_tensorcache.integrations.webdataset import Decode
from wds_tensorcache.integrations.webdataset_tar import TarSamples
from wds_tensorcache.reading.choose import Choices
from wds_tensorcache.reading.collate import Pad
from wds_tensorcache.reading.description import Description, TensorDescription, ValueDescription
from wds_tensorcache.reading.positions import KeysView
from wds_tensorcache.reading.schema import Entry, TensorSchema
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.training.plan import RowCounts
from wds_tensorcache.training.stats import LoaderStats
from wds_tensorcache.training.transforms import DropText, SampleMoments

Sample = dict[str, Any]  # what a sample has is not known to a type checker


def write(folder: Path) -> None:
    with tc.ShardWriter(folder / "%06d.tar", max_samples=4, fingerprint={"model": "vae"}) as sink:
        assert_type(sink, tc.ShardWriter)
        for i in range(8):
            sink.write(f"{i}", {"x": torch.full((1 + i % 2, 2), float(i)), "i": i}, json={"label": i})
    skeleton, tensors = tc.encode_sample({"x": torch.zeros(2)})
    assert_type(bytes(skeleton), bytes)
    tc.decode_sample(skeleton, tensors)
    assert_type(tc.write_index(folder / "000000.tar"), ShardIndex)


def read(folder: Path) -> None:
    with tc.open(folder, num_threads=1, expect={"model": "vae"}) as cache:
        assert_type(cache, tc.TensorCache)
        assert_type(cache, tc.TensorCache[Any])
        assert_type(cache[0], Any)
        assert_type(cache["3"], Any)
        assert_type(cache[np.int64(3)], Any)
        assert_type(cache[1:3], tc.TensorCache)
        assert_type(cache[["1", "3"]], tc.TensorCache)
        assert_type(cache[torch.arange(2)], tc.TensorCache)
        assert_type(cache[np.array([True] * 8)], tc.TensorCache)
        assert_type(cache.keys(), KeysView)
        assert_type(cache.keys()[0], str)
        assert_type(cache.keys()[:2], KeysView)
        assert_type(cache.schema, dict[str, TensorSchema])
        assert_type(cache.schema["x"].num_samples + cache.schema["x"].nbytes, int)
        assert_type(cache.schema["x"].shape, tuple[int | tuple[int, int], ...] | None)
        assert_type(cache.describe(), Description)
        assert_type(cache.describe().tensors["x"], TensorDescription)
        assert_type(cache.describe().tensors["x"].shapes, dict[tuple[int, ...], int])
        assert_type(cache.describe().values["i"], ValueDescription)
        assert_type(cache.describe().values["i"].types, dict[str, int])
        assert_type(cache.select(["x"]), tc.TensorCache)
        assert_type(cache.filter(is_long), tc.TensorCache)
        assert_type(cache.members, dict[str, int])
        assert_type(cache.read_members([0, 1], "json"), list[bytes])
        assert_type(cache.fingerprint, dict[str, object])
        assert_type(len(cache) + cache.num_shards, int)
        assert_type("3" in cache, bool)
        assert_type(iter(cache), Iterator[Any])
    assert_type(DataLoader(tc.open(folder), batch_size=2, collate_fn=count), DataLoader[Any])
    again: tc.TensorCache[Sample] = tc.open([folder])
    assert_type(again[0], Sample)
    assert_type(again[:1][0], Sample)
    assert_type(next(iter(again)), Sample)


def is_long(entry: Entry) -> bool:
    assert_type(entry.key, str)
    assert_type(entry.shapes, dict[str, tuple[int, ...]])
    return entry.nbytes > 8


def batches(folder: Path) -> None:
    cache = tc.open(folder)
    assert_type(cache.read_batch([0, 2]), Any)
    assert_type(cache.read_batch(range(2), collate="pad", pad_value=-1), Any)
    assert_type(cache.read_batch(["0", "1"], "cpu", collate={"x": tc.pad(to=4), "*": "stack"}), Any)
    assert_type(tc.pad(to=512, value=0), Pad)
    batch, info = cache.read_batch_with_info(np.arange(2), collate="list")
    assert_type(batch, Any)
    assert_type(info, tc.BatchInfo)
    assert_type(info.keys, list[str])
    assert_type(info.is_padding, torch.Tensor)
    assert_type(info.shapes, dict[str, torch.Tensor])
    assert_type(info.indices, np.ndarray[tuple[int, ...], np.dtype[np.int64]])
    assert_type(info.epoch + info.step, int)
    assert_type(info.source, object)
    assert_type(info.seeds, np.ndarray[tuple[int, ...], np.dtype[np.int64]])
    assert_type(info.choices, Choices)
    assert_type(cache.read_batch([1, 0], choose={"y": ["x"]}, collate="list"), Any)
    assert_type(cache.read_batch([1, 0], collate=count), Any)
    assert_type(cache.read_batch_with_info([1, 0], collate=count), tuple[Any, tc.BatchInfo])
    assert_type(cache.read_tensors([0, 2]), dict[str, Any])
    assert_type(cache.nest([0, 2], {"x": torch.zeros(2)}), Any)


def count(samples: list[Any]) -> int:
    return len(samples)


def join(folder: Path, other: Path) -> None:
    cache = tc.open(folder)
    joined = tc.join({"a": cache, "b": other}, how="inner", keys={"b": str.lower})
    assert_type(joined, tc.JoinedCache)
    assert_type(joined[0], Any)
    assert_type(joined[1:], tc.JoinedCache)
    assert_type(joined.select("a.*"), tc.JoinedCache)
    assert_type(joined.filter(is_long), tc.JoinedCache)
    assert_type(joined.keys(), KeysView)
    assert_type(joined.schema, dict[str, TensorSchema])
    assert_type(joined.fingerprint, dict[str, object])
    assert_type(joined.read_batch_with_info([0, 2]), tuple[Any, tc.BatchInfo])
    either: tc.Cache = cache if len(cache) > 8 else joined
    assert_type(either.read_members([0], "json"), list[bytes])
    assert_type(either[:4], tc.Cache)
    with tc.join([cache]) as one:
        assert_type(one, tc.JoinedCache)


def train(folder: Path) -> None:
    cache = tc.open(folder)
    loader = tc.Loader(cache, batch_size=2, shuffle=True, collate={"x": tc.pad(to=[64, 128])})
    assert_type(loader, tc.Loader)
    assert_type(iter(loader), Iterator[Any])
    assert_type(loader.with_info(), Iterable[tuple[Any, tc.BatchInfo]])
    for batch, info in loader.with_info():
        assert_type(batch, Any)
        assert_type(info, tc.BatchInfo)
    torch_loader = tc.torch_loader(cache, 2, collate="list")
    assert_type(torch_loader, TorchLoader)
    rows: DataLoader[Any] = torch_loader
    assert_type(len(rows), int)
    assert_type(len(loader), int)
    assert_type(loader.epoch, int)
    mixed = tc.Loader(mix={"a": cache, "b": cache}, repeats={"a": 2}, bucket_by=tc.by_length("x", [1, 2]))
    assert_type(mixed.count_rows(), RowCounts)
    assert_type(mixed.count_rows().num_padding, int)
    assert_type(loader.stats(), LoaderStats)
    assert_type(torch_loader.stats(), LoaderStats)
    assert_type(tc.sample_moments("x"), SampleMoments)
    assert_type(tc.drop_text(0.1, {"x": 0}), DropText)
    tc.Loader(cache, choose={"y": "x*"}, transform=[keep, tc.drop_text(0.1, {"y": 0})])


def keep(batch: dict[str, Any], info: tc.BatchInfo) -> dict[str, Any]:
    return batch


def build(folder: Path, other: Path) -> None:
    def encode(items: list[Any]) -> list[Sample]:
        return [{"y": torch.tensor(float(item))} for item in items]

    assert_type(tc.safe_key("photo (1).v2"), str)
    assert_type(tc.original_name("photo"), str)
    built = tc.build(
        range(8), encode, other, fingerprint={"model": "y"}, keys=[f"{i}" for i in range(8)], progress=False
    )
    assert_type(built, tc.TensorCache)
    assert_type(built.original_name("0"), str)
    tc.build(
        range(8), encode, other, fingerprint={"model": "y"}, progress=lambda done, total: print(total and done / total)
    )
    tc.drop(other, other.with_name("fewer"), ["1"])
    report = tc.verify(folder, progress=lambda done, total: print(done / max(1, total)))
    assert_type(report, Report)
    assert_type(report.faults, list[Fault])
    assert_type([fault.kind for fault in report.faults], list[Kind])
    assert_type(report.ok, bool)
    assert_type(tc.repair(folder, folder.with_name("repaired")), RepairReport)


def stream(folder: Path) -> None:
    assert_type(tc.decode(), Decode)
    assert_type(tc.tarfile_to_samples(), TarSamples)
    assert_type(tc.encoder(), Callable[[dict[str, Any]], dict[str, Any]])
    assert_type(tc.ResumablePipeline(folder), tc.ResumablePipeline)


def dali(folder: Path) -> None:
    import dali_plugin

    source = dali_plugin.TensorCacheSource(tc.open(folder)[::2], batch_size=2)
    assert_type(source, dali_plugin.TensorCacheSource)
    assert_type(source.num_batches, int)
    assert_type(source.tensors, list[str])


def make_mistakes(cache: tc.TensorCache, info: tc.BatchInfo) -> None:
    """Only checked: mypy also reports an `ignore` without a mistake."""
    cache.reed_batch([0])  # type: ignore[attr-defined]
    info.indizes  # type: ignore[attr-defined]  # noqa: B018
    cache.keys()[0] + 1  # type: ignore[operator]
    tc.open(3)  # type: ignore[arg-type]
    tc.join(cache, how="outer")  # type: ignore[arg-type]


if __name__ == "__main__":
    here = Path(sys.argv[1])
    write(here / "cache")
    build(here / "cache", here / "built")
    for use in (read, batches, train, stream):
        use(here / "cache")
    join(here / "cache", here / "built")
    if "dali" in sys.argv[2:]:
        dali(here / "cache")
