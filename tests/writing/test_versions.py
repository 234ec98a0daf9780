"""Versions of caches: samples are reused or computed, on one process or several, and nothing is lost by a kill."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.kills import compare, is_killed, stop_at
from tests.reading.batches import write
from tests.same import assert_same
from tests.shards.damage import contents_of
from tests.writing.test_build import COUNT, MADE, build, counted, digest, double
from tests.writing.test_writer import listed


def items(values: dict[str, int]) -> list[dict[str, Any]]:
    return [{"__key__": key, "value": value} for key, value in values.items()]


def numbered(count: int = COUNT, **changed: int) -> dict[str, int]:
    """Return values by key: `k000`, `k001`, …, with some of them changed."""
    return {f"k{i:03d}": i for i in range(count)} | changed


def make(values: dict[str, int], out: Path, fn: Any = double, **options: Any) -> None:
    build(items(values), out, fn, digest=digest, **options).close()


def by_key(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return what a stock reader of tars finds: every member of every sample."""
    found: dict[str, dict[str, bytes]] = {}
    for url in listed(folder):
        with tarfile.open(folder / url) as archive:
            for member in archive:
                if member.isreg():
                    key, suffix = member.name.split(".", 1)
                    found.setdefault(key, {})[suffix] = archive.extractfile(member).read()  # type: ignore[union-attr]
    return found


def check(folder: Path, values: dict[str, int], order: list[str]) -> None:
    """Assert that a cache has these samples in this order, and right sidecars."""
    report = tc.verify(folder)
    assert report.ok, str(report)
    with tc.open(folder, expect=MADE) as cache:
        assert list(cache.keys()) == order
        for i, key in enumerate(order):
            assert_same(double([{"value": values[key]}])[0], tc.realize(cache[i]))
            assert_same(tc.realize(cache[i]), tc.realize(cache[key]))
    assert list(by_key(folder)) == order
    for url, num_samples in listed(folder).items():
        index = tc.write_index(shutil.copy(folder / url, folder.parent / "again.tar"))
        assert (folder.parent / "again.idx").read_bytes() == (folder / url).with_suffix(".idx").read_bytes()
        assert num_samples == len(index.keys)
    for name in ("again.tar", "again.tar.index", "again.idx"):
        (folder.parent / name).unlink(missing_ok=True)


GENERATIONS = [
    numbered(k003=103, k007=107, k008=108) | {"n0": 50, "n1": 51},
    {key: value for key, value in (numbered(k003=103, k011=111) | {"n1": 51, "n2": 52}).items() if key != "k005"},
    {key: value + 1 for key, value in numbered(20).items()} | {f"m{i}": i for i in range(12)},
    {"m3": 3, "k019": 20},
]


def test_generations(tmp_path: Path) -> None:
    """Each from the one before: byte for byte what stays, index for index where nothing went."""
    old_values, order, before = numbered(), list(numbered()), tmp_path / "0"
    make(old_values, before)
    for generation, values in enumerate(GENERATIONS, 1):
        out, kept = tmp_path / f"{generation}", contents_of(before)
        fn, called = counted()
        make(values, out, fn, reuse=before)
        stale = [key for key, value in values.items() if old_values.get(key) != value]
        assert called == [values[key] for key in stale]
        gone = [key for key in order if key not in values]
        order = [key for key in order if key in values] + [key for key in stale if key not in old_values]
        check(out, values, order)
        assert contents_of(before) == kept
        found, old = by_key(out), by_key(before)
        kept_samples = {key: old[key] for key in old if key not in stale and key not in gone}
        assert {key: found[key] for key in found if key not in stale} == kept_samples
        for url in listed(before):
            with tarfile.open(before / url) as archive:
                keys = {name.split(".")[0] for name in archive.getnames()}
            is_same = not keys & {*stale, *gone}
            assert (keys <= {*gone}) != (out / url).exists()
            if keys - {*gone}:
                assert os.path.samefile(before / url, out / url) == is_same
        old_values, before = values, out
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3", "4"]


