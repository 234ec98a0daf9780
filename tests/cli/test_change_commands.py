"""merge and reshard: the same bytes in other shards, complete or absent, also after SIGKILL and Ctrl-C."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child, wait_until
from tests.cli.command import json_of, run
from tests.cli.commands import Output, Process, the_server
from tests.cli.conftest import HOSTILE
from tests.kills import compare
from tests.reading.batches import write as write_samples


def write(folder: Path, numbers: Iterable[int], **options: Any) -> Path:
    """Write samples with two caches and other members; some lack a cache, or all of them."""
    with tc.ShardWriter(folder, fsync=False, **options) as sink:
        for i in numbers:
            members: dict[str, Any] = {"txt": f"photo {i}"} if i % 2 or i % 5 == 4 else {}
            if i % 3 == 0:
                members["text.tensorcache"] = {"states": torch.full((i % 7, 4), i)}
            if i % 5 == 4:
                sink.write(f"k{i:03d}", **members)
            else:
                sink.write(f"k{i:03d}", {"x": torch.full((100 * (i % 4),), i).half(), "i": i}, **members)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each member of all tars, by name."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile():
                    assert member.name not in found
                    found[member.name] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return found


# --- the same bytes


@pytest.mark.parametrize("options", [{"max_samples": 5}, {"max_samples": 100}, {"max_nbytes": 6000}, {"max_nbytes": 1}])
def test_reshard_is_what_a_writer_writes(tmp_path: Path, options: dict[str, int]) -> None:
    write(tmp_path / "in", range(23), max_samples=7, fingerprint={"model": "vae"})
    write(tmp_path / "expected", range(23), **options, fingerprint={"model": "vae"})
    ((name, value),) = options.items()
    found = json_of("reshard", tmp_path / "in", tmp_path / "out", f"--{name.replace('_', '-')}", value)
    assert (found["num_samples"], found["num_shards_resumed"]) == (23, 0)
    compare(tmp_path / "out", tmp_path / "expected")
    assert found["num_shards"] == len(list((tmp_path / "out").glob("*.tar")))
    assert found["nbytes"] == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.tar"))
    for at, number in enumerate((np.int64(value), max(1.0, value - 0.5))):
        tc.reshard(tmp_path / "in", tmp_path / f"{at}", **{name: number}, fsync=False)
        compare(tmp_path / f"{at}", tmp_path / "expected")


def test_merge(tmp_path: Path) -> None:
    write(tmp_path / "a", range(9), max_samples=4)
    write(tmp_path / "b", range(9, 15), max_samples=4, footer=False)
    write(tmp_path / "expected", range(15), max_samples=6)
    said = run("merge", tmp_path / "a", tmp_path / "b", tmp_path / "out", "--max-samples", 6)
    assert said.stdout.startswith(f"{tmp_path}/out: 3 shards, 15 samples, ")
    assert said.stderr == ""
    compare(tmp_path / "out", tmp_path / "expected")
    run("merge", tmp_path / "a", tmp_path / "bare", "--no-dali-index", "--max-samples", 4)
    assert sorted(os.listdir(tmp_path / "bare")) == ["000000.tar", "000001.tar", "000002.tar", "manifest.json"]
    # a new shard that is equal to an old one is a hard link to it; with a prefix, or without an index at its end, it is written
    assert [path.stat().st_nlink for path in (tmp_path / "bare").glob("*.tar")] == [2] * 3
    for name, prefixes in (("a", ["p/"]), ("b", [""])):
        tc.merge([tmp_path / name], tmp_path / f"{name}2", prefixes=prefixes, max_samples=4, fsync=False)
        assert {path.stat().st_nlink for path in (tmp_path / f"{name}2").glob("*.tar")} == {1}


def test_prefixes(tmp_path: Path) -> None:
    write(tmp_path / "a", range(5))
    write(tmp_path / "b", range(5), max_samples=2)
    run("merge", tmp_path / "a", tmp_path / "b", tmp_path / "out", "--prefix", "", "--prefix", "b/", "--max-samples", 4)
    before = contents(tmp_path / "a")
    assert contents(tmp_path / "out") == before | {f"b/{name}": content for name, content in before.items()}
    assert tc.verify(tmp_path / "out").ok
    with tc.open(tmp_path / "out", cache="") as cache:
        assert list(cache.keys()) == [f"{prefix}k{i:03d}" for prefix in ("", "b/") for i in range(4)]
        assert cache["b/k003"]["x"].load().tolist() == [3] * 300
    run("merge", tmp_path / "a", tmp_path / "b", tmp_path / "none", "--prefix", "b/", status=2)
    bad = run("merge", tmp_path / "a", tmp_path / "none", "--prefix", "../", status=1)
    assert "'../k000'" in bad.stderr
    run("merge", tmp_path / "a", tmp_path / "none", "--prefix", "x" * 100, status=1)
    assert not (tmp_path / "none").exists()


def test_tars_by_other_programs(tmp_path: Path) -> None:
    """Long names and capitals stay as they are; folders and files without a sample may be left out."""
    skeleton, tensors = tc.encode_sample({"x": torch.ones(3)})
    files = [
        ("README", b"no sample"),
        (f"{'long' * 40}/a.skel.pyd", skeleton),
        (f"{'long' * 40}/a.SafeTensors", tensors),
        ("b.skel.pyd", skeleton),
        ("b.safetensors", tensors),
        ("b.JPG", b"picture"),
        ("c.txt", b""),
        ("LICENSE", b"text"),
    ]
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        source = tmp_path / f"{format}.tar"
        with tarfile.open(source, "w", format=format) as archive:
            for name, content in files:
                folder = tarfile.TarInfo(f"{name}-folder")
                folder.type = tarfile.DIRTYPE
                archive.addfile(folder)
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.uname = len(content), 1234, "owner"
                archive.addfile(member, io.BytesIO(content))
        out = tmp_path / f"out{format}"
        tc.reshard(source, out, max_samples=1, fsync=False)
        assert len(list(out.glob("*.tar"))) == 3
        assert tc.verify(out).ok
        samples = {name: content for name, content in files if "." in name}
        copied = []
        for path in sorted(out.glob("*.tar")):
            with tarfile.open(path) as after:
                copied += [(member.name, member.mtime, member.uname) for member in after if "." in member.name]
        assert [member for member in copied if member[0] in samples] == [(name, 1234, "owner") for name in samples]
        assert samples.items() <= contents(out).items()


# --- refusals


def test_equal_keys(tmp_path: Path) -> None:
    write(tmp_path / "a", range(6), max_samples=2)
    write(tmp_path / "b", range(4, 8))
    said = run("merge", tmp_path / "a", tmp_path / "b", tmp_path / "out", status=1).stderr
    assert said.count("\n") == 1
    for word in ("repeated keys: 2", "'k004'", "a/000002.tar", "b/000000.tar", "--prefix"):
        assert word in said
    assert "--prefix" in run("merge", tmp_path / "a", tmp_path / "a", tmp_path / "out", status=1).stderr
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_fingerprints(tmp_path: Path) -> None:
    write(tmp_path / "a", range(6), max_samples=4, fingerprint={"model": "vae", "dtype": "bf16"})
    write(tmp_path / "b", range(6, 9), fingerprint={"model": "vae", "dtype": "fp16"})
    write(tmp_path / "c", range(9, 12))
    said = run("merge", tmp_path / "a", tmp_path / "b", tmp_path / "out", status=1).stderr
    assert "b/000000.tar: expected dtype='bf16', but the cache was made with 'fp16'; merge them with --mixed" in said
    assert "model" not in said
    said = run("merge", tmp_path / "a", tmp_path / "c", tmp_path / "out", status=1).stderr
    assert "c/000000.tar: the cache has no fingerprint" in said
    write(tmp_path / "d", range(12, 15), fingerprint={"source": "d"})
    for first, second in ("ca", "dc", "cd"):
        said = run("merge", tmp_path / first, tmp_path / second, tmp_path / "out", status=1).stderr
        assert f"{second}/000000.tar" in said
        assert said.count("--mixed") == 1
    write(tmp_path / "e", range(15, 18), fingerprint={"source": "e"})
    said = run("merge", tmp_path / "d", tmp_path / "e", tmp_path / "out", status=1).stderr
    # it is the folder of an import only with `format`
    assert "expected source='d', but the cache was made with 'e'" in said
    assert not (tmp_path / "out").exists()
    run("merge", tmp_path / "a", tmp_path / "b", tmp_path / "c", tmp_path / "out", "--mixed")
    found = [tc.open(path, cache="").fingerprint for path in sorted((tmp_path / "out").glob("*.tar"))]
    assert found == [{"model": "vae", "dtype": "bf16"}, {"model": "vae", "dtype": "fp16"}, {}]
    # a mixed cache can be resharded, and its samples keep their fingerprints
    run("reshard", tmp_path / "out", tmp_path / "again", "--max-samples", 5)
    with tc.open(tmp_path / "again", cache="") as cache:
        assert (cache.num_shards, cache.fingerprint) == (4, {})
    with tc.open(tmp_path / "again" / "000001.tar", cache="") as cache:
        assert (len(cache), cache.fingerprint["dtype"]) == (1, "bf16")


@pytest.mark.parametrize("names", [[], [b"k005.skel.pyd"], [b"k007.skel.pyd", b"k007.safetensors", b"k007.txt"], None])
def test_damaged_shards(tmp_path: Path, names: list[bytes] | None) -> None:
    """One that was cut short, or whose header is lost, or which has a member or a sample that its index names otherwise."""
    write(tmp_path / "in", range(12), max_samples=4)
    raw = bytearray((tmp_path / "in" / "000001.tar").read_bytes())
    for at in (raw.index(name + b"\0") for name in names or ()):
        raw[at + 3] += 1
        raw[at + 148 : at + 156] = b"%06o\0 " % (sum(raw[at : at + 148]) + 8 * 32 + sum(raw[at + 156 : at + 512]))
    if not names:
        begin, end = (len(raw) - 3000, len(raw)) if names is None else (raw.index(b"k005."), raw.index(b"k005.") + 512)
        raw[begin:end] = bytes(0 if names is None else 512)
    (tmp_path / "in" / "000001.tar").write_bytes(raw)
    for command in (["reshard"], ["merge", "--max-samples", 1], ["drop"]):
        said = run(*command, tmp_path / "in", tmp_path / "out", *["k004"] * (command == ["drop"]), status=1).stderr
        assert said.startswith("tensorcache: ")
        assert "000001.tar" in said
        assert said.count("\n") == 1
        assert os.listdir(tmp_path) == ["in"]


def test_wrong_usage(tmp_path: Path) -> None:
    write(tmp_path / "in", range(3))
    (tmp_path / "file").write_text("x")
    for command in ("merge", "reshard"):
        run(command, tmp_path / "in", status=2)
        run(command, tmp_path / "nowhere", tmp_path / "out", status=2)
        run(command, tmp_path / "in", tmp_path / "out", "--max-samples", 0, status=2)
        assert "is not empty" in run(command, tmp_path / "in", tmp_path / "in", status=2).stderr
        assert "is a file" in run(command, tmp_path / "in", tmp_path / "file", status=2).stderr
        assert "is not a folder" in run("drop", tmp_path / "file", tmp_path / "out", "k", status=2).stderr
        said = run(command, tmp_path / HOSTILE, tmp_path / "out", status=2).stderr
        assert said.strip("\n").isprintable()
    with pytest.raises(ValueError, match="0 caches"):
        tc.merge([], tmp_path / "out")
    with pytest.raises(ValueError, match="expected at least 1"):
        tc.reshard(tmp_path / "in", tmp_path / "out", max_nbytes=0)
    with pytest.raises(tc.InvalidKeyError, match="shorten the key"):
        tc.merge([tmp_path / "in"], tmp_path / "out", prefixes=["x" * 90])
    with pytest.raises(TypeError, match="prefixes='p', expected a list"):
        tc.merge([tmp_path / "in"], tmp_path / "out", prefixes="p")
    (tmp_path / "empty.tar").write_bytes(bytes(1024))
    with pytest.raises(ValueError, match="no shard has a sample"):
        tc.reshard(tmp_path / "empty.tar", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["empty.tar", "file", "in"]


# --- killed and interrupted


@contextmanager
def running(tmp_path: Path, count: int, *arguments: object) -> Iterator[tuple[Process, Output]]:
    """Start a command; continue when a hidden folder has some finished shards, or OUT is there."""
    with the_server().running(*arguments, cwd=Path.cwd()) as (process, output):
        wait_until(lambda: len(list(tmp_path.glob(".out.*.tmp/*.tar"))) >= count or (tmp_path / "out").exists())
        yield process, output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A cache whose copy takes a while: 60 shards, with a sync of each."""
    return write(tmp_path / "in", range(60), max_samples=13)


