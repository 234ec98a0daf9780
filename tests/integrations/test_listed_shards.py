"""Streams of a folder compare its shards, and the state of an earlier run, with what the manifest lists."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.remote.servers.http_server import HttpServer

COUNT = 30


def write(folder: Path, numbers: Any = range(COUNT), *, add: int = 0, **options: Any) -> Path:
    """Write 10 samples to a shard, of equal lengths for all numbers below 1,000."""
    options = {"dali_index": False, **options}  # with an `.idx`, `tc.open` also warns
    with tc.ShardWriter(folder / "a-%06d.tar", max_samples=10, fsync=False, **options) as sink:
        for i in numbers:
            sink.write(f"{i:03d}", torch.full((8,), i + add), txt=b"x")
    return folder


def erase_end(path: Path, num_samples: int) -> None:
    """Overwrite all but the first samples, in place, with zeros."""
    with tarfile.open(path) as tar:
        begin = tar.getmembers()[3 * num_samples].offset
    content = path.read_bytes()
    path.write_bytes(content[:begin] + bytes(len(content) - begin))


def keys(stream: Any) -> list[str]:
    return [sample["__key__"] for sample in stream]


def stream(source: Any, *stages: Any, **options: Any) -> tc.ResumablePipeline:
    return tc.ResumablePipeline(str(source), *stages, shuffle=False, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "a")


@pytest.fixture(params=["folder", "url"])
def publish(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[], str]]:
    """Return a function that returns the path or url of the folder, as it is now."""
    if request.param == "folder":
        yield lambda: str(folder)
        return
    with HttpServer() as server:

        def upload() -> str:
            for path in folder.iterdir():
                server.put(f"a/{path.name}", path.read_bytes())
            return f"{server.url}/a/"

        yield upload


LOST = (
    r"a-000001\.tar: 3 samples in all, but the manifest lists 10: one of the two is wrong; `tensorcache verify` .*reports "
    r"whether the shard is damaged; if it is not, run `tensorcache index .*a-000001\.tar` \(tc\.write_index\)"
)


def test_a_shard_that_lost_samples(folder: Path, publish: Callable[[], str]) -> None:
    erase_end(folder / "a-000001.tar", 3)
    with pytest.raises(tc.FormatError, match=LOST) as caught:
        keys(stream(source := publish()))
    if source != str(folder):
        assert "`tensorcache verify` (tc.verify) of a local copy" in str(caught.value)
        return
    message = "3 samples with cache '', but the manifest lists 10"
    with tc.open(folder) as cache, pytest.raises(tc.FormatError, match=message):
        cache[15]


@pytest.mark.parametrize("options", [{}, {"select_files": lambda name: int(name[:3]) % 2 == 0}], ids=["all", "some"])
def test_resumed_in_the_middle_of_a_shard(publish: Callable[[], str], options: dict[str, Any]) -> None:
    whole = keys(stream(source := publish(), **options))
    first = iter(pipe := stream(source, **options))
    head = [next(first)["__key__"] for _ in range(7)]
    state = json.loads(json.dumps(pipe.state_dict()))
    (second := stream(source, **options)).load_state_dict(state)
    assert head + keys(second) == whole


def test_samples_that_are_dropped_count(folder: Path) -> None:
    def rename(name: str) -> str:
        if name.startswith("004"):
            raise ValueError(name)
        return f"one.{name}"

    assert len(keys(stream(folder, select_files=lambda name: name.startswith("00")))) == 10
    assert keys(stream(folder, rename_files=rename, handler=wds.ignore_and_continue)) == ["one"] * 3
    assert len(keys(stream(folder, wds.select(lambda sample: sample["__key__"] > "014")))) == 15
    erase_end(folder / "a-000001.tar", 3)
    with pytest.raises(tc.FormatError, match=LOST):
        keys(stream(folder, select_files=lambda name: name.startswith("00")))
    with pytest.warns(UserWarning, match="3 samples in all"):
        assert len(keys(stream(folder, handler=wds.warn_and_continue))) == 23


@pytest.mark.parametrize("footer", [True, False], ids=["footer", "no index"])
def test_a_shard_of_another_run(tmp_path: Path, footer: bool) -> None:
    a, b = write(tmp_path / "a", footer=footer), write(tmp_path / "b", add=500, footer=footer)
    shutil.copy(b / "a-000001.tar", a)
    if not footer:  # only the digest of an index shows it
        assert len(keys(stream(a))) == COUNT
        return
    message = (
        r"a-000001\.tar: another shard has replaced the one that was listed: its index has the digest "
        r"\w{16}, but .*manifest\.json lists \w{16}; copy "
    )
    with pytest.raises(tc.FormatError, match=message + "the right shard again"):
        keys(stream(a))


@pytest.mark.parametrize("numbers", [range(COUNT)[::-1], range(COUNT)], ids=["another order", "other values"])
def test_a_state_of_a_cache_that_was_rebuilt(folder: Path, publish: Callable[[], str], numbers: Any) -> None:
    first = iter(pipe := stream(publish()))
    for _ in range(13):
        next(first)
    state = pipe.state_dict()
    stream(publish()).load_state_dict(state)
    write(folder, numbers, add=500, overwrite=True)
    with pytest.raises(ValueError, match="the state belongs to a different stream"):
        stream(publish()).load_state_dict(state)
