"""`repair` keeps every whole sample byte for byte, and what it writes passes `verify`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.conftest import Seeded
from tests.same import assert_same
from tests.shards.damage import flip, member, members, sample, write
from tests.shards.tars import BLOCK, ZOO, build, build_with_tarfile, by_tarfile_in


def repaired(source: Any, out: Path, **options: Any) -> tuple[Any, list[str]]:
    """Return the report, and the keys of what was written, which passes `verify` and reads as it was written."""
    report = tc.repair(source, out, **options)
    if not list(out.glob("*.tar")):
        return report, []
    again = tc.verify(out)
    assert again.ok, again
    keys: list[str] = []
    for path in sorted(out.glob("*.tar")):
        assert path.with_suffix(".idx").exists()
        cache = tc.open(path, cache="")
        for key, value in zip(cache.keys(), cache, strict=True):
            assert_same(tc.realize(value), sample(int(key)))
        keys += cache.keys()
        cache.close()
    return report, keys


def test_whole_shards_stay_as_they_are(tmp_path: Path) -> None:
    source, out = tmp_path / "a", tmp_path / "out"
    write(source, 7, per_shard=3, fingerprint={"model": "x", "crop": [1, 2]}, caches=("text",))
    report, keys = repaired(source, out)
    assert report.ok
    assert len(keys) == 7
    for file in source.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes()


def test_damaged_samples_go(tmp_path: Path) -> None:
    source, out = tmp_path / "a", tmp_path / "out"
    path = write(source, 8, per_shard=4, fingerprint={"model": "x"})
    places = members(path)
    flip(path, places["000.safetensors"][1] - 1)
    flip(path, places["002.skel.pyd"][1] - 1)
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    report, keys = repaired(source, out)
    assert [fault.key for fault in report.faults] == ["000", "002"]
    with pytest.raises(TypeError, match=r"use report\.ok"):
        assert report
    assert keys == ["001", "003", "004", "005", "006", "007"]
    nbytes = sum(shard.stat().st_size for shard in out.glob("*.tar"))
    assert (report.num_shards_written, report.num_samples_written, report.nbytes_written) == (2, 6, nbytes)
    assert str(report).startswith("read: 2 shards, 8 samples, ")
    assert str(report).endswith(f"\nwritten: 2 shards, 6 samples, {nbytes:,} bytes")
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    for name in members(out / "000000.tar"):
        assert member(out / "000000.tar", name) == member(path, name)
    tc.open(out, expect={"model": "x"}).close()
    with pytest.raises(
        tc.FormatError, match="2 faults, and drop=False .*nothing was written; the first fault: .*sample '000'"
    ):
        tc.repair(source, tmp_path / "never", drop=False)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("name", ["002.skel.pyd", "002.safetensors", "002.json", "005.jpg"])
def test_a_damaged_tar_header(tmp_path: Path, name: str) -> None:
    """Without an index, DALI's tells whose member is lost."""
    path = write(tmp_path / "a", 6, footer=False)
    flip(path, members(path)[name][0] - 300)
    report, keys = repaired(tmp_path / "a", tmp_path / "out")
    assert keys == [f"{i:03d}" for i in range(6) if name not in (f"{i:03d}.skel.pyd", f"{i:03d}.safetensors")]
    assert "checksum" in {fault.kind for fault in report.faults}
    assert name[:3] in {fault.key for fault in report.faults}


def test_any_damage(tmp_path: Path, rng: Seeded) -> None:
    """Whatever was done to a shard, what is written passes `verify`, and has all samples that nothing was done to."""
    path = write(tmp_path / "a", 6, caches=("text",))
    whole, places = path.read_bytes(), members(path)
    for number in range(20):
        begin = rng.randrange(len(whole))
        end = min(len(whole), begin + rng.choice([1, 100, 700, 5000]))
        other = rng.randrange(0, len(whole), 512)
        instead = {
            "noise": rng.randbytes(end - begin),
            "zeros": bytes(end - begin),
            "nothing": b"",
            "other blocks": whole[other : other + 2048],
        }
        kind = rng.choice(list(instead))
        if kind == "other blocks":
            begin, end = begin // 512 * 512, -(-end // 512) * 512
        path.write_bytes(whole[:begin] + instead[kind] + whole[end:])
        _, keys = repaired(path, tmp_path / f"out{number}")
        if kind in ("noise", "zeros"):
            touched = {
                name[:3]
                for name, (first, last) in places.items()
                if name.endswith(("pyd", "tensors", "json", "jpg")) and begin < last and end > first - 512
            }
            assert {f"{i:03d}" for i in range(6)} - touched <= set(keys)


