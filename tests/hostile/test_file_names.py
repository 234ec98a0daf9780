"""Names of files are names: whatever a listing gives is opened as a local path, never run, fetched or expanded again."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc

RUN = "pipe:touch OWNED;cat good.tar #.tar"
NAMES = [
    RUN,
    *("http:x.tar", "https:#.tar", "file:x.tar", "hf:datasets.tar", "gs:bucket.tar", "ais:x.tar", "unknown+scheme:x.tar"),
    *("-rf.tar", "a::pipe:touch OWNED #.tar", "${HOME}.tar", "${base}.tar", "{a,b}.tar", "{pipe:touch OWNED #,b}.tar"),
    *("x{1..3}.tar", "half{.tar", "star*.tar", "q?.tar", "[ab].tar", "line\nfeed.tar", "100%d.tar", "a#b.tar", "a%41.tar"),
    *("{0}{url}.tar", "back\\slash\\{.tar", " blank .tar", "surrogate\udcff.tar", "é.tar", "a.index.tar"),
]  # fmt: skip


def write(path: str, of: str = "") -> None:
    with open(path, "wb") as file, wds.TarWriter(file, encoder=tc.encoder(), mtime=0) as sink:
        sink.write({"__key__": "0", "tensorcache": {"x": torch.ones(2), "of": of or os.path.basename(path)}})


def streamed(source: Any) -> list[str]:
    """Return the names of the files that a stream's samples are of."""
    return [sample["tensorcache"]["of"] for sample in tc.ResumablePipeline(source, tc.decode(), shuffle=False)]


def opened(source: Any) -> list[str]:
    return [sample["of"] for sample in tc.open(source)]


READERS = [streamed, opened]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, into which a command that a name holds would write."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("WDS_base", "pipe:touch OWNED #")
    return tmp_path / "here"


def fill(names: list[str]) -> list[str]:
    for name in names:
        write(name, *hexed([name]))
    return sorted(names)


def hexed(names: Iterable[str]) -> list[str]:
    return [name.encode("utf-8", "replace").hex() for name in names]


def list_in_manifest(path: str, urls: list[str]) -> None:
    shards = [{"url": url, "nsamples": 1, "filesize": os.path.getsize(url)} for url in urls]
    Path(path).write_text(json.dumps({"wids_version": 1, "shardlist": shards}))


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("source", [".", "*.tar", "./*.tar", "{[!.]*,good}.tar", "*"], ids=str)
def test_listings(here: Path, read: Any, source: str) -> None:
    names = fill(["good.tar", *NAMES])
    assert sorted(read(source)) == sorted(hexed([*names, "good.tar"] if "good" in source else names))
    assert not (here / "OWNED").exists()


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("source", ["manifest.json", "*.json", ".", "manifest.{json,json}"])
def test_manifests(here: Path, read: Any, source: str) -> None:
    names = fill([name for name in ["good.tar", *NAMES] if "\udcff" not in name])
    list_in_manifest("manifest.json", names)
    assert sorted(read(source)) == sorted(hexed(names * (2 if "{" in source else 1)))
    assert not (here / "OWNED").exists()


@pytest.mark.parametrize("read", READERS)
def test_braces(here: Path, read: Any) -> None:
    with pytest.raises(OSError, match="pipe"):
        read("{pipe://;touch OWNED #,a}.tar")
    fill(["a.tar", "good.tar", RUN, "pipe:touch OWNED #.tar"])
    assert read("{pipe:touch OWNED #,a}.tar") == hexed(["pipe:touch OWNED #.tar", "a.tar"])
    assert read("{a,pipe:touch OWNED;cat good.tar #}.tar") == hexed(["a.tar", RUN])
    os.remove("pipe:touch OWNED #.tar")
    with pytest.raises(FileNotFoundError):
        read("{pipe:touch OWNED #,a}.tar")
    assert not (here / "OWNED").exists()


def by_webdataset(source: Any) -> list[str]:
    pipeline = wds.DataPipeline(wds.SimpleShardList(source), tc.tarfile_to_samples(), tc.decode())
    return [sample["tensorcache"]["of"] for sample in pipeline]


@pytest.mark.parametrize("read", [*READERS, by_webdataset])
def test_lists_of_names_that_are_there(here: Path, read: Any) -> None:
    """Names from `os.listdir` or `glob` that the caller passes on."""
    names = fill(["good.tar", *NAMES])
    assert read(names) == hexed(names)
    if read is not by_webdataset:
        assert [name for each in names for name in read(each)] == hexed(names)
    assert not (here / "OWNED").exists()


def test_links_and_files_that_vanish_are_not_expanded(here: Path) -> None:
    fill(["a.tar", "b.tar", "good.tar", RUN])
    list_in_manifest("list.json", ["good.tar", RUN])
    streams = [tc.ResumablePipeline(source, tc.decode()) for source in ("pipe*.tar", ".", "*.json")]
    os.remove(RUN)
    for stream in streams:
        with pytest.raises(FileNotFoundError):
            list(stream)
    command = "{pipe:touch OWNED #,a}.tar"
    for name, source in (("{a,b}.tar", "[{]*.tar"), ("[ab].tar", "[[]*.tar"), (command, "[{]*.tar")):
        os.symlink("nowhere", name)
        for read in READERS:
            with pytest.raises(FileNotFoundError):
                read(source)
        os.remove(name)
    assert not (here / "OWNED").exists()


def test_texts_of_the_caller_are_opened_by_webdataset(here: Path) -> None:
    fill(["0.tar", "1.tar"])
    both = hexed(["0.tar", "1.tar"])
    assert streamed("pipe:cat {0..1}.tar") == both
    assert streamed(["pipe:cat 0.tar", f"file:{here}/1.tar"]) == both
    assert streamed(f"file:{here}/{{0,1}}.tar") == both
    assert streamed("{0..1}.tar") == both
    assert streamed("pipe:touch OWNED; cat 0.tar") == both[:1]
    assert (here / "OWNED").exists()


FOLDERS = [
    *("{a,b}", "x{1..2}", "back\\slash", "[ab]", "${base}", "x::pipe:touch OWNED;#", "pipe:touch OWNED;#"),
    *("new\nline", "\udcff\udce9", "-rf", "'"),
]


@pytest.mark.parametrize("name", FOLDERS)
def test_names_of_folders(here: Path, name: str) -> None:
    Path(name).mkdir()
    write(f"{name}/0.tar")
    for folder in (name, f"./{name}", f"{here}/{name}"):
        for pattern in ("{}/0.tar", "{}", "{}/*.tar", "{}/{{0..0}}.tar"):
            assert streamed(pattern.format(folder)) == ["0.tar"]
            if folder == name and (":" not in name or "*" not in pattern):
                assert opened(pattern.format(folder)) == ["0.tar"]
    for i in range(2):
        with tc.ShardWriter(here / name / "out" / "[a]{b,c}-%d.tar", max_samples=1, resume=True, fsync=False) as sink:
            sink.write(f"k{i}", {"x": i})
    assert [sample["x"] for sample in pickle.loads(pickle.dumps(tc.open(here / name / "out")))] == [0, 1]
    assert not (here / "OWNED").exists()
