"""Builds whose keys are the positions of items: another item in the place of a finished one is an error, or a warning."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.children import finish, start
from tests.shards.damage import contents_of

COUNT = 50


def encode(items: list[Any]) -> list[Any]:
    return [{"x": torch.tensor(item)} for item in items]


def build(source: Any, out: Path, fn: Any = encode, **options: Any) -> Any:
    options = {"fingerprint": {}, "batch_size": 8, "max_samples": 16, "fsync": False} | options
    return tc.build(source, fn, out, **options)


def values(cache: Any) -> list[int]:
    return [cache[key]["x"].load().item() for key in sorted(cache.keys())]


class Indexed:
    """A map-style dataset other than a list, which counts what is read."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        self.read.append(i)
        return self.items[i]


class Iterated:
    """An iterable without a length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


SOURCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "dataset": Indexed, "iterable": Iterated}

ITEMS = list(range(COUNT))
CHANGES = {
    "insert": ([99, *ITEMS], "item 0 is not the one .* of 5[01] items compared, 50 differ"),
    "insert late": ([*ITEMS[:47], 99, *ITEMS[47:]], "item 47 is not the one .* of 5[01] items compared, 3 differ"),
    "pop": (
        [*ITEMS[:3], *ITEMS[4:]],
        "item 3 is not the one .* of 49 items compared, 46 differ; the source has 49 items, .* samples of 1 more",
    ),
    "swap": ([*ITEMS[:3], 4, 3, *ITEMS[5:]], "item 3 is not the one .* of 50 items compared, 2 differ"),
    "replace": ([*ITEMS[:3], 99, *ITEMS[4:]], "item 3 is not the one .* of 50 items compared, 1 differ"),
    "fewer": (ITEMS[:40], "the source has 40 items, but .* has samples of 10 more"),
    "none": ([], "the source has 0 items, but .* has samples of 50 more"),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("how", CHANGES)
def test_another_item_in_a_place(tmp_path: Path, how: str, kind: str) -> None:
    """It is an error. A version computes only items that are not the ones of their old samples. Appended items are computed."""
    wanted, message = CHANGES[how]
    build(SOURCES[kind](ITEMS), tmp_path / "a").close()
    before = contents_of(tmp_path / "a")
    called: list[Any] = []
    with pytest.raises(tc.StaleCacheError, match=message) as raised:
        build(SOURCES[kind](wanted), tmp_path / "a", called.extend)
    assert called == []
    assert contents_of(tmp_path / "a") == before
    for remedy in ("appended", f"reuse={str(tmp_path / 'a')!r}", "keys=", "digest=", "keys='position'"):
        assert remedy in str(raised.value)
    if not wanted:
        return

    def fn(batch: list[Any]) -> list[Any]:
        called.extend(batch)
        return encode(batch)

    assert values(build(SOURCES[kind](wanted), tmp_path / "b", fn, reuse=tmp_path / "a")) == wanted
    assert len(called) == sum(old != new for old, new in zip(ITEMS, wanted, strict=False)) + max(0, len(wanted) - COUNT)
    with pytest.raises(tc.StaleCacheError, match="differ|changed"):  # an existing version is compared, too
        build(SOURCES[kind]([77, *wanted]), tmp_path / "b", fn, reuse=tmp_path / "a")
    assert values(build(SOURCES[kind]([*wanted, 55, 56]), tmp_path / "b")) == [*wanted, 55, 56]


def test_an_interrupted_build_is_compared(tmp_path: Path) -> None:
    def fail(batch: list[Any]) -> list[Any]:
        if 30 in batch:
            raise RuntimeError("no")
        return encode(batch)

    for keys in (None, "position"):
        build(ITEMS, tmp_path / f"whole{keys}", keys=keys).close()
        with pytest.raises(RuntimeError, match="no"):
            build(ITEMS, tmp_path / f"part{keys}", fail, keys=keys)
    with pytest.raises(tc.StaleCacheError, match="item 0 is not the one .* of 24 items compared, 24 differ"):
        build([99, *ITEMS], tmp_path / "partNone")
    assert values(build([*ITEMS[:24], 99, *ITEMS[24:]], tmp_path / "partNone")) == [*range(24), 99, *range(24, COUNT)]
    assert values(build(ITEMS, tmp_path / "partposition", keys="position")) == ITEMS


def test_few_items_of_a_dataset_are_read(tmp_path: Path) -> None:
    items = list(range(1000))
    build(Indexed(items), tmp_path, batch_size=100, max_samples=1000).close()
    source = Indexed(items)
    build(source, tmp_path, batch_size=100).close()
    assert len(set(source.read)) == 65
    assert 999 in source.read
    for at in (0, 500, 998):
        with pytest.raises(tc.StaleCacheError, match="of 65 items compared"):
            build(Indexed([*items[:at], 5000, *items[at:]]), tmp_path)
        with pytest.raises(tc.StaleCacheError, match="1 more"):
            build(Indexed([*items[:at], *items[at + 1 :]]), tmp_path)
    with pytest.raises(tc.StaleCacheError, match="of 1000 items compared, 1 differ"):  # all items that are in memory
        build((*items[:500], 5000, *items[501:]), tmp_path)


class Odd:
    """An item that is not a plain value."""

    def __init__(self, value: int) -> None:
        self.value = value


def encode_odd(items: list[Any]) -> list[Any]:
    return encode([item.value for item in items])


@pytest.mark.parametrize("kind", ["dataset", "iterable"])
def test_other_items_warn_when_resumed(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind]([Odd(i) for i in range(COUNT)])
    build(source, tmp_path / "a", encode_odd).close()
    with pytest.warns(UserWarning, match="not plain values.*keys='position'") as seen:
        build(source, tmp_path / "a", encode_odd).close()
    assert len(seen) == 1
    with pytest.warns(UserWarning, match="not plain values") as seen:
        build(source, tmp_path / "b", encode_odd, reuse=tmp_path / "a").close()
    assert len(seen) == 1
    build(source, tmp_path / "a", encode_odd, keys="position").close()
    build(source, tmp_path / "c", encode_odd, reuse=tmp_path / "a", keys="position").close()
    with pytest.raises(tc.StaleCacheError, match="the source has 40 items"):
        build(SOURCES[kind]([Odd(i) for i in range(40)]), tmp_path / "a", encode_odd, keys="position")


def test_a_position_is_not_compared(tmp_path: Path) -> None:
    build(ITEMS, tmp_path, keys="position").close()
    assert b"items.digest" not in (tmp_path / "000000.tar").read_bytes()
    assert values(build([99, *ITEMS[1:], 50], tmp_path, keys="position")) == [*ITEMS, 50]


def test_the_keys_of_a_shared_dataset_are_positions(tmp_path: Path) -> None:
    with tc.SharedDataset(ITEMS, "before", directory=tmp_path) as shared:
        build(shared, tmp_path / "a").close()
    with (
        tc.SharedDataset([99, *ITEMS], "after", directory=tmp_path) as shared,
        pytest.raises(tc.StaleCacheError, match="item 0 is not the one"),
    ):
        build(shared, tmp_path / "a")
    with tc.ShardWriter(tmp_path / "other.tar") as writer:
        for i in range(COUNT):
            writer.write(f"{i}", {"y": i})
    dicts = [{"item": item} for item in ITEMS]

    def encode_joined(samples: list[Any]) -> list[Any]:
        return encode([sample["s"]["item"] for sample in samples])

    for name, source in (("one", dicts), ("two", [{"item": 99}, *dicts[1:]])):
        with tc.SharedDataset(source, name, directory=tmp_path) as shared, tc.open(tmp_path / "other.tar") as other:
            joined = tc.join({"s": shared, "other": other})
            if name == "one":
                build(joined, tmp_path / "joined", encode_joined).close()
                continue
            with pytest.raises(tc.StaleCacheError, match="item 0 is not the one"):
                build(joined, tmp_path / "joined", encode_joined)
    named = [{"__key__": "b", "x": 1}, {"__key__": "a", "x": 2}]
    with tc.SharedDataset(named, "named", directory=tmp_path) as shared:
        built = build(shared, tmp_path / "b", lambda items: [{"x": item["x"]} for item in items])
    assert list(built.keys()) == ["b", "a"]


def test_a_build_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Shards whose indexes another tool has written have no digests."""
    build(ITEMS, tmp_path / "a").close()
    for shard in sorted((tmp_path / "a").glob("*.tar")):
        end = tc.write_index(shutil.copy(shard, tmp_path / "x.tar")).end
        shard.write_bytes(shard.read_bytes()[: end + 1024])
        tc.write_index(shard)
    with pytest.warns(UserWarning, match=r"items 0, 1, 2, … \(50 of 50 compared\).*written without digests") as seen:
        assert values(build([*ITEMS, 50], tmp_path / "a")) == [*ITEMS, 50]
    assert len(seen) == 1
    with pytest.raises(tc.StaleCacheError, match="item 50 is not the one .* of 51 items compared, 1 differ"):
        build([*ITEMS, 99], tmp_path / "a")


