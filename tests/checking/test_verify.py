"""`verify` notices every kind of damage, names where it is, and finds nothing wrong with what is whole."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.checking.broken_disk import break_disk
from tests.hostile.pickles import little_memory
from tests.reading.batches import write as write_samples
from tests.shards.damage import faults, flip, member, members, sample, write
from tests.shards.tars import BLOCK, FORMATS, ZOO, build, build_with_tarfile, halves


@dataclasses.dataclass
class Pose:
    """A class that skeletons name."""

    x: int


def test_whole_shards(tmp_path: Path) -> None:
    path = write(tmp_path, 25, per_shard=10, caches=("text", "image"))
    report = tc.verify(tmp_path)
    assert report.ok
    assert (report.num_shards, report.num_samples, report.num_unverified, report.num_unread) == (3, 25, 0, 0)
    assert report.nbytes == sum(shard.stat().st_size for shard in tmp_path.glob("*.tar"))
    assert str(report) == f"3 shards, 25 samples, {report.nbytes:,} bytes: nothing is wrong"
    for source in (path, tmp_path / "manifest.json", str(tmp_path / "{000000..000002}.tar"), [path]):
        assert faults(source) == []
    with pytest.raises(ValueError, match="num_threads=0, expected at least 1"):
        tc.verify(path, num_threads=0)


def test_while_a_writer_is_active(tmp_path: Path) -> None:
    """A writer names a shard before it lists it."""
    path = write(tmp_path, 2)
    with tc.ShardWriter(tmp_path / "other-%d.tar", fsync=False) as sink:
        sink.write("9", sample(9))
        (tmp_path / "unlisted.tar").write_bytes(path.read_bytes())
        assert not any("does not list it" in what for _, what in faults(tmp_path))
    assert (None, "manifest.json does not list it") in faults(tmp_path)


@pytest.mark.parametrize(
    "name", ["skel.pyd", "safetensors", *(pytest.param(part, marks=pytest.mark.long) for part in ("headers", "end"))]
)
def test_every_byte(tmp_path: Path, name: str) -> None:
    """Only padding, contents without a digest, and the end of a checksum's field, which readers skip, may change."""
    path = write(tmp_path, 1)
    places, nbytes = members(path), path.stat().st_size
    end = max(end + -end % BLOCK for _, end in places.values())
    headers = [
        at
        for name, (begin, _) in places.items()
        for at in range(begin - BLOCK, begin)
        if at - begin not in (-357, -358) and not name.endswith("jpg")  # which is as `json`
    ]
    parts = {"headers": headers, "end": range(end, nbytes)}
    for at in parts[name] if name in parts else range(*places[f"000.{name}"]):
        flip(path, at, 0x20)
        report = tc.verify(path, num_threads=1)
        flip(path, at, 0x20)
        assert report.faults, at
        assert name in parts or (report.num_damaged, report.faults[0].key) == (1, "000"), at


def test_every_fault_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path, 6, dali_index=False)
    places = members(path)
    flip(path, places["001.safetensors"][1] - 1)
    flip(path, places["003.skel.pyd"][1] - 2)
    flip(path, places["004.json"][0] - 500)  # its tar header
    flip(path, places["005.safetensors"][0] + 12)
    report = tc.verify(path)
    texts = ["the safetensors member is damaged: its digest does not match its bytes", "the skeleton is damaged: "]
    texts += ["bad checksum: ", "'safetensors': ", "member 'json' is lost: the index at its end lists it"]
    found = [
        ("001", places["001.safetensors"][0]),
        ("003", places["003.skel.pyd"][0]),
        (None, places["004.json"][0] - BLOCK),
        ("005", places["005.safetensors"][0]),
        ("004", None),
    ]
    assert [(fault.key, fault.offset) for fault in report.faults] == found
    assert all(fault.what.startswith(text) for fault, text in zip(report.faults, texts, strict=True))
    assert (report.num_samples, report.num_damaged, report.num_lost) == (6, 3, 0)
    assert f"{path}: sample '001': byte {places['001.safetensors'][0]}: the safetensors member" in str(report)
    assert "5 faults, 3 samples damaged" in str(report)


def test_long_reports_are_short(tmp_path: Path) -> None:
    """Samples that a cut has lost share a line; of other faults, 20 are shown."""
    path = write(tmp_path, 30)
    places, whole = members(path), path.read_bytes()
    path.write_bytes(whole[: places["002.skel.pyd"][0] - BLOCK])
    report = tc.verify(path)
    assert report.num_lost == 28  # by DALI's index alone
    lines = str(report).splitlines()
    assert lines[-1].endswith("the shard does not contain it (and 27 more like this, up to '029')")
    assert len(lines) == 3
    assert lines[1].endswith("; everything from there on is missing")
    report = tc.verify(tmp_path)
    assert str(report).count("and 27 more like this") == 1
    assert report.num_lost == 28
    assert "0 samples damaged, 28 lost" in str(report)
    for index in tmp_path.glob("*.idx"):
        index.unlink()  # the manifest alone says how many samples there were
    assert (tc.verify(tmp_path).num_lost, tc.verify(path).num_lost) == (28, 0)
    path.write_bytes(whole)
    for name, (begin, _) in places.items():
        if name.endswith("skel.pyd"):
            flip(path, begin + 60)
    assert str(tc.verify(path)).endswith("  … and 10 more")


