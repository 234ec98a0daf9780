"""Tars in a folder that readers leave out: compressed ones, and shards that the manifest does not list.

Readers warn, writers of a new cache refuse, and `index` adds the shards.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import json_of, run
from tests.reading.batches import write as write_samples
from tests.shards.damage import change_manifest

UNLISTED = (
    r"manifest\.json does not list 3 of the shards in the folder \('b-000000\.tar', 'b-000001\.tar', 'b-000002\.tar'\)"
)
WHY = " because only plain tars can be opened; "
GZIP = r"unpack \*\.tar\.gz with `gunzip`, or read \*\.tar\.gz as a stream: tc\.ResumablePipeline\('.*/\*\.tar\.gz'\)"
ONE = rf"1 compressed tar is left out \('a-000002\.tar\.gz'\){WHY}{GZIP}"
BOTH_REMEDIES = r"add them with `tensorcache index .*`.*, or move them to another folder"


def write(folder: Path, count: int, name: str = "a", **options: Any) -> Path:
    samples = {f"{name}{i:03d}": {"v": torch.full((4,), i + 1000 * (name == "b"))} for i in range(count)}
    return Path(write_samples(folder / f"{name}-%06d.tar", samples, max_samples=20, **options)).parent


@pytest.fixture
def a(tmp_path: Path) -> Path:
    """A cache of 100 samples, beside which three shards of another one with 60 samples were copied."""
    folder = write(tmp_path / "a", 100)
    for path in write(tmp_path / "b", 60, "b").glob("*.tar"):
        shutil.copy(path, folder)
    return folder


def test_readers_warn_with_count_names_and_remedies(a: Path, tmp_path: Path) -> None:
    os.chmod(a, 0o555)  # also if the folder cannot be changed
    for read, count in (
        (lambda: tc.open(a), 100),
        (lambda: tc.open([tmp_path / "b", a]), 160),
        (lambda: list(tc.ResumablePipeline(str(a), tc.decode())), 100),
    ):
        with pytest.warns(UserWarning, match=f"{UNLISTED}, so their samples are left out; {BOTH_REMEDIES}") as warned:
            samples = read()
        assert len(samples) == count
        assert [warning.filename for warning in warned] == [__file__]
    os.chmod(a, 0o755)


@pytest.mark.parametrize("folder", ["a", "./a/", "../{}/a//"])
def test_verify_of_a_relative_folder_reports_them_instead(a: Path, monkeypatch: Any, folder: str) -> None:
    monkeypatch.chdir(a.parent)
    report = tc.verify(folder.format(a.parent.name))
    assert [fault.what for fault in report.faults] == ["manifest.json does not list it"] * 3


def test_code_outside_modules_is_warned(a: Path) -> None:
    with pytest.warns(UserWarning, match=UNLISTED):
        exec("tc.open(a).close()", {"tc": tc, "a": a})


def test_only_shards_count(tmp_path: Path) -> None:
    """Hidden files, folders, links to listed shards and other files do not count as shards that are left out."""
    folder = write(tmp_path, 20)
    (folder / ".hidden.tar").write_bytes(b"x")
    (folder / "folder.tar").mkdir()
    (folder / "link.tar").symlink_to("a-000000.tar")
    (folder / "nowhere.tar").symlink_to("nothing")
    (folder / "notes.txt").write_text("x")
    assert len(tc.open(folder)) == 20
    shutil.copy(folder / "a-000000.tar", folder / "other.tar")
    with tc.open(folder / "manifest.json") as cache:  # which the caller has named
        assert len(cache) == 20


def test_not_while_a_writer_holds_the_folder(tmp_path: Path) -> None:
    """A shard has its name before the manifest lists it."""
    folder = write(tmp_path / "a", 20)
    with tc.ShardWriter(folder / "b-%06d.tar", fsync=False):
        shutil.copy(write(tmp_path / "b", 20, "b") / "b-000000.tar", folder)
        assert len(tc.open(folder)) == 20
    with pytest.warns(UserWarning, match=r"does not list 1 of the shards"), tc.open(folder) as cache:
        assert len(cache) == 20


def test_a_new_version_of_it_is_refused(a: Path, tmp_path: Path) -> None:
    items = [{"__key__": f"a{i:03d}"} for i in range(100)]
    with pytest.raises(tc.FormatError, match=f"{UNLISTED}, so their samples are left out; {BOTH_REMEDIES}"):
        tc.build(items, lambda batch: [{"v": 0} for _ in batch], tmp_path / "out", fingerprint={}, reuse=a)
    with pytest.warns(UserWarning, match=UNLISTED), tc.open(a) as cache, pytest.raises(tc.FormatError, match=UNLISTED):
        tc.build(cache[:10], lambda samples: samples, tmp_path / "out", fingerprint={})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["merge", "reshard", "export", "drop"])
def test_commands_refuse(a: Path, tmp_path: Path, command: str) -> None:
    result = run(command, a, tmp_path / "out", *["a000"] * (command == "drop"), status=1)
    assert len(re.findall(f"{UNLISTED}.*{BOTH_REMEDIES}", result.stderr)) == 1
    assert not (tmp_path / "out").exists()


def test_index_of_the_folder_adds_and_removes(a: Path) -> None:
    os.remove(a / "a-000001.tar")
    assert run("index", a).stdout.splitlines() == [
        *(f"{a}/b-00000{i}.tar: 20 samples, added to the manifest" for i in range(3)),
        f"{a}/a-000001.tar does not exist: removed from the manifest",
        f"{a}: 7 shards, 140 samples",
    ]
    with tc.open(a) as cache:
        expected = [*(f"a{i:03d}" for i in range(100) if i // 20 != 1), *(f"b{i:03d}" for i in range(60))]
        assert sorted(cache.keys()) == sorted(expected)
        assert int(cache["b007"]["v"][0]) == 1007
    assert tc.verify(a).ok
    again = json_of("index", a)
    assert (again[0]["added"], again[0]["removed"]) == ([], [])


def test_index_keeps_what_the_manifest_alone_knows(a: Path, tmp_path: Path) -> None:
    """Fingerprints of shards without an index, unknown keys of the manifest, and shards in subfolders."""
    folder = write(tmp_path / "c", 20, "c", footer=False, fingerprint={"model": "m"})
    (folder / "sub").mkdir()
    shutil.copy(a / "a-000000.tar", folder / "sub")
    entry = {"url": "sub/a-000000.tar", "nsamples": 20, "filesize": os.path.getsize(a / "a-000000.tar")}
    change_manifest(folder, lambda document: document["shardlist"].append(entry))
    change_manifest(folder, lambda document: document["tensorcache"].update(mine=[1]))
    run("index", folder)
    after = json.loads((folder / "manifest.json").read_text())
    assert after["tensorcache"]["fingerprints"] == {"c-000000.tar": {"model": "m"}}
    assert after["tensorcache"]["mine"] == [1]
    assert len(tc.open(folder)) == 40


def test_index_of_links_and_copies(tmp_path: Path) -> None:
    """A shard with two names is listed once; keys that are repeated are reported."""
    folder = write(tmp_path / "a", 40)
    (folder / "a.tar").symlink_to("a-000000.tar")
    (folder / "z.tar").symlink_to("a-000001.tar")
    result = run("index", folder)
    assert (result.stdout, result.stderr) == (f"{folder}: 2 shards, 40 samples\n", "")
    shutil.copy(folder / "a-000000.tar", folder / "copy.tar")
    assert run("index", folder).stderr.startswith(f"{folder}: 20 keys in several shards")


def test_index_writes_nothing_through_a_link(tmp_path: Path) -> None:
    private = write(tmp_path / "private", 20, footer=False)
    tc.write_index(private / "a-000000.tar")
    manifest = private / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"nsamples": 20', '"nsamples": 20 '))
    before = {path.name: path.read_bytes() for path in private.iterdir()}
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "a-000000.tar").symlink_to(private / "a-000000.tar")
    run("index", stranger)
    assert {path.name: path.read_bytes() for path in private.iterdir()} == before
    assert len(tc.open(stranger)) == 20


def test_index_of_shards_adds_them(a: Path) -> None:
    first, *others = sorted(a.glob("b-*.tar"))
    assert len(tc.write_index(first).keys) == 20
    lines = [f"{path}: 20 samples, added to {a}/manifest.json" for path in others]
    assert run("index", *others).stdout.splitlines() == lines
    assert len(tc.open(a)) == 160
    assert tc.verify(a).ok
    assert run("index", a / "b-000000.tar").stdout == f"{a}/b-000000.tar: 20 samples\n"


def pack(path: Path) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def test_readers_warn_of_compressed_tars(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 60, manifest=False, dali_index=False)
    pack(folder / "a-000002.tar")
    with pytest.warns(UserWarning, match=ONE) as found, tc.open(folder) as cache:
        assert len(cache) == 40
    assert [warning.filename for warning in found] == [__file__]
    with pytest.warns(UserWarning, match=ONE) as found:
        assert len(list(tc.ResumablePipeline(str(folder), tc.decode()))) == 40
    assert len(found) == 1
    # the remedies
    assert len(list(tc.ResumablePipeline(f"{folder}/*.tar.gz"))) == 20
    assert len(list(tc.ResumablePipeline(f"{folder}/a-*"))) == 60
    packed = folder / "a-000002.tar.gz"
    (folder / "a-000002.tar").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    assert len(tc.open(folder)) == 60


@pytest.mark.parametrize(
    ("ending", "remedy"),
    [
        ("TAR.XZ", r"`unxz`.*tc\.ResumablePipeline\('.*/\*\.TAR\.XZ'\)"),
        ("tar.zst", r"`unzstd`.*tc\.ResumablePipeline\(\['pipe:zstd -dc PATH', …\]\)"),
    ],
)
def test_only_compressed_tars(tmp_path: Path, ending: str, remedy: str) -> None:
    (tmp_path / f"a.{ending}").write_bytes(b"x")
    for read in (tc.open, lambda source: tc.ResumablePipeline(str(source))):
        message = rf"neither manifest\.json nor any \*\.tar; 1 compressed tar is left out .*{remedy}"
        with pytest.raises(FileNotFoundError, match=message):
            read(tmp_path)


def test_compressed_tars_beside_a_manifest(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 60)
    for name in ("b.tgz", "c.tar.bz2", "d.tar.xz", "e.tar.zst", "f.TAR", ".g.tar.gz", "h.tar.idx", "tar.gz"):
        (folder / name).write_bytes(b"x")
    (folder / "folder.tgz").mkdir()
    other = r"1 other tar is left out \('f\.TAR'\) because the names of shards end in \.tar; rename them; "
    names = rf"{other}4 compressed tars are left out \('b\.tgz', 'c\.tar\.bz2', 'd\.tar\.xz', …\)"
    last = r".*\*\.tgz with `gunzip`.*\*\.tar\.bz2 with `bunzip2`.*\*\.tar\.xz with `unxz`.*\*\.tar\.zst with `unzstd`"
    with pytest.warns(UserWarning, match=names + last), tc.open(folder) as cache:
        assert len(cache) == 60
    (folder / "unlisted.tar").write_bytes((folder / "a-000000.tar").read_bytes())
    with pytest.warns(UserWarning, match=rf"does not list 1 of the shards .*{names}") as found, tc.open(folder):
        assert len(found) == 1


def test_a_manifest_may_list_compressed_tars(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 60)
    pack(folder / "a-000002.tar")
    manifest, nbytes = folder / "manifest.json", (folder / "a-000002.tar.gz").stat().st_size
    text = manifest.read_text().replace("a-000002.tar", "a-000002.tar.gz")
    manifest.write_text(re.sub(r'(tar\.gz", "nsamples": 20, "filesize": )\d+', rf"\g<1>{nbytes}", text))
    assert len(list(tc.ResumablePipeline(str(folder), tc.decode()))) == 60


def test_new_caches_without_compressed_tars_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 60)
    (folder / "a-000002.tar.gz").write_bytes(b"x")
    with pytest.raises(tc.FormatError, match=ONE):
        tc.drop(folder, tmp_path / "out", ["a000"])
    with pytest.warns(UserWarning, match=ONE), tc.open(folder) as cache, pytest.raises(tc.FormatError, match=ONE):
        tc.export_cache(cache, tmp_path / "out", "pt")
    assert not os.path.exists(tmp_path / "out")
