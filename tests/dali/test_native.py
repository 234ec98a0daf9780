"""DALI's own reader gives what the cache holds: every sample once, bit for bit, in the structure that was written."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import webdataset as wds

import dali_plugin
import wds_tensorcache as tc
from tests.dali.conftest import COUNT, sample
from tests.dali.pipelines import pipeline, unbatched
from tests.reading.batches import write
from tests.same import assert_same


def reader(paths: Any, batch_size: int = 6, **options: Any) -> Any:
    made = pipeline(lambda: dali_plugin.fn.native_reader(paths, **options), batch_size, enable_checkpointing=True)
    return dali_plugin.TensorCacheIterator(made)


@pytest.mark.parametrize("last_batch", ["short", "pad", "drop"])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 6), (2, 6), (3, 6), (3, 1), (3, 2)])
def test_epochs(folder: Path, last_batch: str, world_size: int, batch_size: int) -> None:
    options: dict[str, Any] = {"members": ["bin"], "last_batch": last_batch, "world_size": world_size}
    options |= {"shuffle_after_epoch": True} if world_size == 2 else {"shuffle": True, "initial_fill": 8}
    ranks = [reader(folder, batch_size, rank=rank, **options) for rank in range(world_size)]
    orders = []
    for _ in range(2):
        seen, counted, sizes = [], [], []
        for rank in ranks:
            count = 0
            sizes.append(0)
            for batch, others in rank:
                count += 1
                sizes[-1] += len(batch["id"])
                counted += [i for i, pad in zip(batch["id"], rank.is_padding.tolist(), strict=True) if not pad]
                for at, i in enumerate(batch["id"]):
                    assert_same(sample(i), unbatched(batch, at))
                    assert bytes(others["bin"][at].numpy()) == b"member %d" % i
                    seen.append(i)
            assert count == len(rank)
        if last_batch == "drop":
            assert len(set(seen)) == len(seen) == batch_size * (COUNT // world_size // batch_size) * world_size
        else:
            assert sorted(counted) == list(range(COUNT))
            assert len(set(sizes)) == 1
        if last_batch == "short":
            assert len(seen) - COUNT < world_size
        orders.append(seen)
    assert orders[0] != orders[1]


def test_names_with_leading_dots(folder: Path, tmp_path: Path) -> None:
    """A tar of `tar -c .` has `./` before each name, and keys do not."""
    path = next(folder.glob("*.tar"))
    with tarfile.open(path) as source, tarfile.open(tmp_path / "dotted.tar", "w") as archive:
        for member in source:
            content = source.extractfile(member)
            member.name = f"./{member.name}"
            archive.addfile(member, content)
    batches = reader(tmp_path / "dotted.tar", members=["bin"], last_batch="short")
    with tc.open(path) as cache:
        assert [i for batch, _ in batches for i in batch["id"]] == [sample["id"] for sample in cache]


def test_nothing_is_taken_from_another_device(folder: Path, cache: Any) -> None:
    """To look at arrays or bools of a batch on a GPU, the host would wait for all work that is queued."""
    names = ["arrays.0", "arrays.10", "tensors.bool", "tensors.bfloat16", "cond.0.0"]
    made = pipeline(lambda: dali_plugin.fn.native_reader(cache, tensors=names), 4)
    source = made.tensorcache_source
    packed, number = (torch.from_numpy(output.as_array()) for output in made.run())
    batch, _ = source.nest({"packed": packed.to("meta"), "packed_host": packed, "number": number})
    for tensor in (batch["tensors"]["bool"], batch["tensors"]["bfloat16"], *batch["cond"][0][0]):
        assert tensor.device.type == "meta"
    for at, kind in (("0", "?"), ("10", "U4")):
        assert batch["arrays"][at].dtype == kind
        assert batch["arrays"][at].tolist() == [sample(i)["arrays"][at].tolist() for i in range(4)]
    for path in ("elsewhere.tar", folder / "0.tar"):
        stale = torch.tensor([list(f"{path}:77:0.safetensors".encode())], dtype=torch.uint8)
        with pytest.raises(tc.FormatError, match="DALI's index of the shard is stale"):
            source.nest({"packed": packed[:1], "number": stale})


def test_shards_of_other_writers(folder: Path, tmp_path: Path) -> None:
    """No index of DALI's, samples of the shard without the cache, colons in names; and an index that was given."""
    shard = tmp_path / "a:1:b.tar"
    with wds.TarWriter(str(shard), encoder=tc.encoder()) as sink:
        for i in range(9):
            nested = {"tensorcache": {"x": torch.full((i % 3 + 1,), i), "i": i}} if i % 4 else {"bin": b"alone"}
            sink.write({"__key__": f"k:{i}", **nested})
    expected = [i for i in range(9) if i % 4]
    tc.write_index(shard)
    index = shutil.copy(shard.with_suffix(".idx"), tmp_path / "given")
    for index_paths in (None, [index]):
        shard.with_suffix(".idx").unlink(missing_ok=True)
        seen = []
        for batch in reader(shard, 4, index_paths=index_paths, last_batch="short"):
            for x, i in zip(batch["x"], batch["i"], strict=True):
                assert torch.equal(x, torch.full((i % 3 + 1,), i))
                seen.append(i)
        assert seen == expected