@pytest.mark.parametrize("tool", ["drop", "reshard", "repair"])
def test_tools_keep_digests(tmp_path: Path, tool: str) -> None:
    build(ITEMS, tmp_path / "a").close()
    if tool == "drop":
        tc.drop(tmp_path / "a", tmp_path / "b", ["000000007", "000000030"])
    elif tool == "reshard":
        tc.reshard(tmp_path / "a", tmp_path / "b", max_samples=7)
    else:
        tc.repair(tmp_path / "a", tmp_path / "b")
    assert values(build(ITEMS, tmp_path / "b")) == ITEMS
    with pytest.raises(tc.StaleCacheError, match="is not the one"):
        build([99, *ITEMS], tmp_path / "b")


def test_items_with_keys_may_move(tmp_path: Path) -> None:
    items = [{"__key__": f"own{i}", "i": i} for i in range(COUNT)]

    def fn(batch: list[Any]) -> list[Any]:
        return encode([item["i"] for item in batch])

    for source in (items, items[::-1], items[:40], Indexed(items[::-1]), Iterated(items[::-1])):
        build(source, tmp_path, fn).close()
    assert b"items.digest" not in (tmp_path / "000000.tar").read_bytes()
    with tc.open(tmp_path) as cache:  # the keys of a cache are its own
        out = tmp_path / "copy"
        build(cache, out, lambda batch: [tc.realize(sample) for sample in batch]).close()
        build(cache[[3, 1]], out, lambda batch: [tc.realize(sample) for sample in batch]).close()


