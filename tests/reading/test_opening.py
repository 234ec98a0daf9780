"""The sources that `tc.open` takes, and its errors for the rest."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.reading.batches import write
from tests.same import assert_same
from tests.shards.damage import change_manifest

COUNT = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "shards" / "train-%06d.tar", [diffusion_sample(i) for i in range(COUNT)], max_samples=5)
    return tmp_path / "shards"


def check(source: Any, numbers: range = range(COUNT), **options: Any) -> None:
    """Assert that `tc.open(source)` has the samples with these numbers."""
    with tc.open(source, **options) as cache:
        assert list(cache.keys()) == [f"{i:03d}" for i in numbers]
        for i, number in enumerate(numbers):
            assert_same(diffusion_sample(number), cache[i])
        assert len(cache.read_batch(range(len(cache)))["latent"]["samples"]) == len(numbers)


def test_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(str(folder) + "/")
    check(folder / "manifest.json")
    check(str(folder / "train-{000000..000002}.tar"))
    check(folder / "train-*.tar")
    check(folder / "train-00000[12].tar", range(5, COUNT))
    check(str(folder / "train-00000{[01],2*}.tar"))
    check(folder / "train-000001.tar", range(5, 10))
    check([folder / "train-000000.tar", str(folder / "train-{000001..000002}.tar")])
    check((folder,))
    check(folder, io="pread")
    with tc.open(str(folder / "train-{000002,000000}.tar")) as cache:  # the order is that of the list
        assert list(cache.keys()) == ["010", "011", "000", "001", "002", "003", "004"]
        assert cache.num_shards == 2
    monkeypatch.chdir(folder)
    check(".")
    check("manifest.json")
    check("train-000002.tar", range(10, 12))


def test_nothing_there(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    manifest = tmp_path / "none.json"
    manifest.write_text(json.dumps({"wids_version": 1, "shardlist": []}))
    for source, message in (
        (tmp_path / "nowhere", "nowhere does not exist"),
        (tmp_path / "nowhere.tar", "nowhere.tar does not exist"),
        (tmp_path / "nowhere.json", "nowhere.json"),
        (tmp_path / "nowhere" / "manifest.json", "manifest.json does not exist"),
        (folder / "train-{000000..000003}.tar", "train-000003.tar does not exist"),
        (folder / "test-*.tar", r"test-\*.tar matches no file"),
        (tmp_path / "empty", r"empty has neither manifest.json nor any \*.tar"),
        (manifest, "none.json lists no shards"),
        ([], "no shards: the list is empty"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            tc.open(source)


NO_SOURCE = TypeError, "expected a path, a pattern or a list of them"
UNKNOWN = ValueError, "expected a local path, or a url that begins with one of az://, .*, s3://"


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        *((source, {}, *NO_SOURCE) for source in (None, 3, b"x.tar", {"a": "x.tar"}, [None])),
        *((url, {}, *UNKNOWN) for url in ("ftp://me:s3cret@example.org/x.tar", "file:///{0..3}.tar", ["pipe://cat x"])),
        ("x.tar", {"num_threads": 0}, ValueError, "num_threads=0, expected at least 1"),
        ("x.tar", {"io": "direct"}, ValueError, "io='direct', expected 'auto' or 'pread'"),
        ("x.tar", {"max_open_files": 0}, ValueError, "max_open_files=0, expected at least 1"),
    ],
    ids=str,
)
def test_wrong_arguments(source: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        tc.open(source, **options)
    assert "s3cret" not in str(raised.value)


def test_names(write_shard: Callable[..., str]) -> None:
    def shard(name: str, *fields: str) -> str:
        members = {f"{field}tensorcache": torch.tensor(len(field)) for field in fields}
        return write_shard([{"__key__": "0", "json": 0, **members}], name)

    neither, one, both = shard("0.tar"), shard("1.tar", "text."), shard("2.tar", "text.", "")
    several = [neither, one, both]
    for source, name, expected in ((one, None, [5]), (several, "text", [5, 5]), (several, "", [0])):
        assert [lazy.load() for lazy in tc.open(source, cache=name)] == expected
    for source, name, error, message in (
        (several, None, KeyError, r"0.tar and 2 more: caches '', 'text': choose one with --cache \(cache=…\)"),
        (both, None, KeyError, r"2.tar: caches '', 'text': choose one with --cache \(cache=…\)"),
        (neither, "", KeyError, r"0.tar: no cache ''; there are"),
        ([one, both], "image", KeyError, r"1\.tar and 1 more: no cache 'image'; there are '', 'text'"),
        (one, "Text", tc.InvalidKeyError, "cache name 'Text' must match"),
    ):
        with pytest.raises(error, match=message):
            tc.open(source, cache=name)


def test_shards_of_another_size(folder: Path) -> None:
    with open(folder / "train-000001.tar", "ab") as file:
        file.write(b"x")
    message = r"train-000001.tar has \d+ bytes, but .*manifest.json says \d+: one of the two is stale"
    with pytest.raises(tc.FormatError, match=message):
        tc.open(folder)


@pytest.mark.parametrize("count", [0, 4, 6])
@pytest.mark.parametrize("table", ["caches", "shards", "shards alone"])
def test_another_number_of_samples(folder: Path, count: int, table: str) -> None:
    message = (
        f"train-000001.tar: 5 samples in all, but the manifest lists {count}: one of the two is wrong; `tensorcache v"
    )
    if table == "caches":
        count = count or 1
        counts = {"train-000001.tar": {"": count}}
        change_manifest(folder, lambda document: document["tensorcache"]["caches"].update(counts))
        message = f"train-000001.tar: 5 samples with cache '', but the manifest lists {count}"
    else:
        change_manifest(folder, lambda document: document["shardlist"][1].update(nsamples=count))
    if table == "shards alone":
        change_manifest(folder, lambda document: document["tensorcache"].pop("caches"))
        with pytest.raises(tc.FormatError, match=message):
            tc.open(folder)
        return
    with tc.open(folder) as cache:
        assert_same(diffusion_sample(4), cache[4])
        for copy in (cache, pickle.loads(pickle.dumps(cache))):
            for use in (lambda c: c[5], lambda c: c["000"], lambda c: c.read_batch([5]), lambda c: c.schema):
                with pytest.raises(tc.FormatError, match=message):
                    use(copy)


@pytest.mark.parametrize("counts", [3, {"": 0}, {"": "5"}, {"": None}, {"": 1 << 63}, {"": True}], ids=repr)
def test_counts_that_are_none(folder: Path, counts: Any) -> None:
    change_manifest(folder, lambda document: document["tensorcache"]["caches"].update({"train-000001.tar": counts}))
    message = r"manifest.json: train-000001.tar has caches .*, expected numbers of samples"
    with pytest.raises(tc.FormatError, match=message):
        tc.open(folder)


@pytest.mark.parametrize("link", [True, False])
def test_a_manifest_lists_a_missing_shard(folder: Path, tmp_path: Path, link: bool) -> None:
    os.remove(folder / "train-000001.tar")
    if link:
        (folder / "train-000001.tar").symlink_to("nowhere")
    for source in (folder, folder / "manifest.json", [folder]):
        with pytest.raises(FileNotFoundError, match=r"manifest\.json.*'train-000001\.tar'.*tc\.repair") as caught:
            tc.open(source)
        assert isinstance(caught.value, tc.MissingShardError)
        assert isinstance(caught.value, tc.FormatError)
        assert (caught.value.kind, caught.value.errno) == ("missing", errno.ENOENT)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), again.errno) == (tc.MissingShardError, str(caught.value), errno.ENOENT)
    fault = tc.verify(folder).faults[0]
    assert (fault.kind, os.path.basename(fault.shard)) == ("missing", "train-000001.tar")
    assert tc.repair(folder, tmp_path / "out").num_missing
    assert list(tc.open(tmp_path / "out").keys()) == [f"{i:03d}" for i in range(COUNT) if i // 5 != 1]


def test_a_shard_that_went_since(folder: Path) -> None:
    path = folder / "train-000000.tar"
    cache = tc.open(folder)
    other, listed_nowhere = (pickle.loads(pickle.dumps(each)) for each in (cache, tc.open(path)))
    os.remove(path)
    message = r"train-000000\.tar: the shard does not exist"
    listed = rf"{message}, but \S+/manifest\.json lists it; .*tc\.repair"
    for each in (cache, other, cache[4::-1], tc.join([cache])):
        for read in (lambda each=each: each[0], lambda each=each: each.read_batch([0])):
            with pytest.raises(tc.MissingShardError, match=listed):
                read()
    with pytest.raises(tc.MissingShardError, match=f"{message}; copy it again$"):
        listed_nowhere[0]
