"""`verify` compares indexes, `.idx` files and the manifest with the shards."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.codec.second_shards import build_trailer, index_arrays
from tests.reading.batches import write as write_samples
from tests.shards.damage import faults, flip, members, write
from tests.shards.footers import body_of, end_of, forge, put_footer, rename

WRONG = "disagrees with the shard"


def test_an_index_at_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 3, dali_index=False)
    other = write(tmp_path / "b", 3, dali_index=False, caches=("text",))
    whole, end, other_end = path.read_bytes(), end_of(path), end_of(other)
    put_footer(path, body_of(other), end)
    assert faults(path) == [(None, "the index at its end: the index has a member that extends beyond the archive")]

    def drop_caches(arrays: dict[str, Any]) -> None:
        rename(caches=[])(arrays)
        for name in [name for name in arrays if name.startswith("cache.")]:
            del arrays[name]

    def change_digests(arrays: dict[str, Any]) -> None:
        arrays["cache.0.digest"] = arrays["cache.0.digest"] + 1

    for wrong in (drop_caches, change_digests):
        path.write_bytes(whole)
        forge(path, wrong)
        ((key, what),) = faults(path)
        assert (key, what.partition(";")[0]) == ("000", f"the index at its end {WRONG} about 3 samples")
    path.write_bytes(whole[: end + 1024] + other.read_bytes()[other_end + 1024 :])
    assert faults(path) == [
        (None, "the bytes after the end-of-archive marker are not an index, or are a damaged or stale index")
    ]


def test_an_index_beside_the_shard(tmp_path: Path) -> None:
    path = write(tmp_path, 3, footer=False, dali_index=False)
    tc.write_index(path, dali_index=False)
    assert faults(path) == []
    sidecar = Path(f"{path}.index")
    flip(sidecar, 200)
    assert faults(path) == [(None, "000000.tar.index is damaged or stale; `tensorcache index` writes it anew")]
    arrays, names, end = index_arrays(path.read_bytes())
    arrays["keys.text"] = list(bytes(arrays["keys.text"]).replace(b"001", b"051"))
    sidecar.write_bytes(build_trailer(arrays, names, end, path.stat().st_size))
    assert [key for key, _ in faults(path)] == ["051", "001"]  # the first is lost, if the index is right


@pytest.mark.parametrize("beside", [False, True], ids=["footer", "beside"])
def test_an_index_with_a_key_twice(tmp_path: Path, beside: bool) -> None:
    path = write(tmp_path, 4, dali_index=False)
    shard = path.read_bytes()
    arrays, names, end = index_arrays(shard)
    for name, array in arrays.items():
        if name.startswith(("cache", "member")):
            array.append(array[1])
    arrays["keys.text"] += b"001"
    arrays["keys.ends"].append(15)
    archive = shard[: end + 1024]
    path.write_bytes(archive if beside else archive + build_trailer(arrays, names, end))
    if beside:
        Path(f"{path}.index").write_bytes(build_trailer(arrays, names, end, len(archive)))
    ((_, what),) = faults(path)
    assert what.startswith(f"{'000000.tar.index' if beside else 'the index at its end'} {WRONG}; ")


def test_bytes_between_the_marker_and_the_index(tmp_path: Path) -> None:
    path = write(tmp_path, 3, dali_index=False)
    shard = path.read_bytes()
    arrays, names, end = index_arrays(shard)
    nbytes = len(build_trailer(arrays, names, end, 1))
    for between in (bytes(1024), bytes(1000) + b"what is this?".ljust(24)):
        before = shard[: end + 1024] + between + bytes(-nbytes % 512)
        path.write_bytes(before + build_trailer(arrays, names, end, len(before) + nbytes))
        assert len(tc.open(path)) == 3
        what = "the bytes between the end-of-archive marker and the index at its end are not zeros"
        assert faults(path) == ([(None, what)] if any(between) else [])
    assert tc.verify(path).faults[0].offset == end + 1024 + 1000


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("001.json", "007.json", {"001", "007"}),
        ("v1.2 2", "v1.2 3", {None}),
        ("json 2", "json x2", {"000"}),
        ("json ", "json ² ", {"000"}),
        ("safetensors ", f"safetensors {'9' * 5000} ", {"000"}),
        ("000.", "900.", {"000", "900"}),
    ],
)
def test_dali_index(tmp_path: Path, old: str, new: str, wanted: set[str | None]) -> None:
    path = write(tmp_path, 2)
    idx = path.with_suffix(".idx")
    idx.write_text(idx.read_text().replace(old, new))
    assert {key for key, _ in faults(path)} <= wanted
    assert not tc.verify(path).ok


def test_other_dali_indexes(tmp_path: Path) -> None:
    path = write(tmp_path, 4, per_shard=2)
    idx = path.with_suffix(".idx")
    lines = idx.read_text().splitlines()
    older = ["v1.1 2"] + [" ".join(f for at, f in enumerate(line.split()) if at % 4 != 3) for line in lines[1:]]
    idx.write_text("\n".join(older) + "\n")
    assert faults(path) == []
    idx.write_text("\n".join(older).replace("json 2", "json 3") + "\n")
    assert [what.partition(";")[0] for _, what in faults(path)] == [f"000000.idx {WRONG}"]
    idx.unlink()
    assert faults(path) == []
    assert faults(tmp_path) == [(None, "000000.idx is missing, although other shards have an `.idx` file")]
    (tmp_path / "000001.idx").rename(idx)
    assert [what.partition(",")[0] for _, what in faults(path)] == ["000000.idx belongs to a different shard"]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"nsamples": 2', '"nsamples": 3', "the shard has 2 samples, but manifest.json says 3"),
        ('"filesize": ', '"filesize": 1', "bytes, but manifest.json says"),
        ('{"": 2}', '{"": 2, "x": 1}', "the shard has {'': 2} samples in its caches"),
        ('{"": 2}', '{"": true}', "the shard has numbers of samples by cache, but manifest.json says {'': True}"),
        (
            '{"model": 1}',
            '{"model": 1.0}',
            "the shard was made with {'model': 1}, but manifest.json says {'model': 1.0}",
        ),
        ('{"model": 1}', "1", "but manifest.json says 1"),
        ('"caches": {', '"caches": [], "x": {', "expected caches and fingerprints to be objects"),
        ("{", "[", "not JSON"),
    ],
)
def test_manifests(tmp_path: Path, old: str, new: str, what: str) -> None:
    write(tmp_path, 6, per_shard=2, fingerprint={"model": 1})
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(old, new, 1))
    assert what in faults(tmp_path)[0][1]
    assert tc.verify(tmp_path).num_shards == 3


def test_manifests_and_folders(tmp_path: Path) -> None:
    path = write(tmp_path, 6, per_shard=2, fingerprint={"model": 1})
    manifest = tmp_path / "manifest.json"
    document = json.loads(manifest.read_text())
    path.rename(tmp_path / "000007.tar")
    assert [(Path(fault.shard).name, fault.what[:26]) for fault in tc.verify(tmp_path).faults[:2]] == [
        ("000000.tar", "the shard is missing; mani"),
        ("000007.tar", "manifest.json does not lis"),
    ]
    (tmp_path / "000007.tar").rename(path)
    manifest.write_text(json.dumps({name: value for name, value in document.items() if name != "tensorcache"}))
    assert faults(tmp_path) == []  # a manifest of another tool says nothing of fingerprints
    manifest.write_text(json.dumps(document | {"shardlist": []}))
    for shard in tmp_path.glob("*.tar"):
        shard.unlink()
    for source in (manifest, tmp_path, tmp_path / "other.json"):
        with pytest.raises(FileNotFoundError):
            tc.verify(source)


def test_a_shard_that_a_copy_of_another_has_replaced(tmp_path: Path) -> None:
    """Its own samples are lost, and the copied ones are not written twice."""
    folder = tmp_path / "a"
    path = write(folder, 6, per_shard=2)
    shutil.copy(folder / "000001.tar", path)
    report = tc.repair(folder, tmp_path / "out")
    assert (report.num_lost, report.num_repeated, report.num_samples_written) == (2, 2, 4)
    assert "the shard is a copy of 000001.tar; lost: 2 samples that manifest.json lists" in str(report)
    assert list(tc.open(tmp_path / "out").keys()) == ["002", "003", "004", "005"]
    assert tc.verify(folder).faults == report.faults
    whole = (folder / "000001.tar").read_bytes()
    os.truncate(folder / "000001.tar", members(folder / "000001.tar")["003.skel.pyd"][0])  # and its index
    report = tc.repair(folder, tmp_path / "most")
    assert report.num_lost >= 2
    assert list(tc.open(tmp_path / "most").keys()) == ["002", "003", "004", "005"]
    (folder / "000001.tar").write_bytes(whole)
    flip(folder / "000001.tar", members(folder / "000001.tar")["002.skel.pyd"][1] - 1)
    tc.repair(folder, tmp_path / "more")  # the copy has what the shard itself has lost
    assert list(tc.open(tmp_path / "more").keys()) == ["002", "003", "004", "005"]
    shutil.copy(folder / "000002.tar", folder / "more.tar")
    report = tc.verify(folder)
    assert "the shard is a copy of 000002.tar" in {fault.what for fault in report.faults}
    assert report.num_lost == 2


@pytest.mark.parametrize("part", ["no index", "two samples", "no padding", "a flipped bit"])
def test_a_shard_that_a_part_of_a_copy_has_replaced(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "a"
    path, original = write(folder, 9, per_shard=3), folder / "000001.tar"
    shutil.copy(original, path)
    keep = members(path)["005.skel.pyd"][0] if part == "two samples" else path.stat().st_size - 200
    if part == "no padding":
        keep = members(path)["004.safetensors"][1]
    os.truncate(path, keep)
    if part == "a flipped bit":
        flip(path, members(path)["004.skel.pyd"][1] - 1)
    report = tc.repair(folder, tmp_path / "out")
    assert (report.num_lost, report.num_samples_written) == (3, 6)
    assert "the shard is part of a copy of 000001.tar; lost: 3 samples that manifest.json lists" in str(report)
    assert list(tc.open(tmp_path / "out").keys()) == ["003", "004", "005", "006", "007", "008"]
    assert tc.verify(folder).faults == report.faults


def test_a_copy_that_has_no_index(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    path = write(folder, 5, per_shard=3, footer=False)
    shutil.copy(path, folder / "000001.tar")
    report = tc.repair(folder, tmp_path / "out")
    assert (report.num_lost, report.num_samples_written) == (2, 3)
    assert list(tc.open(tmp_path / "out").keys()) == ["000", "001", "002"]


def test_shards_that_have_changed_places_are_no_copies(tmp_path: Path) -> None:
    """Also if one of them has lost its index."""
    folder = tmp_path / "a"
    path, other = write(folder, 6, per_shard=3), folder / "000001.tar"
    os.truncate(other, other.stat().st_size - 200)
    path.rename(folder / "x")
    other.rename(path)
    (folder / "x").rename(other)
    report = tc.repair(folder, tmp_path / "out")
    assert (report.num_lost, report.num_samples_written) == (0, 6)


def test_repeated_keys_with_other_bytes_are_no_copy(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 6, per_shard=3)
    write_samples(path, {key: {"text": f"another {key}"} for key in ("003", "004", "005")}, overwrite=True)
    os.truncate(path, path.stat().st_size - 200)
    report = tc.repair(tmp_path / "a", tmp_path / "out")
    assert (report.num_repeated, report.num_samples_written) == (3, 6)


def test_many_shards_and_folders(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / name, 20, per_shard=2)
    folders = [tmp_path / name for name in ("b", "a", "c")]
    for folder in folders:
        flip(folder / "000007.tar", members(folder / "000007.tar")["014.skel.pyd"][1] - 1)
    report = tc.verify(folders, num_threads=3)
    assert report.faults == tc.verify(folders, num_threads=1).faults
    assert [Path(fault.shard).parent.name for fault in report.faults] == ["b", "a", "c"]
    assert (report.num_shards, report.num_samples, report.num_damaged) == (30, 60, 3)
    (tmp_path / "a" / "000003.tar").unlink()
    (tmp_path / "a" / "000003.tar").symlink_to("000003.tar")  # a loop: root cannot open it either
    report = tc.verify(folders)
    assert report.num_shards == 29
    assert "cannot be opened" in str(report)


def test_files_that_are_no_tars_are_faults(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither manifest.json nor"):
        tc.verify(tmp_path)
    for name, content in {"empty": b"", "gzip": b"\x1f\x8b" + bytes(2000), "text": b"hello" * 300}.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(content)
        assert len(faults(path)) == 1


@pytest.mark.parametrize("name", ["000000.tar.index", "000000.idx", "000001.tar"])
def test_pipes_beside_shards_are_not_waited_for(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 2, footer=False, dali_index=False, manifest=False)
    os.mkfifo(tmp_path / name)
    (what,) = [what for _, what in faults(tmp_path)]
    assert "found a folder, pipe or device" in what
    assert name.endswith(".tar") or faults(path) == faults(tmp_path)


def test_the_end_of_the_archive_is_two_blocks(tmp_path: Path) -> None:
    path = write(tmp_path, 2, footer=False, dali_index=False, manifest=False)
    flip(path, index_arrays(path.read_bytes())[2] + 700)
    assert faults(path) == [(None, "the end-of-archive marker is damaged")]


def test_an_idx_is_missing_only_beside_others_of_its_folder(tmp_path: Path) -> None:
    with_idx, without = write(tmp_path / "a", 2), write(tmp_path / "b", 2, dali_index=False)
    assert faults([with_idx, without]) == []
    write_samples(tmp_path / "a" / "other-%d.tar", {"other": {"x": 1}}, dali_index=False)
    assert faults(tmp_path / "a") == []


def test_a_shard_under_two_names_is_one(tmp_path: Path) -> None:
    path = write(tmp_path, 2, dali_index=False)
    (tmp_path / "link.tar").symlink_to(path)
    (tmp_path / "hard.tar").hardlink_to(path)  # readers of the manifest, too, take links for the listed shard
    for source in ([path, f"{tmp_path}/./000000.tar", tmp_path / "link.tar"], tmp_path):
        report = tc.verify(source)
        assert report.ok
        assert (report.num_shards, report.num_repeated) == (1, 0)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"nsamples": 2', '"nsamples": 3'))
    (fault,) = tc.verify([f"{tmp_path}/./000000.tar", tmp_path]).faults
    assert "manifest.json says 3" in fault.what


def test_keys_that_several_shards_have_are_counted(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, 3) for name in "abc"]
    report = tc.verify(paths)
    assert report.ok
    assert report.num_repeated == 3
    assert "in several shards: the keys of 3 samples" in str(report)
    assert tc.verify(paths[:1]).num_repeated == 0


def test_a_shard_is_cut_short_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 2, footer=False, dali_index=False, manifest=False)
    with path.open("ab") as file:
        file.write(bytes(3 << 20))
    preadv = os.preadv

    def truncate_and_read(fd: int, buffers: Any, begin: int) -> int:
        os.truncate(path, 1 << 20)
        return preadv(fd, buffers, begin)

    monkeypatch.setattr(os, "preadv", truncate_and_read)
    (fault,) = tc.verify(path, num_threads=1).faults
    assert fault.what.endswith("the shard was changed while it was checked")


def test_a_manifest_whose_shards_are_all_missing(tmp_path: Path) -> None:
    write_samples(tmp_path / "%d.tar", {str(number): number for number in range(4)}, max_samples=2)
    for path in tmp_path.glob("*.tar"):
        path.unlink()
    report = tc.verify(tmp_path)
    assert (report.num_missing, report.num_lost, len(report.faults)) == (2, 4, 2)
    assert {fault.kind for fault in report.faults} == {"missing"}
    assert not tc.repair(tmp_path, tmp_path.with_name("mended")).ok