def test_drop_counts_samples_not_keys(tmp_path: Path) -> None:
    """A key that occurs twice names two samples."""
    for number, key in enumerate("ab"):
        write_samples(tmp_path / "in" / f"{number}-%d.tar", {key: {"x": number}, "twice": {"x": number}})
    (said,) = run("drop", tmp_path / "in", tmp_path / "out", "twice").stdout.splitlines()
    assert said.endswith("out: without 2 samples")
    (said,) = run("drop", tmp_path / "in", tmp_path / "one", "a").stdout.splitlines()
    assert said.endswith("one: without 1 sample")


def test_killed(tmp_path: Path, source: Path) -> None:
    """After each kill there is no OUT; the same command resumes, and what it writes is the same byte for byte."""
    arguments = ["merge", source, tmp_path / "out", "--max-samples", 1]
    write(tmp_path / "expected", range(60), max_samples=1)
    num_kills = 0
    for count in (1, 20, 50):
        with running(tmp_path, count, *arguments) as (process, _):
            os.kill(process.pid, signal.SIGKILL)
            num_kills += process.wait() == -signal.SIGKILL
        if (tmp_path / "out").exists():
            break
        assert len([name for name in os.listdir(tmp_path) if name.startswith(".out.")]) == 1
    assert num_kills
    if not (tmp_path / "out").exists():
        assert json_of(*arguments)["num_shards_resumed"] > 0
    compare(tmp_path / "out", tmp_path / "expected")
    assert sorted(os.listdir(tmp_path)) == ["expected", "in", "out"]


