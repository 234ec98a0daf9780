"""Keys of any text: legal for every reader, different where the texts are, and back, through all tools that rewrite shards."""

from __future__ import annotations

import pickle
import random
import re
import tarfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
import webdataset as wds
from hypothesis import example, given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.reading.batches import write as write_samples
from tests.shards.footers import forge
from tests.shards.tars import build, halves

# ASCII without dots and white space, a plain path, no name that readers skip
IS_LEGAL = re.compile(r"(?!__)[A-Za-z0-9_%-]+(/[A-Za-z0-9_%-]+)*").fullmatch
AWKWARD = [
    "", " ", ".", "..", "/", "//", "_", "__", "___x", "__x/y", "a/", "/a", "a//b", "a/../b", "a/b", "a/__b", "%", "%25", "%2",
    "%empty", "empty", "a%-" + "0" * 40, "photo (1).v2", "IMG_1.JPG", "img_1.jpg", "n01/n01_2.JPEG", "ä", "a\u0308", "\0",
    "\n", "\ud800", "\udcff", "\ud83d\ude00", "😀", "C:\\x", "s3://bucket/key", "a" * 80, "a" * 81, "." * 26, "." * 27,
    "a" * 100_000, "a" * 99_999 + "b", "é" * 60, "x/" * 39 + "y/z", "x/" * 18 + "y/" * 40,
]  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=())) | st.text("_/.%a-\ud800é", max_size=40) | st.sampled_from(AWKWARD)
NAMES = ["a", "фжц/цю щъ ызжщ юя жж", "\udcff" * 40, "b (1)", "写真" * 30, "x" * 89]

BAD_KEYS = ["%", "%2", "%zz", "%61", "%2f", "a.b", "%C3", "a%2Fb", "", "%ED", "ä", "\ud800", "%-", "__a"]


def back(key: str) -> str | None:
    """Return the original name from the text of a key; None if it was too long."""
    if "%-" not in key:
        return tc.original_name(key)
    with pytest.raises(tc.InvalidKeyError, match="only a hash of its name"):
        tc.original_name("".join(key))
    return None


@given(TEXTS, TEXTS)
@example("%empty", "")
@example("a" * 38 + "%-" + "0" * 40, "a" * 81)
def test_any_text(one: str, other: str) -> None:
    for name in (one, other):
        key = tc.safe_key(name)
        assert IS_LEGAL(key)
        assert len(f"{key}.safetensors") <= 100
        assert tc.original_name(key) == tc.original_name(pickle.loads(pickle.dumps(key))) == name
        assert back(key) == name or (back(key) is None and len(name.encode("utf-8", "surrogatepass")) > 29)
        assert tc.safe_key(key) == key or "%" in key
    assert (tc.safe_key(one) == tc.safe_key(other)) == (one == other)


def test_what_keys_look_like() -> None:
    assert len(set(map(tc.safe_key, AWKWARD))) == len(AWKWARD)
    for name in ("000017", "n01440764/n01440764_10026", "IMG-1_x", "_a", "a" * 88):
        assert tc.safe_key(name) == name == tc.original_name(name)
    assert tc.safe_key("photo (1).v2") == "photo%20%281%29%2Ev2"
    for name in ("ф" * 14, "写" * 9):  # as much as a tar allows
        assert back(tc.safe_key(name)) == name
    assert len(tc.safe_key("ф" * 15)) == 80
    assert tc.safe_key("é" * 60)[-42:-40] == "%-"


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_of_another_origin(key: str) -> None:
    with pytest.raises(tc.InvalidKeyError, match=r"was not made by tc\.safe_key"):
        tc.original_name(key)


@pytest.mark.parametrize("wrong", [None, b"a", Path("a")])
def test_only_text(wrong: Any) -> None:
    for function in (tc.safe_key, tc.original_name):
        with pytest.raises(TypeError, match=f"as a str, got a {type(wrong).__name__}"):
            function(wrong)