def test_an_earlier_key_is_the_same_item(tmp_path: Path) -> None:
    """Earlier versions of `safe_key` hashed names whose keys have more than 80 characters."""
    names = ["ф" * 14, "b"]
    earlier = ["%D1%84%D1%84%D1%84%D1%84%D1%84%D1%84%D%-477429253d40702cdbd2c935c227bc5ead08eeff", "b"]
    build([1, 2], tmp_path / "a", keys=earlier).close()
    now = list(map(tc.safe_key, names))
    assert now[0] != earlier[0]
    assert list(build([1, 2], tmp_path / "a", keys=now).keys()) == earlier
    assert list(build([1, 2], tmp_path / "b", keys=now, reuse=tmp_path / "a").keys()) == earlier


# values that must have different digests
DIFFERENT: list[Any] = [
    None, True, False, 0, 1, -1, 255, 256, 10**5000, 1.0, 0.0, -0.0, "", "a", "0", b"", b"a", "\ud800", [], (), {}, [1], (1,),
    [[1], 2], [[1, 2]], [1, 2], {1: 2}, {2: 1}, {"a": None}, ["a", "b"], ["ab", ""], ["ab"], np.zeros(3), np.zeros((3, 1)),
    np.zeros(3, np.float32), np.zeros((0, 2)), np.zeros((2, 0)), np.float64(0), np.bool_(True), np.array(["ab"]),
    np.array(1, "M8[s]"), np.zeros(3, ">f8"), torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(()),
    torch.zeros(2, 0), torch.tensor(True), torch.zeros(4, dtype=torch.float8_e4m3fn), torch.zeros(3, dtype=torch.complex64),
    PurePosixPath("a"), Path("/"), Path(__file__), __file__,
]  # fmt: skip


