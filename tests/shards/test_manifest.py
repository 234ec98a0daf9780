"""Manifests: what readers accept and refuse, and what a writer does on disk, in which order."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.reading.batches import write as write_samples
from tests.shards.damage import change_manifest
from tests.shards.tars import build
from wds_tensorcache.writing.index_shard import index_folder


def write(folder: Path, name: str = "%d.tar", count: int = 4, **options: Any) -> Path:
    """Write two samples into each shard; return the path of the manifest."""
    samples = {f"{i}": {"x": i} for i in range(count)}
    write_samples(folder / name, samples, lambda i: {"txt": f"photo {i}"}, max_samples=2, **options)
    return folder / "manifest.json"


def test_wids_manifests_of_others(tmp_path: Path) -> None:
    path = write(tmp_path, "x.tar")
    shard = {"url": "x.tar", "md5sum": "0", "nsamples": 4, "filesize": os.path.getsize(tmp_path / "x.tar")}
    path.write_text(json.dumps({"wids_version": 1, "name": "x", "base": "", "shardlist": [shard], "datasets": []}))
    for keys in (["0", "1", "2", "3"], ["0", "1", "2", "3"] * 2):
        assert list(tc.open(tmp_path).keys()) == keys
        write(tmp_path, "y.tar", overwrite=True)


def document(**changes: Any) -> str:
    return json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [], **changes})


def shardlist(**changes: Any) -> str:
    shard = {"url": "x.tar", "nsamples": 3, "filesize": 4}
    return document(shardlist=[shard, {**shard, "url": "y", **changes}])


NOT_JSON, WEB_APP = "expected a manifest, but the file is not JSON: ", '{"name": "app", "icons": []}'
INVALID = {
    "another version": (document(wids_version=2), "wids_version is 2, expected 1"),
    "no shardlist": (document(shardlist=None), "shardlist is None, expected a list"),
    "a bool": (shardlist(nsamples=True), r"shardlist\[1\]: nsamples is True, expected a non-negative integer"),
    "digest is short": (shardlist(index="12"), r"shardlist\[1\]: index is '12', expected 16 hexadecimal digits"),
    "empty": ("", f"{NOT_JSON}Expecting value.*; copy it again, or move it out .*, and then run `tensorcache index`"),
    "deep": ("[" * 100_000, f"{NOT_JSON}maximum recursion depth"),
    "not UTF-8": (b"\xff\xfe{}", f"{NOT_JSON}'utf-8' codec"),
    "of a web app": (WEB_APP, r"not a manifest of shards, .*'icons'\), perhaps of another program"),
    "a list": ("[]", r"not a manifest of shards, but other JSON \(a list\)"),
    "another kind": (document(__kind__="x"), "__kind__ is 'x', expected 'wids-shard-index-v1'"),
    "base": (document(base="/d"), "base is '/d', expected no value: list all shards in shardlist"),
    "datasets": (document(datasets=[{"source_url": "x.json"}]), "datasets is a list, expected no value"),
    "extra": (document(tensorcache=[1]), "tensorcache is a list, expected an object"),
    "shard": (document(shardlist=["x.tar"]), r"shardlist\[0\] is 'x.tar', expected an object"),
    "url is a number": (shardlist(url=1), r"shardlist\[1\]: url is 1, expected a path or a url"),
    "url with NUL": (shardlist(url="a\0b"), r"shardlist\[1\]: url is 'a\\x00b', expected a path or a url"),
    "url with half a pair": (shardlist(url="\ud800"), r"shardlist\[1\]: url is '\\ud800', expected a path or a url"),
    "url twice": (shardlist(url="x.tar"), r"shardlist\[1\]: url 'x.tar' occurs twice"),
    "negative": (shardlist(nsamples=-1), r"shardlist\[1\]: nsamples is -1, expected a non-negative integer"),
    "more than 63 bits": (shardlist(filesize=1 << 63), r"shardlist\[1\]: filesize is 9223372036854775808, expected"),
}


@pytest.mark.parametrize(("text", "message"), INVALID.values(), ids=INVALID)
def test_invalid_manifests(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content := text if isinstance(text, bytes) else text.encode())
    for use in (tc.open, tc.ShardWriter):
        with pytest.raises(tc.FormatError, match=rf"manifest\.json: {message}"):
            use(tmp_path)
    assert path.read_bytes() == content


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = write(tmp_path_factory.mktemp("written"), fingerprint={"model": "a"})
    return path, path.read_bytes()


@given(st.data())
def test_any_bytes_of_a_manifest_may_change(written: tuple[Path, bytes], data: st.DataObject) -> None:
    """A reader gets the samples of listed shards, or an error."""
    path, before = written
    content = bytearray(before)
    at = data.draw(st.integers(0, len(content) - 1))
    replacement = st.binary(max_size=4) | st.sampled_from([b"[", b"{", b"-1", b'"'])
    content[at : at + data.draw(st.integers(0, 9))] = data.draw(replacement)
    path.write_bytes(content)
    try:
        with tc.open(path) as cache:
            keys, samples = list(cache.keys()), list(cache)
    except (tc.FormatError, FileNotFoundError, KeyError):  # KeyError: the caches of two shards have different names
        assert content != before
        return
    assert [sample["x"] for sample in samples] == list(map(int, keys))
    document = json.loads(content)
    assert len(keys) == sum(shard["nsamples"] for shard in document["shardlist"])


@pytest.mark.parametrize("fsync", [True, False])
def test_the_order_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool) -> None:
    """A shard, its `.idx` and the manifest get their names one after the other, each when its bytes are on disk."""
    steps: list[str] = []

    def name_of(path: str) -> str:
        return re.sub(r"^\.(.*)\.[0-9a-f]+\.tmp$", r"\1", os.path.basename(path))

    def synced(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        steps.append(f"sync {name_of(path)}" if stat.S_ISREG(os.fstat(descriptor).st_mode) else "sync folder")
        sync(descriptor)

    def named(source: str, target: str) -> None:
        steps.append(f"name {os.path.basename(target)}")
        renames[steps[-1].endswith(".tar")](source, target)

    sync, renames = os.fsync, (os.replace, os.link)
    for function, stand_in in (("fsync", synced), ("replace", named), ("link", named)):
        monkeypatch.setattr(os, function, stand_in)
    write_samples(tmp_path / "x.tar", {"a": {"x": 1}}, fsync=fsync)
    names = ("x.tar", "x.idx", "manifest.json")
    expected = [(f"sync {name}", f"name {name}", "sync folder") if fsync else (f"name {name}",) for name in names]
    assert steps == [step for each in expected for step in each]


def test_others_may_read_the_files(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write(tmp_path, "x.tar")
    assert len({(tmp_path / name).stat().st_mode for name in ("usual", "x.tar", "x.idx", "manifest.json")}) == 1


def test_white_space_beyond_ascii_is_part_of_a_name_in_an_idx(tmp_path: Path) -> None:
    keys = ["a\u2028b", "a\u00a0b", "a\x85b", "a\x1cb", "\u3000", "next"]
    (tmp_path / "x.tar").write_bytes(build([(f"{key}.json", b"{}") for key in keys]))
    tc.write_index(tmp_path / "x.tar")
    assert tc.verify(tmp_path / "x.tar").ok


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_samples(tmp_path / "d" / "%d.tar", {f"{i}": diffusion_sample(i) for i in range(4)}, max_samples=2)
    (tmp_path / "d" / "sub").mkdir()
    return tmp_path / "d"


def relist(folder: Path, *urls: str) -> None:
    """List other urls, each with what the manifest said of its file."""
    said = {entry["url"]: entry for entry in json.loads((folder / "manifest.json").read_text())["shardlist"]}
    entries = [{**said.get(os.path.basename(url), said["0.tar"]), "url": url} for url in urls]
    change_manifest(folder, lambda document: document.update(shardlist=entries))


SPELLINGS = ["./0.tar", "soft.tar", "hard.tar", "sub/link/0.tar"]


@pytest.mark.parametrize("url", SPELLINGS)
@pytest.mark.parametrize("is_first", [True, False])
def test_one_file_listed_under_two_names(folder: Path, url: str, is_first: bool) -> None:
    if url == "soft.tar":
        (folder / url).symlink_to("0.tar")
    if url == "hard.tar":
        (folder / url).hardlink_to(folder / "0.tar")
    (folder / "sub" / "link").symlink_to(folder)
    relist(folder, *([url, "0.tar"] if is_first else ["0.tar", url]), "1.tar")
    twice = "0.tar" if is_first else url
    for source in (folder, folder / "manifest.json", str(folder / "*.json"), [folder]):
        with pytest.raises(tc.FormatError, match=re.escape(f"manifest.json: {twice!r} is the same file as ")):
            tc.open(source)
        with pytest.raises(tc.FormatError, match="is the same file as "):
            tc.ResumablePipeline(source if isinstance(source, str) else str(folder), tc.decode())
    report = tc.verify(folder)
    found = [fault for fault in report.faults if "manifest.json lists it twice" in fault.what]
    assert [os.path.normpath(fault.shard) for fault in found] == [os.path.normpath(folder / twice)]
    assert (report.num_shards, report.num_samples, report.num_lost) == (2, 4, 0)
    relist(folder, url, "1.tar")  # once, by whatever name
    assert list(tc.open(folder).keys()) == ["0", "1", "2", "3"]


def test_what_the_caller_lists_twice_comes_twice(folder: Path) -> None:
    assert [sample["cond"][0][1]["prompt"][-1] for sample in tc.open([folder, folder / "0.tar"])] == list("012301")


UNREADABLE = {
    "file:///0.tar": "is a url in a local manifest",
    "0.tar/x": "'0.tar/x' is not a possible path",
    "x" * 256 + ".tar": "'x+.* is not a possible path",
    "/".join(["y" * 200] * 30): "'y+.* is not a possible path",
    "loop.tar": "'loop.tar' is not a possible path",
    "sub": "is a folder, pipe or device, expected a file",
    "pipe.tar": "is a folder, pipe or device, expected a file",
    "0.tar/../1.tar": "lists '0.tar/../1.tar', which is outside the manifest's folder",
}


@pytest.mark.parametrize(("url", "message"), UNREADABLE.items(), ids=lambda value: value[:30])
def test_urls_that_are_no_files(folder: Path, url: str, message: str) -> None:
    (folder / "loop.tar").symlink_to("loop.tar")
    os.mkfifo(folder / "pipe.tar")
    relist(folder, "0.tar", url)
    for use in (lambda: tc.open(folder), lambda: tc.ResumablePipeline(str(folder), tc.decode())):
        with pytest.raises(tc.FormatError, match=f"manifest.json: .*{message}"):
            use()
    os.remove(folder / "loop.tar")
    os.remove(folder / "pipe.tar")
    report = tc.verify(folder)
    assert report.num_samples == 4
    assert any(url[:100] in str(fault) for fault in report.faults)


def test_the_longest_names(folder: Path) -> None:
    """Beside which no index can lie: its name would be longer than the file system allows."""
    for nbytes in (240, 249, 251, 252, 255):
        name = "n" * (nbytes - 4) + ".tar"
        os.link(folder / "0.tar", folder / name)
        for source in (folder / name, str(folder / "n*.tar")):
            assert list(tc.open(source).keys()) == ["0", "1"]
        assert tc.verify(folder / name).ok
        os.remove(folder / name)


@pytest.mark.parametrize("table", ["caches", "fingerprints"])
def test_writers_and_verify_refuse_tables_that_readers_ignore(tmp_path: Path, table: str) -> None:
    write(tmp_path)
    for value in (None, 5, []):
        change_manifest(tmp_path, lambda document, value=value: document["tensorcache"].update({table: value}))
        assert tc.open(tmp_path)[0] == {"x": 0}
        assert not tc.verify(tmp_path).ok
        with pytest.raises(tc.FormatError, match="must both be objects"):
            tc.ShardWriter(tmp_path / "b.tar")


def test_a_shard_that_is_written_anew_while_its_folder_is_indexed_stays_listed(tmp_path: Path) -> None:
    write(tmp_path, "a%d.tar", 2)
    write(tmp_path, "b%d.tar", 2)
    (tmp_path / "a0.tar").unlink()
    (tmp_path / "a0.idx").unlink()

    def show(done: int, count: int) -> None:
        if not done:
            write(tmp_path, "a%d.tar", 2, resume=True)

    with pytest.warns(UserWarning, match="no longer exists"):
        index_folder(str(tmp_path), dali_index=True, show=show)
    assert tc.open(tmp_path).num_shards == 2