def test_drop(tmp_path: Path) -> None:
    make(numbered(), tmp_path / "0")
    gone = ["k000", "k007", *(f"k{i:03d}" for i in range(10, 15)), "k022"]
    kept = contents_of(tmp_path / "0")
    tc.drop(tmp_path / "0", tmp_path / "1", gone)
    left = {key: value for key, value in numbered().items() if key not in gone}
    check(tmp_path / "1", left, list(left))
    assert contents_of(tmp_path / "0") == kept
    assert [os.stat(tmp_path / "1" / f"00000{i}.tar").st_nlink for i in (0, 1, 3, 4)] == [1, 1, 2, 1]
    # as a build of the remaining items makes it, and in two steps as in one
    make(left, tmp_path / "2", reuse=tmp_path / "0")
    compare(tmp_path / "2", tmp_path / "1")
    tc.drop(tmp_path / "0", tmp_path / "3", gone[:3])
    tc.drop(tmp_path / "3", tmp_path / "4", iter(gone[3:]))
    compare(tmp_path / "4", tmp_path / "1")
    for keys, error, message in (
        (["k001", "no"], KeyError, "no sample 'no'"),
        ([5], KeyError, "no sample 5"),
        ("k001", TypeError, "expected a collection of keys"),
        (list(numbered()), ValueError, "no sample would remain"),
    ):
        with pytest.raises(error, match=message):
            tc.drop(tmp_path / "0", tmp_path / "5", keys)
    with pytest.raises(FileExistsError, match="is not empty"):
        tc.drop(tmp_path / "0", tmp_path / "4", ["k001"])
    tc.drop(tmp_path / "0", tmp_path / "5", [])
    compare(tmp_path / "5", tmp_path / "0")
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3", "4", "5"]


def test_footers_and_sidecars_stay(tmp_path: Path) -> None:
    """Shards keep their kind: with or without footer, sidecar and `.idx`."""
    make(numbered(), tmp_path / "0", footer=False, dali_index=False)
    tc.write_index(tmp_path / "0" / "000001.tar", dali_index=False)
    tc.drop(tmp_path / "0", tmp_path / "1", ["k007"])
    names = ["000001.tar.index", *(f"00000{i}.tar" for i in range(5)), "manifest.json"]
    assert sorted(os.listdir(tmp_path / "1")) == sorted(names)
    assert tc.verify(tmp_path / "1").num_samples == COUNT - 1
    assert tc.open(tmp_path / "1", expect=MADE).fingerprint == MADE
    make(numbered(k021=5), tmp_path / "2", reuse=tmp_path / "1")
    assert tc.verify(tmp_path / "2").num_samples == COUNT
    assert not (tmp_path / "2" / "000000.idx").exists()
    make(numbered(k001=5), tmp_path / "3", reuse=tmp_path / "2", manifest=False)
    assert tc.open(tmp_path / "3", expect=MADE)["k001"]["of"] == 5  # in the manifest, which a version always has


def test_killed_at_every_step(tmp_path: Path) -> None:
    """The old folder stays; the new one is absent or complete; finished samples are not computed again."""
    make(numbered(), tmp_path / "old")
    values, step, num_both, least = GENERATIONS[0], 0, 0, len(GENERATIONS[0])
    make(values, tmp_path / "whole", reuse=tmp_path / "old", max_samples=3)
    kept, whole = contents_of(tmp_path / "old"), contents_of(tmp_path / "whole")
    out = tmp_path / "x" / "new"

    def rebuild(fn: Any = double) -> None:
        make(values, out, fn, reuse=tmp_path / "old", max_samples=3)

    while is_killed(lambda: (stop_at(step), rebuild())):  # noqa: B023 called here
        assert contents_of(tmp_path / "old") == kept
        num_both += out.exists()
        assert not out.exists() or contents_of(out) == whole
        if step % 2:
            is_killed(lambda: (stop_at(7), rebuild()))
            assert not out.exists() or contents_of(out) == whole
        fn, called = counted()
        rebuild(fn)
        least = min(least, len(called))
        assert contents_of(out) == whole
        assert os.listdir(out.parent) == ["new"]
        shutil.rmtree(out.parent)
        step += 3
    assert step > 30
    assert num_both
    assert least == 0


