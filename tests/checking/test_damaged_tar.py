"""`repair` saves samples by their index: two offsets and two digests, whatever has become of the tar around them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.checking.test_repair import repaired
from tests.codec.second_shards import build_trailer, index_arrays
from tests.conftest import Seeded
from tests.same import assert_same
from tests.shards.damage import flip, member, members, sample, write
from tests.shards.footers import body_of, put_footer
from tests.shards.tars import BLOCK, build, build_with_tarfile, halves

BESIDE = ["footer", "index"]


def shard(folder: Path, beside: str, count: int = 6) -> Path:
    path = write(folder, count, footer=beside == "footer", dali_index=False, manifest=False)
    if beside == "index":
        tc.write_index(path, dali_index=False)
    return path


def saved(path: Path, out: Path, are_others_whole: bool = True) -> tuple[Any, list[str]]:
    """Return the report, and the keys that repair saved; each has its own sample, and the other members that it had."""
    report, keys = repaired(path, out)
    with tc.open(out / path.name, cache="") as cache:
        for key in keys:
            for suffix in cache.members if are_others_whole else ():
                if f"{key}.{suffix}" in members(out / path.name):
                    (found,) = cache.read_members([keys.index(key)], suffix)
                    assert found == (bytes([int(key)]) * 700 if suffix == "jpg" else b'{"label": %d}' % int(key))
    return report, keys


def everything(count: int = 6) -> list[str]:
    return [f"{i:03d}" for i in range(count)]


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("damage", ["zeros", "noise", "flip"])
def test_every_header_is_lost(tmp_path: Path, beside: str, damage: str, rng: Seeded) -> None:
    path = shard(tmp_path / "a", beside)
    content = bytearray(path.read_bytes())
    whole = {name: member(path, name)[:BLOCK] for name in members(path)}
    for begin, _ in members(path).values():
        if damage == "zeros":
            content[begin - BLOCK : begin] = bytes(BLOCK)
        elif damage == "noise":
            content[begin - BLOCK : begin] = rng.randbytes(BLOCK)
        else:
            content[begin - BLOCK] ^= 1
    path.write_bytes(content)
    report, keys = saved(path, tmp_path / "out")
    assert keys == everything()
    assert (report.num_samples, report.num_damaged, report.num_lost) == (6, 0, 0)
    assert {fault.key for fault in report.faults if fault.kind == "header"} == set(keys)
    for name in members(tmp_path / "out" / path.name):
        assert member(tmp_path / "out" / path.name, name)[:BLOCK] == whole[name]
    assert not tc.open(tmp_path / "out" / path.name).members, "other members have no digests"
    with pytest.raises(tc.FormatError):
        tc.repair(path, tmp_path / "never", drop=False)


@pytest.mark.parametrize("beside", BESIDE)
def test_every_block(tmp_path: Path, beside: str, rng: Seeded) -> None:
    """Whichever block is lost: of samples that have none of its bytes all are saved, and nothing else."""
    path = shard(tmp_path / "a", beside, 3)
    whole, places = path.read_bytes(), members(path)
    of_caches = {name: place for name, place in places.items() if name.endswith(("pyd", "tensors"))}
    end = max(last + -last % BLOCK for _, last in places.values())
    for number, begin in enumerate(range(0, end, BLOCK)):
        for kind, instead in (("zeros", bytes(BLOCK)), ("noise", rng.randbytes(BLOCK))):
            path.write_bytes(whole[:begin] + instead + whole[begin + BLOCK :])
            _, keys = saved(path, tmp_path / f"{kind}{number}", are_others_whole=False)
            touched = {name[:3] for name, (first, last) in of_caches.items() if first < begin + BLOCK and last > begin}
            assert keys == [key for key in everything(3) if key not in touched], (kind, begin)


@pytest.mark.parametrize("beside", BESIDE)
def test_samples_with_wrong_digests_are_not_saved(tmp_path: Path, beside: str) -> None:
    path = shard(tmp_path / "a", beside)
    places = members(path)
    for name in ("001.skel.pyd", "003.safetensors", "004.skel.pyd", "005.safetensors"):
        flip(path, places[name][0] - 300)
    flip(path, places["001.safetensors"][1] - 1)
    flip(path, places["003.skel.pyd"][1] - 1)
    flip(path, places["005.safetensors"][0] + 20)
    report, keys = saved(path, tmp_path / "out")
    assert keys == ["000", "002", "004"]
    assert report.num_samples + report.num_lost == 6


def test_an_index_of_another_shard(tmp_path: Path) -> None:
    one, other = shard(tmp_path / "a", "index", 4), tmp_path / "other.tar"
    shift = build([("README", b"x" * 600)])[:-1024]
    other.write_bytes(shift + one.read_bytes()[: -len(shift)])
    shutil.copy(f"{one}.index", f"{other}.index")
    flip(other, len(shift) + members(one)["002.skel.pyd"][0] - 300)
    _, keys = saved(other, tmp_path / "out")
    assert keys == ["000", "001", "003"]


@pytest.mark.parametrize("name", ["001.tar", "archive"])
@pytest.mark.parametrize("beside", BESIDE)
def test_a_tar_in_a_tar(tmp_path: Path, beside: str, name: str) -> None:
    """Members of a tar in a member are not samples of the shard, though the header of that member is lost."""
    inner = build([*halves("999", sample(9)), ("998.json", b"1")])
    content = write(tmp_path / "a", 3, footer=False, dali_index=False, manifest=False).read_bytes()
    at, path = content.index(b"002.skel.pyd"), tmp_path / "x.tar"
    path.write_bytes(content[:at] + build([(name, inner)])[:-1024] + content[at:])
    index = tc.write_index(path, dali_index=False)
    if beside == "footer":
        sidecar = Path(f"{path}.index")
        put_footer(path, body_of(sidecar), index.end)
        sidecar.unlink()
    flip(path, members(path)[name][0] - 300)
    report, keys = saved(path, tmp_path / "out")
    assert keys == everything(3)
    assert report.num_samples == 3


@pytest.mark.parametrize("name", [None, "001.safetensors", "002.skel.pyd"])
@pytest.mark.parametrize("beside", BESIDE)
def test_a_sample_that_was_appended(tmp_path: Path, beside: str, name: str | None) -> None:
    """`tar -r` overwrites the index at the end of a shard; one beside it is then stale."""
    path = shard(tmp_path / "a", beside, 3)
    end = max(last + -last % BLOCK for _, last in members(path).values())
    more = build(halves("007", sample(7)))
    content = path.read_bytes()
    path.write_bytes(content[:end] + more + content[end + len(more) :])
    if name is not None:
        flip(path, members(path)[name][0] - 300)
    _, keys = saved(path, tmp_path / "out")
    lost = {name[:3]} if name is not None and beside == "footer" else set[str]()
    assert keys == [key for key in [*everything(3), "007"] if key not in lost]


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9])
def test_cut_short(tmp_path: Path, keep: float) -> None:
    """The sidecar is of a longer shard then, and still says where samples are."""
    path = shard(tmp_path / "a", "index", 6)
    places, content = members(path), path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    whole = [key for key in everything() if places[f"{key}.safetensors"][1] <= keep * len(content)]
    flip(path, places["001.skel.pyd"][0] - 300)
    flip(path, places["000.safetensors"][0] - 300)
    _, keys = saved(path, tmp_path / "out")
    assert keys == whole


def test_names_that_no_header_field_holds(tmp_path: Path) -> None:
    key = "é" * 60 + "/" + "d" * 60 + "/000"
    path = tmp_path / "x.tar"
    path.write_bytes(build_with_tarfile([*halves(key, sample(0)), ("b.json", b"1")]))
    tc.write_index(path, dali_index=False)
    content = bytearray(path.read_bytes())
    first = members(path)[f"{key}.skel.pyd"][0]
    content[:first] = bytes(first)
    path.write_bytes(content)
    tc.repair(path, tmp_path / "out")
    with tc.open(tmp_path / "out" / "x.tar") as cache:
        assert list(cache.keys()) == [key]
        assert_same(tc.realize(cache[0]), sample(0))


def test_an_index_that_announces_much(tmp_path: Path) -> None:
    """One that points everywhere costs no more than the bytes that are there."""
    path = shard(tmp_path / "a", "footer", 4)
    content = path.read_bytes()
    arrays, names, _ = index_arrays(content)
    path.write_bytes(content[:2048])
    Path(f"{path}.index").write_bytes(build_trailer(arrays, names, 1 << 50, 1 << 51))
    report = tc.verify(path)
    assert report.num_lost == 0
    assert "truncated" in {fault.kind for fault in report.faults}