def test_interrupted(tmp_path: Path, source: Path) -> None:
    """Ctrl-C: status 130, two lines, no OUT. Sources that have changed are copied from the beginning."""
    arguments = ["reshard", source, tmp_path / "out", "--max-samples", 1]
    with running(tmp_path, 5, *arguments) as (process, output):
        process.interrupt()
        assert process.wait() == 130
        lines = output.read().decode().splitlines()
    assert lines == ["the finished shards are kept: the same command resumes", "interrupted"]
    (left,) = tmp_path.glob(".out.*.tmp")
    assert len(list(left.glob("*.tar"))) >= 5
    os.utime(source / "000000.tar", ns=(1, 1))
    assert json_of(*arguments)["num_shards_resumed"] == 0
    assert tc.verify(tmp_path / "out").ok
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_two_at_once(tmp_path: Path, source: Path) -> None:
    """The second one is refused, and disturbs nothing."""
    arguments = ["reshard", source, tmp_path / "out", "--max-samples", 1]
    with running(tmp_path, 3, *arguments) as (process, output):
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert "another process is writing" in run(*arguments, status=2).stderr
            assert list(tmp_path.glob(".out.*.tmp"))
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert process.wait() == 0, output.read()
    assert tc.verify(tmp_path / "out").ok
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


@pytest.mark.parametrize("limit", [0, 10_000])
def test_a_full_disk(tmp_path: Path, limit: int) -> None:
    """The error is the system's; then the same call resumes."""
    write(tmp_path / "in", range(20))

    def copy() -> object:
        return tc.reshard(tmp_path / "in", tmp_path / "out", max_samples=7, fsync=False)

    def fill_and_copy() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        copy()

    assert run_in_child(fill_and_copy) == errno.EFBIG
    assert not (tmp_path / "out").exists()
    copy()
    write(tmp_path / "expected", range(20), max_samples=7)
    compare(tmp_path / "out", tmp_path / "expected")
    assert sorted(os.listdir(tmp_path)) == ["expected", "in", "out"]