class Broken(Exception):
    pass


def broken_at(count: int, before: Callable[[], None] = lambda: None) -> tuple[Any, list[int]]:
    """Return a function that fails at its `count`-th item, and what it was called with."""
    called: list[int] = []

    def fn(batch: list[dict[str, Any]]) -> list[Any]:
        if len(called) >= count:
            before()
            raise Broken
        called.extend(item["value"] for item in batch)
        return double(batch)

    return fn, called


def test_computed_samples_are_not_lost(tmp_path: Path) -> None:
    """Also where items have changed again, or another folder is reused; another fingerprint begins again."""
    make(numbered(), tmp_path / "0")
    values = numbered(43, k001=101, k002=102)
    fn, called = broken_at(12)
    with pytest.raises(Broken) as caught:
        make(values, tmp_path / "1", fn, reuse=tmp_path / "0")
    assert len(called) == 12
    if sys.version_info >= (3, 11):
        assert "12 samples of this call; call it again to resume" in caught.value.__notes__[-1]
    assert sorted(os.listdir(tmp_path)) == [".1.building", "0"]
    values["k002"], values["k025"] = 202, 225  # computed, and stale by now
    del values["k026"]
    make(numbered(k001=7), tmp_path / "other", reuse=tmp_path / "0")
    fn, called = counted()
    make(values, tmp_path / "1", fn, reuse=tmp_path / "other")
    assert {202, 225} <= set(called)
    assert not {101, 23, 24} & set(called[4:])
    check(tmp_path / "1", values, list(tc.open(tmp_path / "1").keys()))
    assert set(tc.open(tmp_path / "1").keys()) == set(values)
    assert list(tc.open(tmp_path / "1").keys())[:COUNT] == list(numbered())

    fn, _ = broken_at(8)
    with pytest.raises(Broken):
        make(values, tmp_path / "2", fn, reuse=tmp_path / "other")
    build(items(numbered()), tmp_path / "x", digest=digest, fingerprint={"model": 2}).close()
    fn, called = counted()
    build(items(values), tmp_path / "2", fn, digest=digest, fingerprint={"model": 2}, reuse=tmp_path / "x").close()
    assert sorted(called) == sorted(value for key, value in values.items() if numbered().get(key) != value)
    assert not list(tmp_path.glob(".*"))


def test_an_old_one_that_is_being_written(tmp_path: Path) -> None:
    """Shards that a killed build finished are not computed again."""
    sink = tc.ShardWriter(tmp_path / "0", max_samples=5, fingerprint=MADE, fsync=False)
    for i in range(13):
        sink.write(f"k{i:03d}", double([{"value": i}])[0], **{"digest.txt": f"v{i}"})
    fn, called = counted()
    make(numbered(13), tmp_path / "1", fn, reuse=tmp_path / "0")
    assert called == [10, 11, 12]
    sink.close()
    assert len(tc.open(tmp_path / "0")) == 13
    check(tmp_path / "1", numbered(), list(numbered(13)))
    fn, called = counted()
    make(numbered(13), tmp_path / "2", fn, reuse=tmp_path / "0")
    assert called == []