@pytest.mark.parametrize("footer", [True, False])
def test_zeros_are_the_end_unless_an_index_knows_better(tmp_path: Path, footer: bool) -> None:
    source, out = tmp_path / "a", tmp_path / "out"
    path = write(source, 6, footer=footer)
    begin = members(path)["002.skel.pyd"][0] - 512
    content = bytearray(path.read_bytes())
    content[begin : begin + 1024] = bytes(1024)
    path.write_bytes(content)
    report, keys = repaired(source, out)
    assert keys == (["000", "001", "003", "004", "005"] if footer else ["000", "001"])
    what = "zeros before the end of the archive" if footer else "the bytes after the end-of-archive marker"
    assert any(fault.what.startswith(what) for fault in report.faults)


def test_indexes_and_manifest_are_made_again(tmp_path: Path) -> None:
    source, out = tmp_path / "a", tmp_path / "out"
    path = write(source, 6, per_shard=3)
    whole = {file.name: file.read_bytes() for file in source.iterdir()}
    flip(path, path.stat().st_size - 30)  # the footer
    (source / "000001.idx").unlink()
    (source / "manifest.json").write_text("{")
    report, keys = repaired(source, out)
    assert len(report.faults) == 3
    assert len(keys) == 6
    assert {file.name: file.read_bytes() for file in out.iterdir()} == whole


def test_other_members_stay(tmp_path: Path) -> None:
    path = tmp_path / "zoo.tar"
    content = build_with_tarfile([("README", b"hi"), *ZOO])
    path.write_bytes(content)
    assert tc.repair(path, tmp_path / "out").ok
    end = tc.write_index(path, dali_index=False).end
    assert (tmp_path / "out" / "zoo.tar").read_bytes()[:end] == content[:end]
    assert tc.verify(tmp_path / "out").ok


def test_names_that_dali_cannot_hold(tmp_path: Path) -> None:
    write(tmp_path / "a", 2)
    (tmp_path / "a" / "000001.tar").write_bytes(build([("a b.json", b"1")]))
    report = tc.repair(tmp_path / "a", tmp_path / "out")
    assert [fault.what for fault in report.faults] == ["manifest.json does not list it"]
    assert not (tmp_path / "out" / "000001.idx").exists()
    assert tc.verify(tmp_path / "out").num_samples == 3


def test_where_it_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", 2)
    (tmp_path / "mount").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mount")
    for out, what in {
        tmp_path / "a": "is not empty; choose a new folder for repaired shards",
        path: "is a file, expected a folder",
        tmp_path / "mount": "is a mount point, and cannot be replaced",
        "../here": "is the current folder",
    }.items():
        with pytest.raises(FileExistsError, match=what):
            tc.repair(path, out)
    with pytest.raises(ValueError, match="out=''"):
        tc.repair(path, "")
    tc.repair(path, os.fsencode(tmp_path / "bytes"))
    assert tc.verify(tmp_path / "bytes").ok


def test_shards_of_one_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 2)
    for name in ("000000.tar", "x.tar", "x.bin", "y.idx"):
        (tmp_path / name).write_bytes(path.read_bytes())
    for source, what in {
        (path, tmp_path / "000000.tar"): "two shards are named '000000.tar': .*/a/000.* and .*/000",
        (tmp_path / "x.tar", tmp_path / "x.bin"): r"x\.bin: its DALI index would be named 'x.idx', but .*x\.tar uses",
        (tmp_path / "y.idx",): "its DALI index would be named 'y.idx'",
    }.items():
        with pytest.raises(ValueError, match=what):
            tc.repair(list(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_that_are_not_there_are_lost_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 6, per_shard=2)
    path.unlink()
    for link in (False, True):
        if link:
            path.symlink_to(tmp_path / "nowhere")
        with pytest.raises(tc.FormatError, match="drop=False"):
            tc.repair(tmp_path / "a", tmp_path / "out", drop=False)
    assert not (tmp_path / "out").exists()
    assert tc.repair(tmp_path / "a", tmp_path / "out").num_lost == 2
    assert len(tc.open(tmp_path / "out")) == 4


def test_of_two_samples_the_one_with_a_cache_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 2, footer=False, dali_index=False)
    content = path.read_bytes()
    halves = {name: content[slice(*place)] for name, place in members(path).items()}
    cache = [(name, halves[name]) for name in ("000.skel.pyd", "000.safetensors")]
    bad = [cache[0], (cache[1][0], cache[1][1][:-1] + b"!")]
    other, lone = ("001.json", b"1"), ("000.jpg", b"x")
    path = tmp_path / "x.tar"
    for number, (samples, kept) in enumerate(
        [
            ([[lone], [other], cache], [other, *cache]),
            ([[lone], [other], bad, [("002.json", b"1")], cache], [other, ("002.json", b"1"), *cache]),
            ([cache, [other], [lone]], [*cache, other]),
            ([[lone], [other], bad], [lone, other]),
            ([[lone], [other], cache, [("002.json", b"1")], cache], [other, *cache, ("002.json", b"1")]),
        ]
    ):
        path.write_bytes(build([member for each in samples for member in each]))
        report = tc.repair(path, tmp_path / f"{number}")
        assert {fault.key for fault in report.faults} == {"000"}
        assert report.num_damaged == sum(each[0][0][:3] == "000" for each in samples) - 1
        assert [name for name, *_ in by_tarfile_in(tmp_path / f"{number}" / "x.tar")] == [name for name, _ in kept]
        assert tc.verify(tmp_path / f"{number}").ok