@pytest.mark.parametrize("footer", [True, False])
def test_truncated_anywhere(tmp_path: Path, footer: bool) -> None:
    path = write(tmp_path, 2, footer=footer)
    whole = path.read_bytes()
    begins = [begin for span in members(path).values() for begin in span]
    places = {*begins, *range(0, len(whole), 256), *range(len(whole) - 70, len(whole))}
    for nbytes in sorted(places):
        path.write_bytes(whole[:nbytes])
        found = faults(tmp_path)
        assert any("lists it" in what or f"the shard has {nbytes} bytes" in what for _, what in found), nbytes
        missing = {"000", "001"} if nbytes < 512 else {"001"} if nbytes < begins[-2] else set()
        assert missing <= {key for key, _ in found}, nbytes
        if nbytes < begins[-1]:  # also without the manifest
            assert faults(path)


def test_halves_of_two_samples(tmp_path: Path) -> None:
    path = write(tmp_path, 4, footer=False, dali_index=False)
    one, other = members(path)["000.safetensors"], members(path)["003.safetensors"]
    content = bytearray(path.read_bytes())
    content[slice(*one)], content[slice(*other)] = content[slice(*other)], content[slice(*one)]
    path.write_bytes(content)
    found = faults(path)
    assert [key for key, _ in found] == ["000", "003"]
    assert all("do not belong together" in what for _, what in found)


def test_a_half_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path, 3, footer=False, dali_index=False)
    content = path.read_bytes()
    path.write_bytes(content.replace(member(path, "001.skel.pyd"), b""))
    assert faults(path) == [("001", "'safetensors': member 'skel.pyd' is missing, but 'safetensors' exists")]
    path.write_bytes(content.replace(member(write(tmp_path / "b", 3), "002.safetensors"), b""))
    assert faults(path) == [("002", "'skel.pyd': member 'safetensors' is missing, but 'skel.pyd' exists")]


def test_keys_that_occur_twice(tmp_path: Path) -> None:
    content = [("a.json", b"1"), ("b.json", b"2"), ("a.txt", b"3"), ("b.json", b"4"), ("b.json", b"5")]
    path = tmp_path / "a.tar"
    path.write_bytes(build(content))
    report = tc.verify(path)
    assert [(fault.key, fault.offset, fault.what) for fault in report.faults] == [
        ("a", 2048, "an earlier sample has the same key"),
        ("b", 3072, "an earlier sample has the same key"),
        ("b", 4096, "member 'b.json' occurs twice"),
    ]
    assert report.num_damaged == 2


def test_shards_of_other_writers(tmp_path: Path) -> None:
    for at, format in enumerate(FORMATS.values()):
        (tmp_path / f"zoo{at}.tar").write_bytes(build_with_tarfile(ZOO, format))
    with wds.TarWriter(str(tmp_path / "ours.tar"), encoder=tc.encoder(), mtime=0) as sink:
        sink.write({"__key__": "a", "text.tensorcache": sample(0), "json": {}, "JPG": b"x"} | {"txt": "é"})
    assert faults(tmp_path) == []
    sample_of_one = {"a": torch.ones(3)}
    content = [("x.safetensors", safetensors.torch.save(sample_of_one)), *halves("y", sample_of_one)]
    (tmp_path / "foreign.tar").write_bytes(build(content))
    assert faults(tmp_path) == []


def test_members_that_need_what_verify_lacks(tmp_path: Path) -> None:
    """Skeletons without a digest: one of plain values, and an attack, which is named, and not called damage."""
    attack = b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R."
    path, tensors = tmp_path / "a.tar", safetensors.torch.save({})
    for skeleton, num_unread in ((pickle.dumps({"x": 1}, 4), 0), (attack, 1)):
        path.write_bytes(build([("000.skel.pyd", skeleton), ("000.safetensors", tensors)]))
        report = tc.verify(path)
        assert (report.ok, report.num_unverified, report.num_unread) == (True, 1, num_unread)
        assert "no digests: 1 sample;" in str(report)
    assert report.needs == {"os.system"}
    assert "os.system" in str(report)