def test_every_reader_reads_them(tmp_path: Path) -> None:
    keys = {tc.safe_key(name): i for i, name in enumerate(AWKWARD)}
    with tc.ShardWriter(tmp_path / "a.tar", fsync=False) as sink:
        for key, i in keys.items():
            sink.write(key, {"i": i}, json=i)
        with pytest.raises(tc.InvalidKeyError, match=r"tc\.safe_key"):
            sink.write("photo.1", 0)
    assert tc.verify(tmp_path).ok
    with tc.open(tmp_path) as cache:
        assert list(cache.keys()) == list(keys)
        assert [cache.original_name(key) for key in list(cache.keys())] == AWKWARD
        assert [cache[key]["i"] for key in keys] == list(keys.values())
    stock = wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    assert {sample["__key__"]: int(sample["json"]) for sample in stock} == keys
    with tarfile.open(tmp_path / "a.tar") as archive:
        archive.extractall(tmp_path / "x", filter="data")
    assert len(list((tmp_path / "x").rglob("*.json"))) == len(keys)


def write(folder: Path, names: list[str] = NAMES, **options: Any) -> Path:
    samples = {tc.safe_key(name): {"x": torch.tensor(number)} for number, name in enumerate(names)}
    write_samples(folder / "%06d.tar", samples, **{"max_samples": 100} | options)
    return folder


def names_in(folder: Path) -> list[str]:
    with tc.open(folder) as cache:
        return [cache.original_name(key) for key in list(cache.keys())]


def test_a_cache_knows_the_names(tmp_path: Path) -> None:
    assert names_in(write(tmp_path, max_samples=2)) == NAMES
    with tc.open(tmp_path) as cache:
        view = cache.select("x")[[4, 1]]
        assert view.original_name(view.keys()[0]) == NAMES[4]
        with pytest.raises(KeyError, match="no sample"):
            view.original_name("a")
        joined = tc.join({"m": cache, "n": cache})
        assert joined.original_name(joined.keys()[1]) == NAMES[1]
        write_samples(tmp_path / "c", {"a": {"y": 1}})
        with tc.join([tmp_path / "c", cache], keys={1: {"a": joined.keys()[1]}}) as mapped:
            assert mapped.original_name("a") == "a"
    write_samples(tmp_path / "b", {"a%zz": {"x": 1}})
    with tc.open(tmp_path / "b") as cache, pytest.raises(tc.InvalidKeyError, match="was not made by"):
        cache.original_name("a%zz")


def write_index(source: Path, out: Path) -> None:
    out.mkdir()
    for shard in source.glob("*.tar"):
        (out / shard.name).write_bytes(shard.read_bytes())
        tc.write_index(out / shard.name)


