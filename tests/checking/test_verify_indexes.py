"""`verify` compares indexes, `.idx` files and the manifest with the shards."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.codec.second_shards import build_trailer, index_arrays
from tests.shards.damage import faults, flip, members, write
from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.load_index import load_index
from wds_tensorcache.storage.files import ShardFile


def test_a_footer_of_another_state(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 3, dali_index=False)
    other = write(tmp_path / "b", 3, dali_index=False, caches=("text",))
    index, end = load_index(ShardFile(str(other))), load_index(ShardFile(str(path))).end
    whole = path.read_bytes()
    path.write_bytes(whole[: end + 1024] + build_footer(dataclasses.replace(index, end=end)))
    assert faults(path) == [(None, "the index at its end: the index has a member that extends beyond the archive")]
    path.write_bytes(other.read_bytes()[: index.end + 1024] + build_footer(dataclasses.replace(index, caches={})))
    assert [key for key, _ in faults(path)] == ["000", "001", "002"]
    assert all("is not in the index at its end" in what for _, what in faults(path))
    own = load_index(ShardFile(str(write(tmp_path / "c", 3, dali_index=False))))
    own = dataclasses.replace(own, caches={"": dataclasses.replace(own.caches[""], digest=own.caches[""].digest + 1)})
    path.write_bytes(whole[: end + 1024] + build_footer(own))
    assert [key for key, _ in faults(path)] == ["000", "001", "002"]
    assert faults(path)[0][1] == "the index at its end disagrees with the shard about member 'safetensors'"
    path.write_bytes(whole[: end + 1024] + other.read_bytes()[index.end + 1024 :])
    assert faults(path) == [
        (None, "the bytes after the end-of-archive marker are not an index, or are a damaged or stale index")
    ]


def test_an_index_beside_the_shard(tmp_path: Path) -> None:
    path = write(tmp_path, 3, footer=False, dali_index=False)
    tc.write_index(path, dali_index=False)
    assert faults(path) == []
    sidecar = Path(f"{path}.index")
    flip(sidecar, 200)
    assert faults(path) == [(None, "000000.tar.index is damaged or stale")]
    index = scan_shard(ShardFile(str(path)).read, path.stat().st_size)
    keys = dataclasses.replace(index.keys, text=index.keys.text.copy())
    keys.text[4] += 5
    sidecar.write_bytes(build_footer(dataclasses.replace(index, keys=keys), path.stat().st_size))
    assert sorted({key for key, _ in faults(path)}) == ["001", "051"]


@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize("beside", [False, True], ids=["footer", "beside"])
def test_an_index_with_a_key_twice(tmp_path: Path, beside: bool, is_damaged: bool) -> None:
    """Also if another sample is damaged."""
    path = write(tmp_path, 4, dali_index=False)
    shard = bytearray(path.read_bytes())
    arrays, names, end = index_arrays(shard)
    for name, array in arrays.items():
        if name.startswith(("cache", "member")):
            array.append(array[1])
    arrays["keys.text"] += b"001"
    arrays["keys.ends"].append(15)
    if is_damaged:
        shard[members(path)["003.safetensors"][1] - 1] ^= 1
    archive = bytes(shard[: end + 1024])
    path.write_bytes(archive if beside else archive + build_trailer(arrays, names, end))
    if beside:
        Path(f"{path}.index").write_bytes(build_trailer(arrays, names, end, len(archive)))
    found = faults(path)
    assert (None, f"{'000000.tar.index' if beside else 'the index at its end'} lists a sample twice") in found
    assert ("003" in {key for key, _ in found}) == is_damaged


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


def test_dali_index(tmp_path: Path) -> None:
    path = write(tmp_path, 4, per_shard=2)
    idx = path.with_suffix(".idx")
    text = idx.read_text()
    idx.write_text(text.replace("001.json", "007.json"))
    assert {key for key, _ in faults(path)} == {"001", "007"}
    idx.write_text(text.replace("v1.2 2", "v1.2 3"))
    assert [what.partition(",")[0] for _, what in faults(path)] == ["000000.idx is damaged: the first line is 'v1.2 3'"]
    idx.write_text(text.replace("json 2", "json x2", 1))
    assert ("000", "000000.idx, line 2") in [(key, what[:18]) for key, what in faults(path)]
    lines = text.splitlines()
    older = ["v1.1 2"] + [" ".join(f for at, f in enumerate(line.split()) if at % 4 != 3) for line in lines[1:]]
    idx.write_text("\n".join(older) + "\n")
    assert faults(path) == []
    idx.unlink()
    assert faults(path) == []
    assert faults(tmp_path) == [(None, "000000.idx is missing, although other shards have an `.idx` file")]


def test_manifest_of_another_state(tmp_path: Path) -> None:
    path = write(tmp_path, 6, per_shard=2, fingerprint={"model": "a"})
    manifest = tmp_path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"nsamples": 2', '"nsamples": 3', 1))
    assert faults(tmp_path) == [(None, "the shard has 2 samples, but manifest.json says 3")]
    manifest.write_text(text.replace('"filesize": ', '"filesize": 1', 1))
    assert "bytes, but manifest.json says" in faults(tmp_path)[0][1]
    manifest.write_text(text.replace('{"": 2}', '{"": 2, "x": 1}', 1))
    assert "the shard has {'': 2} samples in its caches" in faults(tmp_path)[0][1]
    manifest.write_text(text.replace('{"model": "a"}', '{"model": "b"}', 1))
    assert "the shard was made with {'model': 'a'}, but manifest.json says {'model': 'b'}" in faults(tmp_path)[0][1]
    manifest.write_text(text)
    os.rename(path, tmp_path / "000007.tar")
    report = tc.verify(tmp_path)
    assert [(Path(fault.shard).name, fault.what[:26]) for fault in report.faults[:2]] == [
        ("000000.tar", "the shard is missing; mani"),
        ("000007.tar", "manifest.json does not lis"),
    ]
    manifest.write_text(text[:50])
    assert "not JSON" in faults(tmp_path)[0][1]
    assert tc.verify(tmp_path).num_shards == 3


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


def test_what_is_no_shard(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither manifest.json nor"):
        tc.verify(tmp_path)
    with pytest.raises(ValueError, match="num_threads=-1, expected at least 1"):
        tc.verify(write(tmp_path), num_threads=-1)
    for name, content in {"empty": b"", "gzip": b"\x1f\x8b" + bytes(2000), "text": b"hello" * 300}.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(content)
        assert len(faults(path)) == 1
    assert json.loads((tmp_path / "manifest.json").read_text())


@pytest.mark.parametrize("name", ["000000.tar.index", "000000.idx", "000001.tar"])
def test_pipes_beside_shards_are_not_waited_for(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 2, footer=False, dali_index=False, manifest=False)
    os.mkfifo(tmp_path / name)
    (what,) = [what for _, what in faults(tmp_path)]
    assert "found a folder, pipe or device" in what
    assert name.endswith(".tar") or faults(path) == faults(tmp_path)


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", "0x1"])
def test_impossible_numbers_in_a_dali_index(tmp_path: Path, number: str) -> None:
    path = write(tmp_path, 2)
    idx = path.with_suffix(".idx")
    lines = idx.read_text().splitlines()
    lines[1] = " ".join(["json", number, *lines[1].split()[2:]])
    idx.write_text("\n".join(lines) + "\n")
    assert any("line 2" in what for _, what in faults(path))


def test_a_wrong_letter_in_a_dali_index(tmp_path: Path) -> None:
    path = write(tmp_path, 2)
    idx = path.with_suffix(".idx")
    idx.write_text(idx.read_text().replace("001.safetensors", "001.safetensorr"))
    assert any("line 3" in what for _, what in faults(path))


def test_an_index_of_another_shard_is_one_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 50)
    with tc.ShardWriter(tmp_path / "b" / "%06d.tar", fsync=False) as sink:
        for number in range(50):
            sink.write(f"other{number}", {"x": 1})
    (tmp_path / "b" / "000000.idx").replace(path.with_suffix(".idx"))
    assert faults(path) == [(None, "000000.idx belongs to a different shard: this shard has none of its samples")]


def test_samples_that_are_lost_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, 30, per_shard=10)
    begin, _ = members(path)["004.skel.pyd"]
    path.write_bytes(path.read_bytes()[: begin - 512])
    report = tc.verify(tmp_path)
    assert (report.num_samples, report.num_damaged, report.num_lost, report.num_missing) == (24, 0, 6, 0)
    assert "0 samples damaged, 6 lost" in str(report)
    assert sum("the sample is lost: 000000.idx lists it" in fault.what for fault in report.faults) == 6
    (tmp_path / "000001.tar").unlink()
    report = tc.verify(tmp_path)
    assert (report.num_samples, report.num_damaged, report.num_lost, report.num_missing) == (14, 0, 16, 1)


def test_the_end_of_the_archive_is_two_blocks(tmp_path: Path) -> None:
    path = write(tmp_path, 2, footer=False, dali_index=False, manifest=False)
    end = load_index(ShardFile(str(path))).end
    flip(path, end + 700)
    assert faults(path) == [(None, "the end-of-archive marker is damaged")]


def test_manifests_that_open_refuses(tmp_path: Path) -> None:
    path = write(tmp_path, 2, fingerprint={"revision": 1})
    manifest = tmp_path / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"revision": 1}', '"revision": 1.0}'))
    assert (
        "the shard was made with {'revision': 1}, but manifest.json says {'revision': 1.0}" in faults(path.parent)[0][1]
    )
    manifest.write_text(text.replace('{"": 2}', '{"": true}'))
    assert "expected numbers of samples" in faults(path.parent)[0][1]
    document = json.loads(text)
    document["shardlist"] = []
    manifest.write_text(json.dumps(document))
    path.unlink()
    for source in (manifest, tmp_path, tmp_path / "other.json"):
        with pytest.raises(FileNotFoundError):
            tc.verify(source)


def test_a_manifest_of_another_tool_says_nothing_of_fingerprints(tmp_path: Path) -> None:
    write(tmp_path, 2, fingerprint={"revision": 1})
    manifest = tmp_path / "manifest.json"
    document = json.loads(manifest.read_text())
    del document["tensorcache"]
    manifest.write_text(json.dumps(document))
    assert faults(tmp_path) == []


def test_an_idx_is_missing_only_beside_others_of_its_folder(tmp_path: Path) -> None:
    with_idx, without = write(tmp_path / "a", 2), write(tmp_path / "b", 2, dali_index=False)
    assert faults([with_idx, without]) == []
    with tc.ShardWriter(tmp_path / "a" / "other-%d.tar", dali_index=False, fsync=False) as sink:
        sink.write("other", {"x": 1})
    assert faults(tmp_path / "a") == []


def test_a_shard_under_two_names_is_one(tmp_path: Path) -> None:
    path = write(tmp_path, 2, dali_index=False)
    (tmp_path / "link.tar").symlink_to(path)
    report = tc.verify([path, f"{tmp_path}/./000000.tar", tmp_path / "link.tar"])
    assert report.ok
    assert (report.num_shards, report.num_repeated) == (1, 0)


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
    read = ShardFile.read

    def truncate_and_read(self: ShardFile, begin: int, end: int) -> bytes:
        if begin >= 1 << 20:
            os.truncate(path, 1 << 20)
        return read(self, begin, end)

    monkeypatch.setattr(ShardFile, "read", truncate_and_read)
    (fault,) = tc.verify(path, num_threads=1).faults
    assert fault.what.endswith("the shard was changed while it was checked")


def test_a_manifest_whose_shards_are_all_missing(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "%d.tar", max_samples=2) as writer:
        for number in range(4):
            writer.write(str(number), number)
    for path in tmp_path.glob("*.tar"):
        path.unlink()
    report = tc.verify(tmp_path)
    assert (report.num_missing, report.num_lost, len(report.faults)) == (2, 4, 2)
    assert {fault.kind for fault in report.faults} == {"missing"}
    assert not tc.repair(tmp_path, tmp_path.with_name("mended")).ok