def test_unaligned_tensors_of_other_layouts(tmp_path: Path) -> None:
    """Samples in which a tensor before it moves it to another place, which is not a multiple of its elements."""
    tensors = [(torch.zeros(i % 2 * 3).to(torch.int8), torch.full((2,), i).to(torch.complex128)) for i in range(8)]
    write(tmp_path, [{"a": a, "z": z} for a, z in tensors], max_samples=8)
    batch = next(reader(tmp_path, 8))
    assert [len(a) for a in batch["a"]] == [0, 3] * 4
    assert torch.equal(batch["z"], torch.arange(8)[:, None].expand(8, 2).to(torch.complex128))
    batch = next(reader(tmp_path, 8, tensors=["z"]))
    assert list(batch) == ["z"]


def test_mistakes(folder: Path, cache: Any, tmp_path: Path) -> None:
    samples = [{"x": torch.ones(1)}, {"x": torch.ones(1), "mask": torch.ones(1)}]
    write(tmp_path, samples, lambda i: {} if i else {"bin": b""})
    for source, options, error, message in (
        (folder, {"tensors": ["scalr"]}, KeyError, "unknown tensor 'scalr'; there are 'scalar'"),
        (cache[2:], {}, ValueError, "is a view of some samples"),
        (tc.join({"a": cache, "b": cache}), {}, TypeError, "whole shards of one cache"),
        (cache, {"world_size": 21}, ValueError, "20 samples for world_size=21"),
        (cache, {"last_batch": "wrap"}, ValueError, "can only repeat the last sample"),
        (cache, {"index_paths": [__file__]}, ValueError, "existing file for each of 3 shards"),
        (
            tmp_path,
            {"tensors": ["x"], "members": ["bin"]},
            tc.BatchError,
            "1 of 2 samples have 'bin', .*; leave it out",
        ),
        (tmp_path, {}, tc.BatchError, "1 of 2 samples have 'mask', but DALI needs it in every sample; leave it out"),
    ):
        with pytest.raises(error, match=message):
            reader(source, **options)
    with pytest.raises(RuntimeError, match=r"native_reader\(\) makes nodes"):
        dali_plugin.fn.native_reader(cache)