def constant(items: list[Any]) -> list[Any]:
    return [{"x": 1} for _ in items]


def test_different_values_have_different_digests(tmp_path: Path) -> None:
    build(DIFFERENT, tmp_path, constant).close()
    count = len(DIFFERENT)
    for shift in range(1, count):
        with pytest.raises(tc.StaleCacheError, match=f"of {count} items compared, {count} differ"):
            build(DIFFERENT[shift:] + DIFFERENT[:shift], tmp_path)
    build(DIFFERENT, tmp_path, constant).close()


def test_equal_values_have_equal_digests(tmp_path: Path) -> None:
    tensor, array, path = torch.rand(4, 6), np.random.default_rng(0).random((4, 6)), tmp_path / "a.jpg"
    path.write_bytes(b"12")
    items = [tensor.t(), array[::2, ::3], torch.nn.Parameter(tensor), {"path": path}, tensor[0, ::2][:1]]
    build(items, tmp_path / "a", constant).close()
    os.utime(path, (1, 1))
    build([tensor.t().contiguous(), array[::2, ::3].copy(), tensor, items[3], tensor[0, :1]], tmp_path / "a").close()
    path.write_bytes(b"123")
    with pytest.raises(tc.StaleCacheError, match="of 5 items compared, 1 differ"):
        build(items, tmp_path / "a")


class Text(str):
    __slots__ = ()


def test_other_values_have_no_digest(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    items = [object(), Text("a"), [1, object()], np.array([object()]), torch.zeros(3).to_sparse(), {1, 2}, range(3)]
    items += [tmp_path / "gone.png"]
    build([*items, endless], tmp_path, constant).close()
    with pytest.warns(UserWarning, match=r"items 0, 1, 2, … \(9 of 9 compared\)"):
        build([*items, endless], tmp_path).close()


def test_none_is_no_sample(tmp_path: Path) -> None:
    def fn(batch: list[Any]) -> list[Any]:
        return [None if item == 13 else {"x": torch.tensor(item)} for item in batch]

    with pytest.raises(ValueError, match=r"fn returned None for item 13 \(key '000000013'\).*leave such items out"):
        build(ITEMS, tmp_path, fn)
    assert values(tc.open(tmp_path)) == list(range(8))


def test_another_dtype_or_rank_warns_once(tmp_path: Path) -> None:
    def fn(batch: list[Any]) -> list[Any]:
        return [
            {"x": torch.zeros(item % 5, dtype=torch.float16 if item in (5, 6, 30) else torch.float32),
             "y": np.zeros((2,) * (1 + (item == 20))), "z": torch.tensor(True)}
            for item in batch
        ]  # fmt: skip

    with pytest.warns(UserWarning, match="tensor '[xy]' is F") as seen:
        build(range(30), tmp_path, fn).close()
    texts = [str(each.message) for each in seen]
    assert len(texts) == 2
    assert "sample '000000005': tensor 'x' is F16 with 1 dimension, but F32 with 1 dimension in earlier" in texts[0]
    assert "sample '000000020': tensor 'y' is F64 with 2 dimensions, but F64 with 1 dimension in earlier" in texts[1]
    with pytest.warns(UserWarning, match="sample '000000030': tensor 'x' is F16") as seen:  # also after a resume
        build(range(32), tmp_path, fn).close()
    assert len(seen) == 1


def build_rank(out: Path, rank: int, source: Any = ITEMS, fn: Any = encode, **options: Any) -> Any:
    return build(source, out, fn, **{"rank": rank, "world_size": 2, "batch_size": 4} | options)


def keyed(item: int) -> str:
    return f"n{item}"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("list", None), ("list", "position"), ("list", keyed), ("iterable", None)],
    ids=["numbers", "position", "function", "iterable"],
)
def test_other_batch_sizes(tmp_path: Path, kind: str, keys: Any) -> None:
    """Neither rank computes some of the items; one process then computes them."""
    source = SOURCES[kind](ITEMS)
    build_rank(tmp_path, 0, source, keys=keys).close()
    for _ in range(2):  # also if the rank is called again
        with pytest.raises(ValueError, match=r"r0of2-000000\.tar .*'(000000|n)\d+'.*batch_size.*world_size=1"):
            build_rank(tmp_path, 1, source, keys=keys, batch_size=6)
    assert len(tc.open(tmp_path)) == 38
    build_rank(tmp_path, 0, source, keys=keys, world_size=1).close()
    assert sorted(values(tc.open(tmp_path))) == ITEMS
    for rank in range(2):  # nothing is missing any more
        build_rank(tmp_path, rank, source, keys=keys).close()


