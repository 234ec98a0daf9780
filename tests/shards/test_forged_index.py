"""An index with a right digest that is not true."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import run
from tests.shards.forged_index import Change, changed, columns, forge, index_of, put_footer, swapped, unchecked
from wds_tensorcache.codec.header import form_of
from wds_tensorcache.shards import footer
from wds_tensorcache.shards.index import CacheColumns, MemberColumns, ShardIndex, narrow
from wds_tensorcache.shards.key_table import Keys
from wds_tensorcache.shards.load_index import load_index
from wds_tensorcache.storage.files import ShardFile

EVERYTHING = ("skeleton_begin", "skeleton_nbytes", "tensors_begin", "layout", "digest")


def sample(i: int, nbytes: int) -> dict[str, Any]:
    """Samples 0 and 1 have one layout; 2 has as many bytes in another; all are told apart by every byte."""
    return {"x": torch.full((2, nbytes) if i % 2 else (nbytes, 2), i, dtype=torch.uint8), "i": i}


@pytest.fixture(params=[8, 40_000], ids=["small", "large"])
def shard(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, int]:
    with tc.ShardWriter(tmp_path / "x.tar", manifest=False, fsync=False) as sink:
        for i in range(4):
            sink.write(f"k{i}", sample(i, request.param))
    return tmp_path / "x.tar", request.param


@pytest.mark.parametrize("places", [(0,), (1,), (2,), (0, 1, 2)], ids=["first", "middle", "last", "all"])
def test_a_sidecar_of_another_shard_of_the_same_length_is_refused(tmp_path: Path, places: tuple[int, ...]) -> None:
    for folder, keys in {"a": "012", "b": ["x" if i in places else str(i) for i in range(3)]}.items():
        with tc.ShardWriter(tmp_path / folder / "x.tar", footer=False, manifest=False, dali_index=False) as sink:
            for i, key in enumerate(keys):
                sink.write(f"{folder if key == 'x' else 'k'}{i}", sample(i, 8))
    path = tmp_path / "a" / "x.tar"
    tc.write_index(path, dali_index=False)
    os.utime(path.with_name("x.tar.index"))
    (tmp_path / "b" / "x.tar").replace(path)
    with pytest.raises(tc.FormatError, match="x.tar: .*lists 'k.*' of .* where the shard has 'b.*is stale") as caught:
        tc.open(path)
    assert caught.value.kind == "index"
    assert any(fault.kind == "index" for fault in tc.verify(path).faults)
    run("index", path.parent if places == (0,) else path)
    with tc.open(path) as cache:
        assert [int(tensor[0, 0]) for tensor in cache.read_batch(range(3), collate="list")["x"]] == [0, 1, 2]


def edited(index: ShardIndex, **changes: Any) -> ShardIndex:
    return replace(index, layouts=unchecked(index.layouts, **changes))


IMPOSSIBLE: dict[str, tuple[Change, str]] = {
    "tensors outside": (changed("tensors_begin", 3, 1 << 40), "outside the archive"),
    "tensors far outside": (changed("tensors_begin", 3, (1 << 64) - 1), "outside the archive"),
    "tensors in front": (changed("tensors_begin", 0, 0), "outside the archive"),
    "tensors beyond": (lambda index: changed("tensors_begin", 3, index.end - 8)(index), "extends beyond the archive"),
    "skeleton outside": (changed("skeleton_begin", 3, (1 << 63) + 5), "outside the archive"),
    "huge skeleton": (changed("skeleton_nbytes", 3, (1 << 64) - 600), "outside the archive"),
    "no such layout": (changed("layout", 3, 99), "layout that does not exist"),
    "huge dims": (lambda i: edited(i, dims=np.full(4, (1 << 64) - 1, np.uint64)), "impossible size"),
    "huge, and zero": (lambda i: edited(i, dims=np.array([1 << 63, 0, 1, 1], np.uint64)), "impossible size"),
    "dims that overflow": (lambda i: edited(i, dims=np.full(4, 1 << 32, np.uint64)), "impossible size"),
    "huge data_begin": (lambda i: edited(i, data_begin=np.full(2, (1 << 64) - 8, np.uint64)), "impossible size"),
    "more dims": (lambda i: edited(i, dims=np.ones(9, np.uint8)), "dimensions do not match their forms"),
    "fewer dims": (lambda i: edited(i, dims=np.ones(1, np.uint8)), "dimensions do not match their forms"),
    "no such form": (lambda i: edited(i, form=np.full(2, 7, np.uint8)), "form that does not exist"),
    "no forms": (lambda i: edited(i, forms=(), references=()), "form that does not exist"),
    "fewer references": (lambda i: edited(i, references=()), "incomplete"),
    "references of an unknown kind": (
        lambda i: edited(i, references=tuple((f"{text[:4]}x{text[5:]}",) for (text,) in i.layouts.references)),
        "begins with neither",
    ),
    "references with an unknown attribute": (
        lambda i: edited(i, references=tuple((f"{text}?x=1",) for (text,) in i.layouts.references)),
        "unknown attribute",
    ),
    "references to another tensor": (
        lambda i: edited(i, references=(("tensor:other",),)),
        "impossible value for references",
    ),
    "fewer lists of further names": (lambda i: edited(i, further=((("y", "x"),), ())), "further"),
    "a further name that is a tensor's": (lambda i: edited(i, further=((("x", "x"),),)), "further"),
    "a further name of no tensor": (lambda i: edited(i, further=((("y", "z"),),)), "further"),
    "a further name that is not text": (lambda i: edited(i, further=(((1, "x"),),)), "further"),
    "a further name that occurs twice": (lambda i: edited(i, further=((("y", "x"), ("y", "x")),)), "further"),
    "64 dims that overflow floats": (
        lambda i: edited(
            i,
            forms=(form_of((("x", "U8", 64),)),),
            dims=np.full(128, 1 << 61, np.uint64),
        ),
        "impossible size",
    ),
    "fewer digests": (lambda i: columns(i, digest=i.caches[""].digest[:2]), "unequal lengths"),
    "fewer offsets": (lambda i: columns(i, tensors_begin=i.caches[""].tensors_begin[:2]), "unequal lengths"),
    "fewer samples": (lambda i: columns(i, layout=i.caches[""].layout[:2]), "unequal lengths"),
    "rows that fall": (lambda i: columns(i, rows=np.array([0, 2, 1, 3], np.uint8)), "unequal lengths"),
    "a row twice": (lambda i: columns(i, rows=np.array([0, 1, 1, 3], np.uint8)), "unequal lengths"),
    "a row outside": (lambda i: columns(i, rows=np.array([0, 1, 2, 4], np.uint8)), "unequal lengths"),
    "keys that overlap": (
        lambda i: replace(i, keys=Keys(i.keys.text, swapped(i.keys.ends))),
        "keys that overlap",
    ),
    "keys outside": (lambda i: replace(i, keys=Keys(i.keys.text, i.keys.ends + np.uint8(9))), "keys that overlap"),
    "keys whose ends wrap": (
        lambda i: replace(
            i, keys=Keys(i.keys.text, np.array([(1 << 63) - 1, (1 << 64) - 2, (1 << 64) - 1, 8], np.uint64))
        ),
        "keys that overlap",
    ),
    "empty keys": (lambda i: replace(i, keys=Keys(i.keys.text, narrow([0, 2, 4, 8]))), "empty keys"),
    "keys that are not bytes": (
        lambda i: replace(i, keys=Keys(i.keys.text.astype(np.uint16), i.keys.ends)),
        "are not both bytes",
    ),
    "a member outside": (
        lambda i: replace(i, members={"txt": MemberColumns(None, *(np.full(4, n, np.uint64) for n in (512, i.end)))}),
        "extends beyond",
    ),
    "a bad cache name": (
        lambda i: replace(i, caches={"Ä": i.caches[""]}),
        "impossible value for cache names",
    ),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_refused_at_once(shard: tuple[Path, int], what: str) -> None:
    path, _ = shard
    change, message = IMPOSSIBLE[what]
    forge(path, change)
    with pytest.raises(tc.FormatError, match=f"x.tar: .*{message}"):
        tc.open(path)


NAMES = [
    b"",
    b"\xff",
    b"[" * 100_000,
    b"[]",
    b"null",
    b'{"caches":[],"members":[]}',
    b'{"caches":5,"members":[],"forms":[]}',
    b'{"caches":[[]],"members":[],"forms":[]}',
    b'{"caches":[""],"members":[5],"forms":[]}',
    b'{"caches":["","a"],"members":[],"forms":[]}',
    b'{"caches":[""],"members":["txt"],"forms":[]}',
    b'{"caches":[""],"members":[],"forms":[[["x","U9",1]]]}',
    b'{"caches":[""],"members":[],"forms":[[["x","U8",true]]]}',
    b'{"caches":[""],"members":[],"forms":[[["x","U8",65]]]}',
    b'{"caches":[""],"members":[],"forms":[[["x","U8",-1]]]}',
    b'{"caches":[""],"members":[],"forms":[[[5,"U8",1]]]}',
    b'{"caches":[""],"members":[],"forms":[[["x",[],1]]]}',
    b'{"caches":[""],"members":[],"forms":[[["x","U8"]]]}',
    b'{"caches":[""],"members":[],"forms":[[["x","U8",1],["x","U8",1]]]}',
    b'{"caches":[""],"members":[],"forms":[5]}',
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[:60].decode(errors="replace"))
def test_names(shard: tuple[Path, int], names: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = shard
    index = index_of(path)
    with monkeypatch.context() as patch:
        patch.setattr(footer.json, "dumps", lambda value, **_: _Text(names) if "forms" in value else _dumps(value, **_))
        put_footer(path, index)
    with pytest.raises(tc.FormatError, match=r"x\.tar: .*the index"):
        load_index(ShardFile(str(path)))


_dumps = footer.json.dumps


class _Text:
    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def encode(self) -> bytes:
        return self._raw


def test_arrays_of_other_dtypes_and_shapes(shard: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = shard
    index = index_of(path)
    for dtype in ("I64", "F64"):
        with monkeypatch.context() as patch:
            patch.setitem(footer._STORED, "u8", dtype)
            put_footer(path, index)
        with pytest.raises(tc.FormatError, match=rf"x\.tar: the index has an array '.*' of {dtype}\[4\]"):
            load_index(ShardFile(str(path)))


def test_columns_of_any_width(shard: tuple[Path, int]) -> None:
    """Not as narrow as they could be: read all the same."""
    path, _ = shard
    wide = {name: getattr(index_of(path).caches[""], name).astype(np.uint64) for name in EVERYTHING}
    forge(path, lambda index: columns(index, **wide))
    for io in ("auto", "pread"):
        with tc.open(path, io=io) as cache:
            for i in range(4):
                assert bool((cache.read_batch([i])["x"] == i).all())
                assert bool((cache[i]["x"].load() == i).all())


def test_no_samples(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(bytes(1024))
    empty = index_of(tmp_path / "x.tar")
    put_footer(tmp_path / "x.tar", empty)
    assert len(load_index(ShardFile(str(tmp_path / "x.tar"))).keys) == 0
    none = np.empty(0, np.uint64)
    put_footer(tmp_path / "x.tar", replace(empty, caches={"": CacheColumns(None, *([none] * 5))}))
    with tc.open(tmp_path / "x.tar") as cache:
        assert (len(cache), list(cache), cache.schema) == (0, [], {})
