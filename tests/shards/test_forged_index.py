"""An index with a right digest that is not true: refused at once, or at first use with the name of the sample."""

from __future__ import annotations

import itertools
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.shards.forged_index import Change, changed, columns, put_footer, swap, swap_keys, swapped, unchecked
from wds_tensorcache.codec.layout import form_of
from wds_tensorcache.shards import footer
from wds_tensorcache.shards.index import CacheColumns, MemberColumns, ShardIndex, narrow
from wds_tensorcache.shards.index_builder import scan_shard
from wds_tensorcache.shards.key_table import Keys
from wds_tensorcache.shards.shard import load_index
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


def index_of(path: Path) -> ShardIndex:
    file = ShardFile(str(path))
    return scan_shard(file.read, file.nbytes)


def lie(path: Path, change: Change) -> None:
    put_footer(path, change(index_of(path)))


LIES: dict[str, Change] = {
    "keys": swap_keys,
    "everything": swap(*EVERYTHING),
    "all of the tensors": swap("tensors_begin", "layout", "digest"),
    "offsets": swap("tensors_begin"),
    "digests": swap("digest"),
    "layouts": swap("layout"),
    "skeletons": swap("skeleton_begin", "skeleton_nbytes"),
    "offsets and digests": swap("tensors_begin", "digest"),
    "a layout of the same bytes": changed("layout", 2, 1),
    "no digest": changed("digest", 1, 0),
    "no digest, another layout": lambda index: changed("layout", 1, 0)(changed("digest", 1, 0)(index)),
    "a digest that is not there": changed("digest", 1, 5),
    "an offset": changed("tensors_begin", 1, 512),
    "an odd offset": changed("tensors_begin", 1, 513),
    "overlapping": lambda index: columns(index, tensors_begin=index.caches[""].tensors_begin[[0, 2, 2, 3]]),
    "longer skeletons": changed("skeleton_nbytes", 1, 600),
    "shorter skeletons": changed("skeleton_nbytes", 1, 20),
    "empty skeletons": changed("skeleton_nbytes", 1, 0),
    "keys of other lengths": lambda index: replace(
        index, keys=Keys(index.keys.text, narrow([1, 4, 6, len(index.keys.text)]))
    ),
}


def use(cache: Any, how: str, i: int) -> torch.Tensor:
    if how == "read_batch":
        return cache.read_batch([i])["x"][0]
    if how == "a batch of all":
        batch = cache.read_batch([3, i, 0], collate="list")
        assert batch["i"][1] == i
        return batch["x"][1]
    lazy = cache[i]["x"]
    if how == "pickled":
        lazy = pickle.loads(pickle.dumps(lazy))
    return lazy.load(copy=how != "view")


USES = list(itertools.product(["read_batch", "a batch of all", "load", "view", "pickled"], ["mmap", "pread"]))


@pytest.mark.parametrize("what", LIES)
def test_no_other_bytes(shard: tuple[Path, int], what: str) -> None:
    path, nbytes = shard
    lie(path, LIES[what])
    for how, io in USES:
        assert_no_other_bytes(path, nbytes, what, how, io)


def assert_no_other_bytes(path: Path, nbytes: int, what: str, how: str, io: str) -> None:
    refusals = []
    with tc.open(path, io=io) as cache:
        for i in [0, 0, 1, 1, 2, 2, 3, 3]:  # an error the first time is one the second time
            found = None
            try:
                found = use(cache, how, i)
            except tc.FormatError as exc:
                refusals.append(f"sample {i}: {exc}")
            if found is not None:
                assert found.shape == sample(i, nbytes)["x"].shape
                assert bool((found == i).all())
    for refusal in refusals:
        assert str(path) in refusal
        assert re.search("k[0-3]|'k|x.tar: sample", refusal), "names the sample"
    refused = len(refusals)
    honest = {"longer skeletons", "keys of other lengths"}
    assert refused or what in honest or (what == "skeletons" and how == "read_batch"), f"{how}, {io}"
    assert refused % 2 == 0, f"{how}, {io}"


DAMAGE = {  # offset in the member, and the bytes there
    "another length of the header": (0, b"\xff"),
    "a huge length of the header": (0, b"\xff" * 8),
    "another key": (9, b"#"),
    "another version": (40, b"2"),
    "another digest": (42, b"!"),
    "another name": (61, b"!"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_header_is_refused_whatever_was_read_before(shard: tuple[Path, int], what: str) -> None:
    path, _ = shard
    offset, raw = DAMAGE[what]
    begin = index_of(path).caches[""].tensors_begin.item(3) + offset
    content = path.read_bytes()
    path.write_bytes(content[:begin] + raw + content[begin + len(raw) :])
    for before, (how, io) in itertools.product(([], [1]), USES):  # the two have one layout
        with tc.open(path, io=io) as cache:
            assert [int(cache.read_batch([i])["x"][0, 0, 0]) for i in before] == before
            with pytest.raises(tc.FormatError, match="'k3': its tensors differ from the index"):
                use(cache, how, 3)


def test_a_longer_name_of_a_skeleton_is_refused(shard: tuple[Path, int]) -> None:
    path, _ = shard
    begin = index_of(path).caches[""].skeleton_begin.item(1) - 512
    content = path.read_bytes()
    name = content[begin : begin + 100].rstrip(b"\0")
    path.write_bytes(content[: begin + len(name)] + b"x" + content[begin + len(name) + 1 :])
    with tc.open(path) as cache:
        for read in (lambda: cache[1], lambda: list(cache.read_batch([3, 1])["i"])):
            with pytest.raises(tc.FormatError, match="where the shard has 'k1.skel.pydx'"):
                read()


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
    lie(path, change)
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
    lie(path, lambda index: columns(index, **wide))
    for io in ("mmap", "pread"):
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