@pytest.mark.parametrize("then", ["the same call", "a build without reuse", "another version"])
def test_a_last_step_that_fails(tmp_path: Path, then: str) -> None:
    """The next call with the same `out` takes over the computed samples. Once `out` is a cache, they are deleted."""
    make(numbered(), tmp_path / "0")
    shard = tmp_path / "0" / "000004.tar"

    def fn(batch: list[dict[str, Any]]) -> list[Any]:
        os.replace(shutil.copy(shard, tmp_path / "copy.tar"), shard)
        return double(batch)

    with pytest.raises(tc.FormatError, match=r"000004\.tar: the shard was changed"):
        make(numbered(30), tmp_path / "1", fn, reuse=tmp_path / "0")
    assert sorted(os.listdir(tmp_path)) == [".1.building", "0"]
    fn, called = counted()
    if then == "another version":
        tc.drop(tmp_path / "0", tmp_path / "1", ["k000"])
        with pytest.raises(tc.StaleCacheError):
            make(numbered(30), tmp_path / "1", fn, reuse=tmp_path / "0")
    else:
        make(numbered(30), tmp_path / "1", fn, **{"reuse": tmp_path / "0"} if then == "the same call" else {})
    assert len(called) == (30 if then == "a build without reuse" else 0)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_samples_that_ranks_compute_are_left_alone(tmp_path: Path) -> None:
    """Even if another call builds a cache in the folder of their version."""
    make(numbered(), tmp_path / "0")

    def fn(batch: list[dict[str, Any]]) -> list[Any]:
        make(numbered(5), tmp_path / "1")
        assert (tmp_path / ".1.building").is_dir()
        return double(batch)

    options: Any = {"reuse": tmp_path / "0", "rank": 0, "world_size": 2}
    assert len(build(items(numbered(60)), tmp_path / "1", fn, digest=digest, **options)) == 0
    make(numbered(5), tmp_path / "1")
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


def test_nothing_writes_into_a_shared_shard(tmp_path: Path) -> None:
    """A change to a shard of one version leaves the other version as it is."""
    make(numbered(), tmp_path / "0", footer=False)
    make(numbered(24), tmp_path / "1", reuse=tmp_path / "0")
    kept, shard = contents_of(tmp_path / "0"), tmp_path / "1" / "000000.tar"
    assert os.path.samefile(shard, tmp_path / "0" / "000000.tar")
    tc.write_index(shard)
    write(tmp_path / "1" / "%06d.tar", {"a": {"x": 1}}, overwrite=True, fingerprint=MADE)
    assert contents_of(tmp_path / "0") == kept


