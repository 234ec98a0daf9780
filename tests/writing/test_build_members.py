"""Caches added to WebDataset shards that have none: every key and member stays, in any way of building."""

from __future__ import annotations

import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.cli.command import run
from tests.hostile.pickles import little_memory
from tests.remote.servers.http_server import HttpServer
from tests.shards.footers import forge
from tests.shards.tars import build as build_tar
from tests.shards.tars import build_with_tarfile, special

COUNT = 23
KEYS = [f"part.{i % 3}/sub/{i:03d}" for i in range(COUNT)]


def members(i: int) -> dict[str, bytes]:
    """Return the members of a sample; some samples lack one, and names have several dots."""
    found = {"jpg": bytes([i]) * (700 + i), "seg.png": b"\0" * i, "json": json.dumps({"i": i}).encode()}
    return found if i % 4 else {"json": found["json"], "x.1.bin": b"rare"}


def write_stock(folder: Path) -> list[Path]:
    """Write shards with webdataset's own writer."""
    folder.mkdir()
    with wds.ShardWriter(str(folder / "train-%02d.tar"), maxcount=8, verbose=0, mtime=0) as sink:
        for i, key in enumerate(KEYS):
            sink.write({"__key__": key, **members(i)})
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("members") / "stock"
    write_stock(folder)
    return folder


def encode(samples: list[dict[str, Any]]) -> list[Any]:
    return [{"latent": torch.full((3,), json.loads(sample["json"])["i"])} for sample in samples]


def build(source: Any, out: Path, fn: Any = encode, **options: Any) -> Any:
    return tc.build(source, fn, out, **{"fingerprint": {}, "batch_size": 4, "max_samples": 5, "fsync": False} | options)