@pytest.mark.parametrize("is_named", [False, True])
def test_stale_indexes_are_not_used(tmp_path: Path, is_named: bool) -> None:

    def index_of(count: int) -> str:
        samples = {str(i): {"x": np.arange(3), "i": i} for i in range(count)}
        return Path(write(tmp_path / "0.tar", samples, overwrite=True)).with_suffix(".idx").read_text()

    stale, good = index_of(3), index_of(300)
    lines = good.splitlines(keepends=True)
    lines[8] = lines[9]  # a sample would be lost
    changed = [good.replace("safetensors 1536", "safetensors 2048"), good.replace("152", "136"), "".join(lines)]
    for text in (stale, *changed, "v1.2 5", ""):
        (tmp_path / "0.idx").write_text(text)
        options = {"index_paths": [tmp_path / "0.idx"]} if is_named else {}
        batches = reader(tmp_path, 2, last_batch="short", **options)
        assert [i for batch in batches for i in batch["i"]] == list(range(300))


def test_shards_that_were_replaced(tmp_path: Path) -> None:
    """DALI opens the shards by their paths, after the cache has opened them."""

    def write_from(begin: int) -> None:
        write(tmp_path / "0.tar", {str(i): {"x": torch.full((4,), begin + i)} for i in range(9)}, overwrite=True)

    write_from(0)
    replaced = reader(tmp_path, 3)
    write_from(100)
    with pytest.raises(tc.FormatError, match=r"0\.tar: the shard was changed since it was opened; open it again"):
        next(replaced)
    kept = reader(tmp_path, 3)  # DALI keeps its map of the file
    assert next(kept)["x"][0, 0] == 100
    write_from(200)
    assert next(reader(tmp_path, 3))["x"][0, 0] == 200
    assert next(kept)["x"][0, 0] == 103


def test_foreign_members_and_shards_given_twice(tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / "0.tar"), encoder=tc.encoder()) as sink:
        sink.write({"__key__": "a", "tensorcache": {"x": torch.zeros(2)}})
        sink.write({"__key__": "b", "safetensors": safetensors.torch.save({"foreign": torch.ones(3)})})
        sink.write({"__key__": "c", "tensorcache": {"x": torch.ones(2)}})
    assert [batch["x"].tolist() for batch in reader(tmp_path, 1)] == [[[0, 0]], [[1, 1]]]
    (tmp_path / "1.tar").symlink_to(tmp_path / "0.tar")
    with pytest.raises(ValueError, match="a shard occurs twice"):
        reader(tmp_path)


@pytest.mark.parametrize(
    "name", ["pipe:touch OWNED #.tar", "file:x.tar", "s3:x.tar", "{a,b}.tar", "*.tar", "line\nfeed.tar", "a#%20.tar"]
)
def test_names_of_shards_are_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with open(name, "wb") as file, wds.TarWriter(file, encoder=tc.encoder()) as sink:
        sink.write({"__key__": "a", "tensorcache": {"x": torch.ones(2)}})
    for source in ("*.tar", "."):
        assert [batch["x"].tolist() for batch in reader(source, 1)] == [[[1, 1]]]
    os.rename(name, "\udcff.tar")
    with pytest.raises(ValueError, match=r"\\udcff.tar': DALI accepts only paths in UTF-8"):
        reader(".", 1)
    assert os.listdir() == ["\udcff.tar"]


def test_damaged_batches_count(tmp_path: Path) -> None:
    """The epoch ends after its last batch, also if the caller goes on after an error."""
    write(tmp_path / "0.tar", {str(i): {"x": torch.full((3,), i == 2)} for i in range(6)})
    content = (tmp_path / "0.tar").read_bytes()
    assert content.count(b"\1\1\1") == 1
    (tmp_path / "0.tar").write_bytes(content.replace(b"\1\1\1", b"\1\7\1"))
    batches = reader(tmp_path, 2)
    for _ in range(2):
        next(batches)
        with pytest.raises(tc.FormatError, match="^tensor 'x' of a batch with sample '2': a bool tensor holds bytes"):
            next(batches)
        next(batches)
        with pytest.raises(StopIteration):
            next(batches)
        batches.reset()