def test_out_is_there(tmp_path: Path) -> None:
    """A complete version is opened; one of other items, or anything else, is refused, and nothing is computed."""
    make(numbered(), tmp_path / "0")
    values = numbered(25, k004=104)
    make(values, tmp_path / "1", reuse=tmp_path / "0")
    kept = contents_of(tmp_path / "1")
    fn, called = counted()
    for reuse in ("0", "nowhere"):  # it is complete: the old one is not needed any more
        make(values, tmp_path / "1", fn, reuse=tmp_path / reuse)
    for other, message in (
        (numbered(25), "1 of 25 items have changed"),
        (numbered(26, k004=104), "1 of 26 items have changed"),
        (numbered(24, k004=104), "0 of 24 items have changed .* 1 samples have no item"),
    ):
        with pytest.raises(tc.StaleCacheError, match=rf"{message}.*reuse='{tmp_path / '1'}'"):
            make(other, tmp_path / "1", fn, reuse=tmp_path / "0")
    build(items(numbered(3)), tmp_path / "more", digest=digest, fingerprint=MADE | {"more": 1}).close()
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "mine").write_text("mine")
    refused: list[tuple[Any, str, dict[str, Any], type[Exception], str]] = [
        (values, "2/x.tar", {}, ValueError, "expected a folder, or a pattern with a number"),
        (values, "0", {"reuse": tmp_path / "1" / ".." / "0"}, ValueError, "is out itself"),
        (values, "2", {"fingerprint": MADE | {"revision": 2}}, tc.StaleCacheError, "leave out reuse=.* or pass"),
        (values, "2", {"reuse": tmp_path / "more"}, tc.StaleCacheError, "was made with .*'more': 1.*new samples"),
        (values, "2", {"reuse": tmp_path / "nowhere"}, FileNotFoundError, "nowhere does not exist"),
        (values, "2", {"reuse": tmp_path / "0" / "000000.tar"}, ValueError, "is not a folder; expected the folder of"),
        (values, "3", {}, FileNotFoundError, r"neither manifest\.json nor"),
        ({}, "2", {}, ValueError, "the source has no items"),
    ]
    for given, out, options, error, message in refused:
        with pytest.raises(error, match=message):
            make(given, tmp_path / out, fn, **{"reuse": tmp_path / "0"} | options)
    assert called == []
    assert contents_of(tmp_path / "1") == kept
    (tmp_path / "4").mkdir(mode=0o750)
    make(values, tmp_path / "4", reuse=tmp_path / "0")
    compare(tmp_path / "4", tmp_path / "1")
    assert (tmp_path / "4").stat().st_mode & 0o777 == 0o750
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_old_one(tmp_path: Path) -> None:
    make(numbered(), tmp_path / "0")
    path = tmp_path / "0" / "000001.tar"
    whole = path.read_bytes()
    for damaged in (whole[:3000], whole + bytes(512) + b"x" * 512):
        path.write_bytes(damaged)
        for work in (
            lambda: make(numbered(30), tmp_path / "1", reuse=tmp_path / "0"),
            lambda: tc.drop(tmp_path / "0", tmp_path / "1", ["k000"]),
        ):
            with pytest.raises(tc.FormatError, match=r"000001\.tar"):
                work()
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"000001\.tar"):
        make(numbered(30), tmp_path / "1", reuse=tmp_path / "0")
    assert os.listdir(tmp_path) == ["0"]


def test_without_digests_keys_decide(tmp_path: Path) -> None:
    build(items(numbered()), tmp_path / "0").close()
    fn, called = counted()
    build(items(numbered(25, k001=101)), tmp_path / "1", fn, reuse=tmp_path / "0").close()
    assert called == [23, 24]
    fn, called = counted()
    make(numbered(), tmp_path / "2", fn, reuse=tmp_path / "0")  # no sample says what it was made of
    assert called == list(range(COUNT))
    names = [f"{i}" for i in range(COUNT)]
    build(range(COUNT), tmp_path / "3", lambda batch: [{"of": i} for i in batch], keys=names).close()
    build(range(COUNT), tmp_path / "4", lambda batch: 1 / 0, keys=names, reuse=tmp_path / "3").close()
    assert os.path.samefile(tmp_path / "3" / "000000.tar", tmp_path / "4" / "000000.tar")


def test_names_of_new_shards(tmp_path: Path) -> None:
    """As the old ones, in their folder, or as `out` says; readers number them after the old ones."""
    folder, manifest = tmp_path / "0", tmp_path / "0" / "manifest.json"
    build(items(numbered(6)), folder / "train-%04d.tar", digest=digest, max_samples=3).close()
    build(items(numbered(7)), tmp_path / "2" / "more-%d.tar", digest=digest, reuse=folder).close()
    assert (tmp_path / "2" / "more-0.tar").exists()
    assert list(tc.open(tmp_path / "2").keys()) == list(numbered(7))
    (folder / "sub").mkdir()
    for path in [*folder.glob("*.tar"), *folder.glob("*.idx")]:
        path.rename(folder / "sub" / path.name)
    manifest.write_text(manifest.read_text().replace('"train-000', '"./sub/train-000'))
    make(numbered(8, k001=9), tmp_path / "3", reuse=folder)
    shards = [f"sub/train-000{i}.{kind}" for i in range(3) for kind in ("tar", "idx")]
    assert sorted(contents_of(tmp_path / "3")) == sorted(["manifest.json", *shards])
    check(tmp_path / "3", numbered(k001=9), list(numbered(8)))