@pytest.mark.parametrize("kind", [Indexed, iter])
def test_another_order(tmp_path: Path, kind: Any) -> None:
    build_rank(tmp_path, 0, kind(ITEMS)).close()
    match = r"item \d+ is not the one .*r0of2-000000\.tar.*same items in the same order"
    with pytest.raises(tc.StaleCacheError, match=match):
        build_rank(tmp_path, 1, kind(ITEMS[::-1]))
    if kind is Indexed:  # an iterable is compared at its end
        build_rank(tmp_path, 1, Indexed(ITEMS)).close()
        assert values(tc.open(tmp_path)) == ITEMS


@pytest.mark.parametrize(
    ("other", "error", "match"),
    [
        ({"source": ITEMS[::-1]}, tc.StaleCacheError, "r0of2-000000.*same items in the same order"),
        ({"source": iter(ITEMS[::-1])}, tc.StaleCacheError, "r0of2-000000.*same items in the same order"),
        ({"batch_size": 6}, ValueError, "r0of2-000000.*batch_size"),
    ],
    ids=["order", "order of an iterable", "batch size"],
)
def test_at_the_same_time(tmp_path: Path, other: dict[str, Any], error: Any, match: str) -> None:
    """Rank 0 begins and ends while rank 1 computes."""
    done = []

    def meanwhile(items: list[Any]) -> Any:
        if not done:
            done.append(finish([start(lambda: build_rank(tmp_path, 0))]))
        return encode(items)

    with pytest.raises(error, match=match):
        build_rank(tmp_path, 1, fn=meanwhile, **other)
    assert done == [[0]]


class Random(Indexed):
    """A source that returns other values each time it is read, as with random crops."""

    def __getitem__(self, i: int) -> Any:
        return torch.rand(2), super().__getitem__(i)


def test_random_values_show_nothing_of_other_ranks(tmp_path: Path) -> None:
    def fn(items: list[Any]) -> Any:
        return encode([item for _, item in items])

    for rank in range(2):
        build_rank(tmp_path, rank, Random(ITEMS), fn).close()
    assert sorted(values(tc.open(tmp_path))) == ITEMS
    with pytest.warns(UserWarning, match="nothing shows whether items"):
        build_rank(tmp_path, 0, Random(ITEMS), fn).close()


@pytest.mark.parametrize("batch_sizes", [(4, 6), (6, 4)], ids=str)
def test_another_batch_size_after_an_error(tmp_path: Path, batch_sizes: tuple[int, int]) -> None:
    """For example after the memory of a GPU was too small: both ranks continue with the other batch size."""

    def failing(items: list[Any]) -> Any:
        if ITEMS[24] < items[0]:
            raise MemoryError
        return encode(items)

    for rank in range(2):
        with pytest.raises(MemoryError):
            build_rank(tmp_path, rank, fn=failing, batch_size=batch_sizes[0])
    for rank in range(2):
        build_rank(tmp_path, rank, batch_size=batch_sizes[1]).close()
    assert values(tc.open(tmp_path)) == ITEMS