def test_the_order_of_shards_stays(tmp_path: Path) -> None:
    source = tmp_path / "a"
    path = write(source, 6, per_shard=2, fingerprint={"model": "x"})
    manifest = source / "manifest.json"
    lines = manifest.read_text().splitlines()
    first, last = (next(at for at, line in enumerate(lines) if f'"00000{i}.tar", ' in line) for i in (0, 2))
    lines[first], lines[last] = lines[last].rstrip(",") + ",", lines[first].rstrip(",")
    manifest.write_text("\n".join(lines) + "\n")
    assert tc.repair(source, tmp_path / "out").ok
    assert (tmp_path / "out" / "manifest.json").read_bytes() == manifest.read_bytes()
    assert list(tc.open(tmp_path / "out").keys()) == ["004", "005", "002", "003", "000", "001"]
    flip(path, members(path)["001.skel.pyd"][1] - 1)
    tc.repair(source, tmp_path / "again")
    assert list(tc.open(tmp_path / "again").keys()) == ["004", "005", "002", "003", "000"]
    paths = [source / f"00000{i}.tar" for i in (1, 2, 0)]
    tc.repair(paths, tmp_path / "listed")
    assert list(tc.open(tmp_path / "listed").keys()) == ["002", "003", "004", "005", "000"]


def test_shards_without_samples(tmp_path: Path) -> None:
    (tmp_path / "empty.tar").write_bytes(bytes(10240))
    assert tc.repair(tmp_path / "empty.tar", tmp_path / "one", drop=False).ok
    assert tc.verify(tmp_path / "one").num_shards == 1
    write(tmp_path / "a", 2, per_shard=1)
    (tmp_path / "a" / "000001.tar").write_bytes(bytes(1024))
    (tmp_path / "a" / "000002.tar").write_bytes(b"not a tar")
    tc.repair(tmp_path / "a", tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").glob("*.tar")) == ["000000.tar", "000001.tar"]
    assert tc.verify(tmp_path / "out").ok
    path = write(tmp_path / "b", 1)
    flip(path, members(path)["000.skel.pyd"][0] + 60)
    flip(path, members(path)["000.jpg"][0] - 300)
    for bad in (path, tmp_path / "a" / "000002.tar"):  # nothing is left
        assert not tc.repair(bad, tmp_path / "never").ok
        assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("fill", [bytes, os.urandom])
@pytest.mark.parametrize("footer", [True, False])
def test_a_sample_that_has_lost_its_cache_is_not_written(
    tmp_path: Path, fill: Callable[[int], bytes], footer: bool
) -> None:
    """Its digest, which remains, would count as a finished sample when the cache is built again."""

    def build_in(out: str) -> Any:
        keys = [f"{i:03d}" for i in range(6)]
        options = {"fingerprint": {"model": 1}, "keys": keys, "digest": str, "footer": footer}
        return tc.build(
            range(6), lambda items: [{"x": torch.full((300,), i)} for i in items], tmp_path / out, **options
        )

    build_in("damaged").close()
    path = tmp_path / "damaged" / "000000.tar"
    if not footer:
        tc.write_index(path)
    content, places = path.read_bytes(), members(path)
    begin, end = places["002.skel.pyd"][0] - BLOCK, places["002.digest.txt"][0] - BLOCK
    path.write_bytes(content[:begin] + fill(end - begin) + content[end:])
    report = tc.repair(tmp_path / "damaged", tmp_path / "repaired")
    assert (report.num_damaged + report.num_lost, report.num_samples_written) == (1, 5)
    assert {fault.key for fault in report.faults if fault.kind == "lost"} == {"002"}
    with build_in("repaired") as cache:
        assert sorted(cache.keys()) == [f"{i:03d}" for i in range(6)]
        assert [cache[f"{i:03d}"]["x"][0].item() for i in range(6)] == list(range(6))
    assert tc.verify(tmp_path / "repaired").ok