def test_a_folder_whose_name_cannot_be_in_a_pattern(tmp_path: Path) -> None:
    """`drop` needs no names of new shards."""
    write(tmp_path / "old" / "half", [torch.tensor(i) for i in range(3)])
    (tmp_path / "old" / "half").rename(tmp_path / "old" / "50%")
    manifest = (tmp_path / "old" / "50%" / "manifest.json").read_text()
    (tmp_path / "old" / "manifest.json").write_text(manifest.replace("000.tar", "50%/000.tar"))
    tc.drop(tmp_path / "old", tmp_path / "new", ["001"])
    assert list(tc.open(tmp_path / "new").keys()) == ["000", "002"]


def test_numbers_of_many_digits(tmp_path: Path) -> None:
    """A version numbers its new shards after the old ones, and a build continues after its own."""
    pattern = tmp_path / "0" / "%020d.tar"
    make(numbered(3), pattern, max_samples=2)
    make(numbered(5), pattern, max_samples=2)
    check(tmp_path / "0", numbered(5), list(numbered(5)))
    make(numbered(8), tmp_path / "1", reuse=tmp_path / "0")
    check(tmp_path / "1", numbered(8), list(numbered(8)))


def test_other_members_of_samples_stay(tmp_path: Path) -> None:
    """Of those that stay; a build refuses caches that it would not make."""
    samples = {f"k{i:03d}": double([{"value": i}])[0] for i in range(8)}
    write(tmp_path / "0", samples, lambda i: {"jpg": bytes([i]) * 999, "digest.txt": f"v{i}"}, fingerprint=MADE)
    make(numbered(8, k001=101), tmp_path / "1", reuse=tmp_path / "0")
    found, old = by_key(tmp_path / "1"), by_key(tmp_path / "0")
    assert {key: found[key] for key in found if key != "k001"} == {key: old[key] for key in old if key != "k001"}
    assert set(found["k001"]) == {"skel.pyd", "safetensors", "digest.txt"}
    with tc.ShardWriter(tmp_path / "named", fingerprint=MADE, fsync=False) as sink:
        sink.write("k000", **{"a.tensorcache": 1, "b.tensorcache": 2})
    with pytest.raises(ValueError, match=r"\{'a': \d+, 'b': \d+\}; expected one cache without a name in every sample"):
        make(numbered(8), tmp_path / "2", reuse=tmp_path / "named")
    tc.drop(tmp_path / "1", tmp_path / "3", ["k007"])
    assert by_key(tmp_path / "3") == {key: found[key] for key in found if key != "k007"}


def test_drop_names_the_key_of_a_name(tmp_path: Path) -> None:
    make({"photo%2Ejpg": 1, "b": 2}, tmp_path / "0")
    with pytest.raises(KeyError, match=r"no sample 'photo.jpg'; pass the key of this name: 'photo%2Ejpg'"):
        tc.drop(tmp_path / "0", tmp_path / "1", ["photo.jpg"])


def test_one_key_in_several_shards(tmp_path: Path) -> None:
    """One of them stays: the first that is right, or the first of all."""
    for name, value in (("0.tar", 1), ("1.tar", 2), ("2.tar", 3)):
        samples = dict.fromkeys(("a", f"b{value}"), double([{"value": value}])[0])
        members = {"digest.txt": f"v{value}"}
        write(tmp_path / "0" / name, samples, lambda i, members=members: members, fingerprint=MADE)
    others = {f"b{value}": value for value in (1, 2, 3)}
    for value, order in ((2, ["b1", "a", "b2", "b3"]), (9, ["a", "b1", "b2", "b3"])):
        make({"a": value} | others, tmp_path / f"{value}", reuse=tmp_path / "0")
        check(tmp_path / f"{value}", {"a": value} | others, order)
    tc.drop(tmp_path / "0", tmp_path / "none", ["a"])
    assert list(tc.open(tmp_path / "none").keys()) == ["b1", "b2", "b3"]