def test_classes(tmp_path: Path) -> None:
    write_samples(tmp_path / "0.tar", {f"{i}": {"pose": Pose(i), "x": torch.ones(2)} for i in range(3)}, allow=[Pose])
    report = tc.verify(tmp_path)
    assert report.ok, report
    assert report.num_unread == 3
    assert "not decoded: 3 samples" in str(report)
    assert report.needs == {f"{Pose.__module__}.Pose"}
    assert f"{Pose.__module__}.Pose" in str(report)
    report = tc.verify(tmp_path, allow=[Pose])
    assert report.ok, report
    assert report.num_unread == 0
    flip(tmp_path / "0.tar", members(tmp_path / "0.tar")["1.skel.pyd"][1] - 3)
    for allow in ([], [Pose]):
        report = tc.verify(tmp_path, allow=allow)
        assert [fault.key for fault in report.faults] == ["1"]
    tc.repair(tmp_path, tmp_path / "out")
    assert tc.verify(tmp_path / "out", allow=[Pose]).num_samples == 2


def test_large_samples_in_little_memory(tmp_path: Path) -> None:
    samples = {f"{i}": {"video": torch.full((4 << 20,), i).half()} for i in range(3)}
    write_samples(tmp_path / "0.tar", samples, lambda i: {"mp4": bytes(3 << 20)})
    assert faults(tmp_path) == []
    with little_memory(3 << 20):
        assert tc.verify(tmp_path, num_threads=1).ok
    flip(tmp_path / "0.tar", members(tmp_path / "0.tar")["1.safetensors"][1] - 1)
    assert [key for key, _ in faults(tmp_path)] == ["1"]


def test_a_large_sample_in_front_of_a_missing_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members_of = [halves(str(i), {"x": torch.full((1_700_000 + i,), i)}) for i in range(3)]
    path = tmp_path / "0.tar"
    path.write_bytes(build([half for pair in members_of for half in pair]))
    end = members(path)["2.safetensors"][1]
    path.write_bytes(path.read_bytes()[: end + -end % BLOCK])
    report = tc.verify(path)
    assert [(fault.key, fault.what[:26]) for fault in report.faults] == [(None, "truncated: the file ends a")]
    assert (report.num_samples, report.num_damaged) == (3, 0)
    flip(path, end - 1)
    assert [key for key, _ in faults(path)] == ["2", None]
    flip(path, end - 1)
    bad = members(path)["1.safetensors"][1] - 200
    break_disk(monkeypatch, str(path), bad, bad + 1)
    for num_threads in (1, 2):
        faulty = tc.verify(path, num_threads=num_threads).faults
        assert {fault.key: fault.kind for fault in faulty} == {"1": "unreadable", None: "truncated"}


def test_a_disk_that_cannot_be_read_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index, all other samples are found."""
    path = write(tmp_path / "a", 100, dali_index=False, manifest=False)
    bad, _ = members(path)["052.safetensors"]
    break_disk(monkeypatch, str(path), bad + 130, bad + 150)
    assert {key for key, _ in faults(path)} == {"052"}
    report = tc.repair(path, tmp_path / "out")
    assert {fault.kind for fault in report.faults} == {"unreadable"}
    assert {fault.key for fault in report.faults} == {"052"}
    assert list(tc.open(tmp_path / "out").keys()) == [f"{i:03d}" for i in range(100) if i != 52]
    break_disk(monkeypatch, str(path), 0, path.stat().st_size)
    assert [what[:29] for _, what in faults(path)] == ["cannot be read: [Errno 5] Inp", "the index at its end: [Errno "]


@pytest.mark.parametrize("byte", [b"\0", b"\xff"])
@pytest.mark.parametrize("first", [2, 4, 5, 20, 41])
def test_skeletons_of_which_nothing_is_left(tmp_path: Path, first: int, byte: bytes) -> None:
    """Also where so much of the preamble is destroyed that it could be one of stock pickle, which has no digest."""
    path = write(tmp_path, 3)
    begin, end = members(path)["001.skel.pyd"]
    content = path.read_bytes()
    path.write_bytes(content[: begin + first] + byte * (end - begin - first) + content[end:])
    report = tc.verify(path)
    assert {fault.key for fault in report.faults} == {"001"}
    assert (report.num_damaged, report.num_unread) == (1, 0)
    tc.repair(path, tmp_path / "out")
    assert list(tc.open(tmp_path / "out").keys()) == ["000", "002"]


def test_a_skeleton_that_became_one_that_needs_a_class(tmp_path: Path) -> None:
    """The index at the end of the shard says that it needed none."""
    path = write(tmp_path, 3)
    begin, end = members(path)["001.skel.pyd"]
    content = path.read_bytes()
    needy = pickle.dumps(tc.open, 4)
    path.write_bytes(content[:begin] + needy + content[begin + len(needy) : end] + content[end:])
    assert [key for key, _ in faults(path)] == ["001"]
    short = b"\x80\x04\x8c\x02os\x8c\x06system\x93"
    short += b"\x8c" + bytes([end - begin - len(short) - 5]) + b"x" * (end - begin - len(short) - 5) + b"\x85R."
    path.write_bytes(content[:begin] + short + content[end:])
    report = tc.verify(path)
    assert [fault.key for fault in report.faults] == ["001"]
    assert report.needs == {"os.system"}
