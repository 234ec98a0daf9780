"""Tars of webdataset's own writer, with its own encoders."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.cli.command import json_of
from tests.importers.folders import Gadget, assert_left_out, imported, saved, write_tar
from tests.same import assert_same
from tests.shards.tars import fix_checksums

JPEG = b"\xff\xd8\xff not a picture"


def write(path: Path, samples: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with wds.TarWriter(str(path)) as sink:
        for key, members in samples.items():
            sink.write({"__key__": key, **members})


def test_members_by_name(tmp_path: Path) -> None:
    """A sample without tensors, between samples with them, has its members, too."""
    latent, text = np.random.default_rng(0).normal(size=(4, 8, 8)), torch.randn(7, 16).bfloat16()
    members = {"latent.npy": latent, "text.pth": text, "jpg": JPEG, "json": {"label": 3}, "txt": "a cat"}
    write(tmp_path / "in" / "a.tar", {"dir/k0": members, "dir/k1": {"jpg": JPEG, "txt": "b"}, "dir/k2": members})
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert report.format == "webdataset"
    assert list(found) == ["dir/k0", "dir/k1", "dir/k2"]
    assert_same({"latent": torch.from_numpy(latent), "text": text}, found["dir/k2"])
    assert found["dir/k1"] == {}
    with tc.open(tmp_path / "out") as cache:
        more = [cache.read_members([2], suffix)[0] for suffix in ("jpg", "json", "txt")]
        assert bytes(cache.read_members([1], "jpg")[0]) == JPEG
    assert [bytes(each) for each in more] == [JPEG, b'{"label": 3}', b"a cat"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_are_reported(tmp_path: Path, kind: bytes) -> None:
    """GNU tar writes hard links for files that are one; without a report, the samples would just lack members."""
    write(tmp_path / "in" / "a.tar", {key: {"pth": torch.ones(2), "txt": "a cat"} for key in ("a", "b")})
    with tarfile.open(tmp_path / "in" / "a.tar", "a") as archive:
        member = tarfile.TarInfo("b.jpg")
        member.type, member.linkname = kind, "a.txt"
        archive.addfile(member)
    assert_left_out(tmp_path / "in", "a.tar: b.jpg", r"a\.tar: b\.jpg: is a link", ["a", "b"])
    _, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert [skipped.name for skipped in report.skipped] == ["a.tar: b.jpg"]


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    arrays = {"a": np.arange(5), "b": np.array(2, np.float32)}
    members = {"npz": arrays, "ten": [np.ones((2, 3), np.float32)], "npy": np.arange(3.0), "pth": {"x": torch.ones(2)}}
    members["pt"] = saved(torch.ones(4))
    write(tmp_path / "in" / "a.tar", {"k": members})
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert found["k"].keys() == members.keys()
    assert_same({name: torch.from_numpy(array) for name, array in arrays.items()}, dict(found["k"]["npz"]))
    assert_same([torch.ones(2, 3)], list(found["k"]["ten"]))
    assert_same([members["pth"], torch.ones(4)], [found["k"]["pth"], found["k"]["pt"]])


def test_names_with_dots(tmp_path: Path) -> None:
    """A key ends at the first dot, so files become one sample; the import says so, and how to keep them apart."""
    names = ["1.0", "1.5", "Track 2.0 (Clean)", "Track 2.0 (Dirty)", "plain"]
    write_tar(tmp_path / "in" / "a.tar", {f"{name}.npy": np.array(number) for number, name in enumerate(names)})
    found, report = imported(tmp_path / "in", tmp_path / "out")
    (note,) = report.notes
    assert note.startswith("members that look like separate samples, in 2 samples: for example '1.0.npy', '1.5.npy', ")
    assert "so '1' has 2 of them; " in note
    assert "--format files" in note
    assert list(found) == ["1", "Track 2", "plain"]
    assert list(found["1"]) == ["0", "5"]


@pytest.mark.parametrize(
    "names", [["a.latent", "a.text", "b.latent", "b.text"], ["a", "b"], ["0001.latent", "0002.latent"]]
)
def test_members_by_name_have_no_note(tmp_path: Path, names: list[str]) -> None:
    texts = {f"{name.partition('.')[0]}.json": b"{}" for name in names}
    write_tar(tmp_path / "in" / "a.tar", {f"{name}.npy": np.ones(2) for name in names} | texts)
    assert tc.import_cache(tmp_path / "in", tmp_path / "out").notes == []


def test_equal_keys_in_several_tars(tmp_path: Path) -> None:
    write(tmp_path / "in" / "s0.tar", {"k": {"npy": np.zeros(3)}})
    imported(tmp_path / "in", tmp_path / "first")
    write(tmp_path / "in" / "s1.tar", {"k": {"npy": np.ones(3)}})
    found, report = imported(tmp_path / "in", tmp_path / "both")
    assert {name: value.tolist() for name, value in found.items()} == {"s0/k": [0] * 3, "s1/k": [1] * 3}
    assert "the same 1 key, for example 'k'" in report.notes[0]
    with pytest.raises(tc.StaleCacheError, match="keys='with the paths of the tars'"):
        tc.import_cache(tmp_path / "in", tmp_path / "first", resume=True)
    assert list(tc.open(tmp_path / "first").keys()) == ["k"]


def test_files_patterns_and_lists(tmp_path: Path) -> None:
    """As a folder that has nothing else; the fingerprint has what was named."""
    for number in range(3):
        write(tmp_path / "in" / f"s{number}.tar", {f"k{number}": {"npy": np.full(3, number)}})
    (tmp_path / "in" / "deep").mkdir()
    (tmp_path / "in" / "other.npy").write_bytes(b"")
    os.replace(tmp_path / "in" / "s2.tar", tmp_path / "in" / "deep" / "s2.tar")
    first, second, deep = (str(tmp_path / "in" / name) for name in ("s0.tar", "s1.tar", "deep/s2.tar"))
    sources: list[tuple[Any, list[str], Any]] = [
        (first, ["k0"], first),
        (str(tmp_path / "in" / "s{0..1}.tar"), ["k0", "k1"], str(tmp_path / "in" / "s{0..1}.tar")),
        (str(tmp_path / "in" / "s*.tar"), ["k0", "k1"], str(tmp_path / "in" / "s*.tar")),
        ([deep, Path(first)], ["k2", "k0"], [deep, first]),
    ]
    for number, (source, keys, origin) in enumerate(sources):
        found, report = imported(source, tmp_path / f"{number}")
        assert (sorted(found), report.unused) == (sorted(keys), [])
        assert report.fingerprint["source"] == origin
    result = json_of("import", first, second, tmp_path / "out")
    assert (result["num_written"], result["fingerprint"]["source"]) == (2, [first, second])


def test_hidden_files_of_macos(tmp_path: Path) -> None:
    hidden = {".DS_Store": b"\0", "./._1.npy": b"\0", "a/._2.npy": b"\0", "__MACOSX/a/._2.npy": b"\0"}
    members = {"./1.npy": np.ones(3), "./1.txt": b"one", "a/2.npy": np.zeros(3)}
    write_tar(tmp_path / "in" / "a.tar", {**hidden, **members})
    report = tc.import_cache(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.skipped) == ("webdataset", [])
    with tc.open(tmp_path / "out") as cache:
        assert list(cache.keys()) == ["1", "a/2"]
        assert cache.members == {"txt": 1}
        assert [sample.tolist() for sample in cache] == [[1] * 3, [0] * 3]


@pytest.mark.parametrize("suffix", ["pyd", "pkl", "pt"])
def test_pickles_do_not_run(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = saved(Gadget()) if suffix == "pt" else pickle.dumps({"x": 1, "y": Gadget()})
    write(tmp_path / "in" / "a.tar", {"good": {"npy": np.ones(3)}, "k": {suffix: raw}})
    with pytest.raises(tc.UnsafeSkeletonError, match=r"a.tar: sample 'k'.*system.*--trust"):
        tc.import_cache("in", "stopped")
    found, report = imported(Path("in"), Path("out"), on_error="skip")
    assert (list(found), report.num_skipped) == (["good"], 1)
    assert not Path("hacked").exists()
    tc.import_cache("in", "trusted", trust=True)
    assert Path("hacked").exists()


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_arrays_of_objects(tmp_path: Path, suffix: str) -> None:
    content, array = io.BytesIO(), np.array([1, "a"], object)
    np.save(content, array) if suffix == "npy" else np.savez(content, x=array)
    write_tar(tmp_path / "in" / "a.tar", {f"k.{suffix}": content.getvalue()})
    with pytest.raises(tc.FormatError, match=rf"a\.tar: sample 'k': member '{suffix}': .*--trust"):
        tc.import_cache(tmp_path / "in", tmp_path / "stopped")
    tc.import_cache(tmp_path / "in", tmp_path / "out", trust=True)
    assert tc.open(tmp_path / "out")[0] == ([1, "a"] if suffix == "npy" else {"x": [1, "a"]})


@pytest.mark.parametrize("suffix", ["pyd", "pickle"])
def test_pickles_of_arrays(tmp_path: Path, suffix: str) -> None:
    """As `.pyd` members of most people are: numpy's and torch's pickles name functions of these libraries."""
    value = {"latent": np.ones((2, 3), np.float32), "text": torch.randn(2, 3).bfloat16(), "size": np.float32(2)}
    value |= {"prompt": "a cat", "sizes": [(1, 2), 3.5, None], "raw": b"\0\xff"}
    write(tmp_path / "in" / "a.tar", {"k": {suffix: value}})
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_same({**value, "latent": torch.ones(2, 3)}, found["k"])


def test_bad_tars(tmp_path: Path) -> None:
    """The members of its last sample are incomplete, so it is not imported; nor is a sample with a member twice."""
    write(tmp_path / "in" / "cut.tar", {f"k{i}": {"a.npy": np.full(1000, i), "b.npy": np.ones(1000)} for i in range(3)})
    raw = (tmp_path / "in" / "cut.tar").read_bytes()
    (tmp_path / "in" / "cut.tar").write_bytes(raw[: raw.index(b"k2.b.npy") + 1000])
    again = raw.replace(b"k2.b.npy", b"k2.a.npy").replace(b"k", b"t")
    (tmp_path / "in" / "twice.tar").write_bytes(fix_checksums(again))
    (tmp_path / "in" / "text.tar").write_bytes(b"hello")
    write_tar(tmp_path / "in" / "unnamed.tar", {"k.npy": np.ones(3), "README": b""})
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert list(found) == ["k0", "k1", "t0", "t1", "k"]
    assert [each.name for each in report.skipped] == ["cut.tar", "text.tar", "twice.tar", "README"]
    assert "occurs twice" in report.skipped[2].what
    assert "has no suffix" in report.skipped[3].what


def test_a_short_cut_tar_alone(tmp_path: Path) -> None:
    write(tmp_path / "in" / "cut.tar", {f"k{i}": {"npy": np.full(1000, i)} for i in range(2)})
    os.truncate(tmp_path / "in" / "cut.tar", 10_000)
    with pytest.raises(tc.FormatError, match=r"cut\.tar.*truncated"):
        tc.import_cache(tmp_path / "in", tmp_path / "out")


class Overwriting:
    """A value whose pickle, when it is read, copies another tar over its own."""

    def __init__(self, other: Path, own: Path) -> None:
        self.paths = str(other), str(own)

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return shutil.copyfile, self.paths


def test_a_tar_that_is_overwritten_during_the_import(tmp_path: Path) -> None:
    """Members are not read from places that were found before."""
    own, other = tmp_path / "in" / "a.tar", tmp_path / "other.tar"
    latents = {f"k{i}": {"npy": np.full(1000, i)} for i in range(4)}
    first = {"k": {"pyd": pickle.dumps(Overwriting(other, own))}}
    write(own, first | latents)
    write(other, first | {key: {"npy": -members["npy"]} for key, members in latents.items()})
    report = tc.import_cache(tmp_path / "in", tmp_path / "out", trust=True, on_error="skip", num_workers=1)
    assert report.num_written == 1
    assert [each.name for each in report.skipped] == list(latents)
    assert all("a.tar: the shard was changed since it was opened" in each.what for each in report.skipped)


def test_members_far_apart(tmp_path: Path) -> None:
    """Members of a sample need not be adjacent for an import."""
    names = ("k0.a.npy", "k1.a.npy", "k2.a.npy", "k0.b.npy", "k1.b.npy")
    write_tar(tmp_path / "in" / "a.tar", {name: np.full(5000, int(name[1])) for name in names})
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert {name: {part: int(each[0]) for part, each in value.items()} for name, value in found.items()} == {
        "k0": {"a": 0, "b": 0},
        "k1": {"a": 1, "b": 1},
        "k2": {"a": 2},
    }


def test_shards_of_this_package_are_not_imported(tmp_path: Path) -> None:
    """Shards with a named cache, too."""
    with tc.ShardWriter(tmp_path / "in" / "deep" / "a.tar") as sink:
        sink.write("k", npy=b"", **{"text.tensorcache": {"x": torch.ones(2)}})
    with pytest.raises(ValueError, match=r"in is a cache already: deep/a\.tar is .*tc\.open.* merge.* reshard"):
        tc.import_cache(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write(tmp_path / "foreign" / "a.tar", {"k": {"safetensors": b"", "txt": "a"}})  # without a skeleton
    with pytest.raises(ValueError, match="belongs to a known format"):
        tc.import_cache(tmp_path / "foreign", tmp_path / "out")


def test_a_first_sample_of_many_members(tmp_path: Path) -> None:
    frames = {f"{number:03d}.jpg": b"" for number in range(64)}
    write(tmp_path / "in" / "a.tar", {"k": {**frames, "states.npy": np.ones(2)}})
    assert list(imported(tmp_path / "in", tmp_path / "out")[0]["k"]) == ["states"]
    write(tmp_path / "cache" / "a.tar", {"k": {**frames, "skel.pyd": {}, "safetensors": b""}})
    with pytest.raises(ValueError, match="is a cache already"):
        tc.import_cache(tmp_path / "cache", tmp_path / "again")


@pytest.mark.parametrize("prefix", ["", "./"])
def test_keys(tmp_path: Path, prefix: str) -> None:
    """Safe keys stay, as in a tar that `tensorcache export` has written, also if `tar -c .` packed it again."""
    names = ["dir name/photo (1).v2", "50%", "f" * 200, "plain"]
    others = ["60%", "a,b", "%41", "a b%-" + 40 * "0", "%-" + 40 * "0", "/x/" + 35 * "x" + "%-" + 40 * "0"]
    keys = list(map(tc.safe_key, names))
    write(tmp_path / "in" / "a.tar", {key: {"npy": np.ones(2)} for key in [*(prefix + key for key in keys), *others]})
    tc.import_cache(tmp_path / "in", tmp_path / "out")
    with tc.open(tmp_path / "out") as cache:
        assert list(cache.keys()) == keys + list(map(tc.safe_key, others))