def test_links_to_shards(tmp_path: Path) -> None:
    make(numbered(), tmp_path / "0")
    for name in ("000001.tar", "000002.tar"):
        shutil.move(tmp_path / "0" / name, tmp_path / name)
        (tmp_path / "0" / name).symlink_to(tmp_path / name)
    (tmp_path / "out").symlink_to(tmp_path / "there")
    make(numbered(k006=106), tmp_path / "out", reuse=tmp_path / "0")
    assert not (tmp_path / "there" / "000002.tar").is_symlink()
    assert os.path.samefile(tmp_path / "there" / "000002.tar", tmp_path / "000002.tar")
    check(tmp_path / "there", numbered(k006=106), list(numbered()))


OTHER = Path("/dev/shm")


@pytest.mark.skipif(
    not os.access(OTHER, os.W_OK) or OTHER.stat().st_dev == Path("/tmp").stat().st_dev, reason="needs two file systems"
)
def test_across_file_systems(tmp_path: Path) -> None:
    """Copies where there can be no links."""
    other = OTHER / f"versions-{os.getpid()}"
    try:
        make(numbered(), other / "0")
        make(numbered(25, k006=106), tmp_path / "1", reuse=other / "0", fsync=True)
        make(numbered(25, k006=106), other / "1", reuse=other / "0")
        compare(tmp_path / "1", other / "1")
        assert os.stat(tmp_path / "1" / "000000.tar").st_nlink == 1
        check(tmp_path / "1", numbered(25, k006=106), list(numbered(25)))
    finally:
        shutil.rmtree(other, ignore_errors=True)


def test_ranks(tmp_path: Path) -> None:
    """Each sample is reused or computed once; a call on one process writes the version."""
    before = tmp_path / "0"
    make(numbered(), before)
    for generation, values in enumerate(GENERATIONS[:3], 1):
        out, single, (fn, called) = tmp_path / f"{generation}", tmp_path / f"single{generation}", counted()
        for rank in range(3):
            ranks = {"digest": digest, "rank": rank, "world_size": 3, "reuse": before}
            assert len(build(items(values), out, fn, **ranks)) == 0
            assert not out.exists()
        make(values, single, reuse=before)
        old, whole = by_key(before), by_key(single)
        assert sorted(called) == sorted(values[key] for key in values if whole[key] != old.get(key))
        make(values, out, broken_at(0)[0], reuse=before)  # computes nothing
        order = list(tc.open(out).keys())
        kept = [key for key in old if key in values]
        assert order[: len(kept)] == kept
        check(out, values, order)
        assert by_key(out) == whole
        assert not list(tmp_path.glob(".*"))
        before = out


def test_ranks_that_differ_or_overlap(tmp_path: Path) -> None:
    """A rank notices that another one has computed its items; two world sizes at once are refused."""
    make(numbered(), tmp_path / "0")
    values, out = numbered(40), tmp_path / "1"
    options: Any = {"reuse": tmp_path / "0", "digest": digest}

    def with_another_rank(batch: list[dict[str, Any]]) -> list[Any]:
        for rank, world_size in ((0, 1), (1, 2), (0, 3)):
            with pytest.raises(FileExistsError, match="is writing"):
                build(items(values), out, rank=rank, world_size=world_size, **options)
        build(items(values), out, rank=0, world_size=2, **options | {"batch_size": 3})
        return double(batch)

    with pytest.raises(ValueError, match="the ranks have another batch_size, or .* call build on one process"):
        build(items(values), out, with_another_rank, rank=1, world_size=2, **options)
    make(values, out, reuse=tmp_path / "0")
    check(out, values, list(tc.open(out).keys()))
    # each rank checks the number of all items
    with pytest.raises(tc.StaleCacheError, match="and 1 samples have no item"):
        build(items(numbered(39)), out, rank=1, world_size=2, **options)
    assert len(build(items(values), out, rank=1, world_size=2, **options)) == 40