TOOLS: dict[str, Callable[[Path, Path], object]] = {
    "reshard": lambda source, out: tc.reshard(source, out, max_samples=4),
    "drop": lambda source, out: tc.drop(source, out, ["a"]),
    "repair": tc.repair,
    "write_index": write_index,
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_keep_names(tmp_path: Path, tool: str) -> None:
    TOOLS[tool](write(tmp_path / "a", max_samples=3), tmp_path / "b")
    assert sorted(names_in(tmp_path / "b")) == sorted(NAMES[1:] if tool == "drop" else NAMES)
    assert tc.verify(tmp_path / "b").ok


def test_merge_with_a_prefix(tmp_path: Path) -> None:
    long = "写真" * 8
    tc.merge([write(tmp_path / "a", [long]), write(tmp_path / "b", [long])], tmp_path / "c", prefixes=["", "b/"])
    assert names_in(tmp_path / "c") == [long, f"b/{long}"]


def test_a_lost_table_is_no_fault(tmp_path: Path) -> None:
    shard = write(tmp_path / "a") / "000000.tar"
    forge(shard, lambda arrays: [arrays.pop(f"originals.{name}") for name in ("rows", "text", "ends")])
    tc.write_index(shard)
    assert tc.verify(tmp_path / "a").ok
    with tc.open(tmp_path / "a") as cache, pytest.raises(tc.InvalidKeyError, match="only a hash of its name"):
        cache.original_name(cache.keys()[2])


def test_earlier_keys_are_found(tmp_path: Path) -> None:
    """Earlier versions hashed names whose keys have more than 80 characters."""
    name = "ф" * 14
    key = quote(name)[:38] + "%-" + sha256(name.encode()).hexdigest()[:40]
    write_samples(tmp_path / "%06d.tar", {key: {"x": torch.tensor(5)}})
    with tc.open(tmp_path) as cache:
        assert cache[tc.safe_key(name)]["x"].load() == 5
        assert tc.safe_key(name) in cache
        assert "a" * 84 not in cache
    write_samples(tmp_path / "%06d.tar", {tc.safe_key(name): {"x": torch.tensor(6)}}, resume=True)
    assert len(tc.open(tmp_path)) == 1


U8 = np.uint8
FORGED: dict[str, dict[str, Any]] = {
    "row beyond the samples": {"originals.rows": np.array([1, 2, 4, 6], U8)},
    "ends that descend": {"originals.ends": np.array([30, 20, 90, 255], U8), "originals.text": np.full(255, 65, U8)},
    "text that is too long": {"originals.text": np.zeros(10_000, U8)},
    "no rows": {"originals.rows": np.empty(0, U8)},
    "too few digests": {"items.digest": np.ones(3, np.uint64)},
    "text of another width": {"originals.text": np.zeros(4, np.uint16)},
}


@pytest.mark.parametrize("change", FORGED)
def test_forged_tables_are_refused(tmp_path: Path, change: str) -> None:
    shard = write(tmp_path, manifest=False) / "000000.tar"
    forge(shard, lambda arrays: arrays.update(FORGED[change]))
    with pytest.raises(tc.FormatError, match=r"original names|originals\.text"):
        tc.open(shard)


def test_a_forged_name_that_is_not_text(tmp_path: Path) -> None:
    shard = write(tmp_path / "c", manifest=False) / "000000.tar"
    forge(shard, lambda arrays: arrays.update({"originals.text": np.full_like(arrays["originals.text"], 0xFF)}))
    with tc.open(tmp_path / "c") as cache:
        assert cache[2]["x"].load() == 2
        with pytest.raises(tc.FormatError, match="not UTF-8"):
            cache.original_name(cache.keys()[2])
    (fault,) = tc.verify(tmp_path / "c").faults
    assert "not UTF-8" in str(fault)
    tc.repair(tmp_path / "c", tmp_path / "repaired")
    assert tc.verify(tmp_path / "repaired").ok
    assert [int(sample["x"].load()) for sample in tc.open(tmp_path / "repaired")] == list(range(len(NAMES)))


# --- every key is found where it is, in shards of any keys in any order, and caches are joined by such keys ---


def write_by_hand(folder: Path, shards: Sequence[Sequence[str]]) -> Path:
    """Write samples with these keys and their place as content, by hand: `ShardWriter` refuses some of the keys."""
    folder.mkdir()
    places = count()
    for number, keys in enumerate(shards):
        members = [half for key in keys for half in halves(key, next(places))]
        (folder / f"{number:03d}.tar").write_bytes(build(members))
    return folder


# keys that are equal but for their ends, that have zeros, or that are longer or shorter than words of 4 and 8 bytes
pieces = st.sampled_from(["a", "b", "\x01", "\udcff", "0", "9", "é", "same", "folder/x", "x" * 130])
some_keys = st.lists(pieces, min_size=1, max_size=4).map("".join)
numbered = st.sampled_from(["%d", "%06d", "k%d", "a/long/folder/%08d"]).map(lambda form: [form % i for i in range(12)])
shards_of_keys = st.lists(st.lists(some_keys, max_size=6, unique=True) | numbered, min_size=1, max_size=4).filter(any)


@given(shards_of_keys, st.randoms(use_true_random=False))
@example([["a", "z", "c"], ["z"]], random.Random(0))
@example([["b", "c"], ["a"]], random.Random(0))
@example([["9", "10"], ["11", "12"]], random.Random(0))
def test_keys_are_found_as_in_a_dictionary(shards: list[list[str]], rng: random.Random) -> None:
    places: dict[str, list[int]] = {}
    for place, key in enumerate(chain(*shards)):
        places.setdefault(key, []).append(place)
    with TemporaryDirectory() as folder, tc.open(write_by_hand(Path(folder) / "cache", shards)) as cache:
        assert list(cache.keys()) == list(chain(*shards))
        chosen = [place for place in range(len(cache)) if rng.random() < 0.7]
        view = cache[chosen]
        for key in {*places, *(key[:-1] for key in places), *(key + "a" for key in places), "7"}:
            assert (key in cache) == (key in places)
            if len(found := places.get(key, [])) == 1:
                assert cache[key] == found[0]
            else:
                with pytest.raises(KeyError, match="no sample|in several shards"):
                    cache[key]
            assert (key in view) == any(place in chosen for place in found)


def test_caches_are_joined_by_their_keys_and_not_by_their_texts(tmp_path: Path) -> None:
    parts = {name: write_by_hand(tmp_path / name, [keys]) for name, keys in (("x", ["a", "aa"]), ("y", ["aa", "a"]))}
    assert list(tc.join(parts)) == [{"x": 0, "y": 1}, {"x": 1, "y": 0}]