def read_stock(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the samples that webdataset reads from a folder."""
    paths = [str(path) for path in sorted(folder.glob("*.tar"))]
    found = list(wds.WebDataset(paths, shardshuffle=False, empty_check=False))
    return {sample["__key__"]: sample for sample in found}


def check(out: Path, numbers: Any = range(COUNT)) -> None:
    """Assert that stock readers find all members as they were, and that each sample has its tensors."""
    found = read_stock(out)
    assert sorted(found) == sorted(KEYS[i] for i in numbers)
    with tc.open(out) as cache:
        for i in numbers:
            kept = {name: raw for name, raw in found[KEYS[i]].items() if not name.startswith("__")}
            assert kept.pop("skel.pyd")
            assert kept.pop("safetensors")
            assert kept == members(i)
            assert cache[KEYS[i]]["latent"].tolist() == [i] * 3
    assert tc.verify(out).ok


SOURCES: dict[str, Callable[[Path], Any]] = {
    "cache": tc.open,
    "paths": lambda folder: sorted(folder.iterdir()),
    "texts": lambda folder: [str(folder / "train-{00..02}.tar")],
    "wrapped": lambda folder: torch.utils.data.Subset(tc.open(folder), range(COUNT)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_member_is_kept(stock: Path, tmp_path: Path, kind: str) -> None:
    def change(samples: list[dict[str, Any]]) -> list[Any]:
        encoded = encode(samples)
        for sample in samples:
            assert list(sample) == ["__key__", "__url__", *sorted(members(KEYS.index(sample["__key__"])))]
            assert Path(sample["__url__"]).parent == stock
            sample.clear()  # what fn does with its samples does not change the output
        return encoded

    build(SOURCES[kind](stock), tmp_path / "out", change, num_workers=2 * (kind == "paths")).close()
    check(tmp_path / "out")


def test_a_part_of_the_samples(stock: Path, tmp_path: Path) -> None:
    with tc.open(stock) as cache:
        assert (len(cache), list(cache.keys()), cache.schema) == (COUNT, KEYS, {})
        assert pickle.loads(pickle.dumps(cache))[3] == cache[3] == next(iter(cache[[3]]))
        assert cache.members == {"json": 23, "jpg": 17, "seg.png": 17, "x.1.bin": 6}
        build(cache.filter(lambda entry: entry.key.startswith("part.1/"))[2:], tmp_path / "out").close()
        with pytest.raises(tc.BatchError, match=r"train-00.tar: no cache, only other members; tc.build\(tc.open"):
            next(iter(tc.Loader(cache, batch_size=2)))
    check(tmp_path / "out", range(7, COUNT, 3))


def test_a_manifest_and_indexes(tmp_path: Path) -> None:
    write_stock(tmp_path / "stock")
    scanned = list(tc.open(tmp_path / "stock"))
    run("index", tmp_path / "stock")
    with tc.open(tmp_path / "stock") as cache:
        assert (cache.num_shards, list(cache)) == (3, scanned)
        build(cache, tmp_path / "out").close()
    check(tmp_path / "out")


def test_a_few_batches_are_in_memory(tmp_path: Path) -> None:
    (tmp_path / "stock.tar").write_bytes(build_tar([(f"{i}.bin", bytes(100_000)) for i in range(100)]))
    with little_memory(5_000_000):  # of 10 MB
        build(tc.open(tmp_path / "stock.tar"), tmp_path / "out", lambda samples: [{"x": 1} for _ in samples]).close()


def test_ranks_and_versions(stock: Path, tmp_path: Path) -> None:
    for rank in range(3):
        build([stock / f"train-0{n}.tar" for n in range(3)], tmp_path / "v1", rank=rank, world_size=3, digest=digest)
    with tc.open(tmp_path / "v1") as cache:
        assert sorted(cache.keys()) == sorted(KEYS)
        assert cache.members["digest.txt"] == COUNT
    changed = tmp_path / "changed"
    changed.mkdir()
    mended = {"json": b'{"i": 99}', "jpg": b"mended"}
    named = [(f"{KEYS[i]}.{name}", raw) for i in range(8) for name, raw in (members(i) if i != 5 else mended).items()]
    (changed / "0.tar").write_bytes(build_tar(named))
    (changed / "1.tar").write_bytes((stock / "train-01.tar").read_bytes())
    seen: list[str] = []

    def note(samples: list[dict[str, Any]]) -> list[Any]:
        seen.extend(sample["__key__"] for sample in samples)
        return encode(samples)

    build(tc.open(changed), tmp_path / "v2", note, reuse=tmp_path / "v1", digest=digest).close()
    assert seen == [KEYS[5]]
    found = read_stock(tmp_path / "v2")
    assert sorted(found) == sorted(KEYS[:16])
    assert found[KEYS[5]]["jpg"] == b"mended"
    assert found[KEYS[6]]["jpg"] == members(6)["jpg"]


def digest(sample: dict[str, Any]) -> str:
    return repr(sorted(item for item in sample.items() if not item[0].startswith("__")))


def test_urls(tmp_path: Path) -> None:
    write_stock(tmp_path / "stock")
    with HttpServer(tmp_path) as server:
        build([f"{server.url}/stock/train-0{number}.tar" for number in range(3)], tmp_path / "out").close()
    check(tmp_path / "out")


def tar(path: Path, *names: str) -> Path:
    path.write_bytes(build_tar([(name, b"1") for name in names]))
    return path


def test_names_in_a_tar(tmp_path: Path) -> None:
    """Names are understood as by webdataset: a file without an extension belongs to no sample."""
    path = tar(tmp_path / "a.tar", "README", "a.JPG", "b.txt", "dir.v1/LICENSE", "dir.v1/c.txt")
    cache = build([path], tmp_path / "out", lambda samples: [{"x": 1} for _ in samples])
    assert (list(cache.keys()), cache.members) == (["a", "b", "dir.v1/c"], {"jpg": 1, "txt": 2})
    assert cache.read_members([0], "jpg") == [b"1"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_in_a_tar(tmp_path: Path, kind: bytes) -> None:
    """GNU tar writes hard links for files that are one. As with webdataset, their members are lost, but not in silence."""
    links = [special(name, kind, linkname="a.txt") for name in ("b.txt", "c.txt", "README")]
    (tmp_path / "0.tar").write_bytes(build_with_tarfile([("a.txt", b"1"), ("b.cls", b"2"), *links]))
    tar(tmp_path / "1.tar", "d.txt")
    match = r"0\.tar: links .*not followed: 'b.txt', 'c.txt'; make the tar anew"
    with pytest.warns(UserWarning, match=match) as caught:
        cache = build([tmp_path / "0.tar", tmp_path / "1.tar"], tmp_path / "out", lambda samples: [{}] * len(samples))
    assert len(caught) == 1
    assert (list(cache.keys()), cache.members) == (["a", "b", "d"], {"cls": 1, "txt": 2})
    with pytest.warns(UserWarning, match=r"0\.tar: links to other files are not followed"):
        tc.write_index(tmp_path / "0.tar")


REFUSED: list[Any] = [
    (["a.txt", "b.txt"], {}, ValueError, r"two items have the key 'a'; .* is in .*0\.tar, .*1\.tar: pass keys="),
    (["photo 1.txt"], {}, tc.InvalidKeyError, r"item 1 in .*1\.tar: key 'photo 1' contains ' '.* tc.safe_key"),
    (["b.safetensors"], {}, tc.InvalidKeyError, "sample 'b' has members .*'safetensors'.*rename that member"),
    (["b.__key__"], {}, tc.FormatError, r"1\.tar: members have the suffix '__key__', which is reserved; rename"),
    (["b.x.tensorcache"], {}, tc.FormatError, r"1\.tar: members have the suffix 'x.tensorcache', which is reserved"),
    (["b.digest.txt"], {"digest": str}, ValueError, "sample 'b' has a member 'digest.txt' already, so leave out"),
]


@pytest.mark.parametrize(("names", "options", "error", "message"), REFUSED, ids=str)
def test_refused(tmp_path: Path, names: list[str], options: dict[str, Any], error: Any, message: str) -> None:
    paths = [tar(tmp_path / "0.tar", "a.txt"), tar(tmp_path / "1.tar", *names)]
    with pytest.raises(error, match=message):
        build(paths, tmp_path / "out", lambda samples: [{"x": 1} for _ in samples], **options)
    options["keys"] = lambda sample: tc.safe_key(Path(sample["__url__"]).stem + sample["__key__"])
    if error is not tc.FormatError and "safetensors" not in names[0]:
        options.pop("digest", None)
        cache = build(paths, tmp_path / "new", lambda samples: [{"x": 1} for _ in samples], **options)
        assert len(cache) == sum(cache.members.values()) == 1 + len(names)


def test_refused_shards(stock: Path, tmp_path: Path) -> None:
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(b"\x1f\x8b\x08\0" + bytes(2000))
    message = "a.tar.gz: byte 0: gzip: a compressed tar cannot be indexed; unpack it with"
    with pytest.raises(tc.FormatError, match=message):
        build([packed], tmp_path / "out")
    build(tc.open(stock), tmp_path / "out").close()
    with pytest.raises(ValueError, match=r"out/000000\.tar has a cache already; pass tc\.open"):
        build([stock / "train-00.tar", tmp_path / "out" / "000000.tar"], tmp_path / "again")
    with pytest.raises(ValueError, match="contains shards of the source itself; build into another folder"):
        build(tc.open(tmp_path / "out"), tmp_path / "out", lambda samples: [sample | {"more": 1} for sample in samples])


def test_shards_with_a_cache_and_members(stock: Path, tmp_path: Path) -> None:
    """A new cache of their samples lacks the other members, and says so."""
    added = build(tc.open(stock), tmp_path / "added", digest=digest)

    def encode_more(samples: list[Any]) -> list[Any]:
        return [{"more": sample["latent"].load() + 1} for sample in samples]

    message = r"members, which the new cache lacks: .*'json', 'x.1.bin'.*; tc\.join of both"
    for at, source in enumerate((added[:3], tc.join([added]), added)):
        with pytest.warns(UserWarning, match=message):
            more = build(source, tmp_path / f"more{at}", encode_more, digest=str)
        assert more.members == {"digest.txt": len(source)}
    both = tc.join([added, more])
    assert both.read_members([7], "json") == added.read_members([7], "json")
    assert both[7]["more"].tolist() == [8, 8, 8]
    assert len(build(more, tmp_path / "last", lambda samples: samples)) == COUNT  # no other members than the digest


def test_samples_that_overlap(tmp_path: Path) -> None:
    """Each sample of a forged index could span the shard, so that reading all samples would take quadratic time."""
    with tc.ShardWriter(tmp_path / "0.tar", manifest=False, dali_index=False, fsync=False) as sink:
        for i in range(6):
            sink.write(f"{i}", a=b"1" * 2000, b=b"2" * 2000)
    with tc.open(tmp_path / "0.tar") as cache:
        assert cache["3"] == {"__key__": "3", "__url__": str(tmp_path / "0.tar"), "a": b"1" * 2000, "b": b"2" * 2000}
    forge(tmp_path / "0.tar", lambda arrays: arrays.update({"member.1.begin": arrays["member.1.begin"][::-1].copy()}))
    with pytest.raises(tc.FormatError, match="0.tar: the index has samples that overlap or have no members"):
        tc.open(tmp_path / "0.tar")
