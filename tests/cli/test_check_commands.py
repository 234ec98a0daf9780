"""index, verify, repair and drop, as a process: results, exit statuses and messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import json_of, run
from tests.reading.batches import write
from tests.shards.tars import build_with_tarfile, halves

KEYS = [f"k{i}" for i in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = {key: {"x": torch.full((1000,), float(i)), "i": i} for i, key in enumerate(KEYS)}
    return Path(write(tmp_path / "in" / "%06d.tar", samples, max_samples=2)).parent


def damage(shard: Path) -> None:
    raw = bytearray(shard.read_bytes())
    raw[raw.index(torch.full((1000,), 2.0).numpy().tobytes()) + 5] ^= 1
    shard.write_bytes(raw)


def test_intact_and_damaged_caches(folder: Path, tmp_path: Path) -> None:
    assert run("verify", folder).stdout.startswith("3 shards, 6 samples,")
    report = json_of("verify", folder, "--threads", 1)
    assert (report["ok"], report["num_samples"], report["faults"]) == (True, 6, [])
    damage(folder / "000001.tar")
    assert "000001.tar: sample 'k2'" in run("verify", folder, status=1).stdout
    (fault,) = json_of("verify", folder, status=1)["faults"]
    assert (fault["key"], fault["kind"]) == ("k2", "damaged")
    assert "k2" in run("repair", folder, tmp_path / "strict", "--strict", status=1).stderr
    assert not (tmp_path / "strict").exists()
    assert "written: 3 shards, 5 samples" in run("repair", folder, tmp_path / "out", status=1).stdout
    assert list(tc.open(tmp_path / "out").keys()) == ["k0", "k1", "k3", "k4", "k5"]
    assert run("verify", tmp_path / "out").stderr == ""
    again = run("repair", folder, tmp_path / "out", status=2)
    assert again.stdout == ""
    assert "is not empty" in again.stderr


def test_index(tmp_path: Path) -> None:
    """Shards that another program made."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.tar").write_bytes(build_with_tarfile(halves(f"{name}0", {"x": torch.ones(3)})))
    found = json_of("index", tmp_path / "a.tar", tmp_path / "b.tar")
    assert [each["num_samples"] for each in found] == [1, 1]
    assert sorted(os.listdir(tmp_path)) == ["a.idx", "a.tar", "a.tar.index", "b.idx", "b.tar", "b.tar.index"]
    (tmp_path / "a.idx").unlink()
    assert run("index", tmp_path / "a.tar", "--no-dali-index").stdout == f"{tmp_path}/a.tar: 1 sample\n"
    assert not (tmp_path / "a.idx").exists()
    tc.write_index(tmp_path / "a.tar")
    assert tc.verify(tmp_path / "a.tar").ok
    # a name that DALI's index cannot contain
    (tmp_path / "c.tar").write_bytes(build_with_tarfile([("c d.txt", b"text")]))
    assert run("index", tmp_path).stdout.endswith(f"{tmp_path}: 3 shards, 3 samples\n")


@pytest.mark.parametrize("content", [b"", b"not a tar" * 200])
def test_index_refuses_files_that_are_no_tars(folder: Path, tmp_path: Path, content: bytes) -> None:
    """Nothing is written; shards before the bad one are indexed."""
    bad, good = tmp_path / "bad.tar", folder / "000000.tar"
    bad.write_bytes(content)
    said = run("index", good, bad, status=1)
    assert said.stdout == ""
    assert said.stderr.count("\n") == 1
    assert "bad.tar" in said.stderr
    assert (folder / "000000.tar.index").exists()
    assert bad.read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == ["bad.tar", "in"]


def test_drop(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k5\nk0\n")
    said = json_of("drop", folder, tmp_path / "out", "k3", "--keys-from", tmp_path / "keys")
    assert said["dropped"] == ["k0", "k3", "k5"]
    assert list(tc.open(tmp_path / "out").keys()) == ["k1", "k2", "k4"]
    run("drop", folder, tmp_path / "more", "--keys-from", "-", stdin="\ufeffk1\r\n\nk2")
    with tc.open(tmp_path / "more") as cache:
        assert not {"k1", "k2"} & set(cache.keys())
    unknown = run("drop", folder, tmp_path / "none", "k33", status=2)
    assert "'k33'" in unknown.stderr
    run("drop", folder, tmp_path / "none", status=2)
    assert not (tmp_path / "none").exists()


def test_files_that_are_no_keys(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"k1\n\xff\n")
    messages = {"keys": "invalid start byte", "nowhere": "No such file", ".": "Is a directory"}
    for name, message in messages.items():
        assert message in run("drop", folder, tmp_path / "out", "--keys-from", tmp_path / name, status=2).stderr
    assert not (tmp_path / "out").exists()


def test_drop_by_original_name(tmp_path: Path) -> None:
    write(tmp_path / "in", {tc.safe_key(name): {"x": 1} for name in ("photo (1).v2", "photo (2).v2")})
    run("drop", tmp_path / "in", tmp_path / "out", "photo (1).v2")
    assert list(tc.open(tmp_path / "out").keys()) == [tc.safe_key("photo (2).v2")]


def test_sources_that_are_missing(tmp_path: Path) -> None:
    for source in (tmp_path / "nowhere", tmp_path):
        for arguments in (["verify", source], ["repair", source, tmp_path / "out"]):
            found = run(*arguments, status=2)
            assert found.stderr.startswith("tensorcache: ")
            assert found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert "'nowhere.tar' does not exist" in run("index", "nowhere.tar", status=2).stderr
