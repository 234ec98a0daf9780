"""Members besides caches come as their bytes in the shard."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.shards.tars import raw_header

COUNT = 11


def members_of(i: int) -> dict[str, bytes]:
    found = {"json": b'{"label": %d}' % i, "meta.raw": bytes(range(i))}
    return found | ({"jpg": bytes([i]) * 2000} if i % 3 == 1 else {})


@pytest.fixture(scope="module", params=["ours", "webdataset", "capitals"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "ours":
        write(path / "%d.tar", {f"k{i}": {"x": torch.tensor([i])} for i in range(COUNT)}, members_of, max_samples=4)
    else:
        with wds.ShardWriter(str(path / "%d.tar"), maxcount=4, encoder=tc.encoder(), verbose=0) as sink:
            for i in range(COUNT):
                members = {k.upper() if request.param == "capitals" else k: v for k, v in members_of(i).items()}
                sink.write({"__key__": f"k{i}", "tensorcache": {"x": torch.tensor([i])}, **members})
    return path


def test_members(folder: Path) -> None:
    with tc.open(folder) as cache:
        assert cache.members == {"json": COUNT, "meta.raw": COUNT, "jpg": 4}
        for numbers in (range(COUNT), [7, 3, 3, -1], torch.tensor([2, 10]), []):
            for suffix in ("json", "meta.raw", ".JSON"):
                expected = [members_of(int(i) % COUNT)[suffix.lower().strip(".")] for i in numbers]
                assert cache.read_members(numbers, suffix) == expected
        assert json.loads(cache.read_members(["k5"], "json")[0]) == {"label": 5}
        assert cache.read_members([1, 10, "k4"], "jpg") == [members_of(i)["jpg"] for i in (1, 10, 4)]
        view = pickle.loads(pickle.dumps(cache[::-1])).filter(lambda entry: entry.key in ("k2", "k4"))
        assert view.members == {"json": 2, "meta.raw": 2, "jpg": 1}
        assert view.read_members([0, 1], "meta.raw") == [bytes(range(4)), bytes(range(2))]
        assert cache.select([]).read_members([3], "json") == [members_of(3)["json"]]


def test_missing_members_and_samples_are_named(folder: Path) -> None:
    with tc.open(folder) as cache:
        known = "there are .*'json'.*'meta.raw'"
        for suffix, rows, has in (("jpg", [1, 2], "4 samples have one"), ("png", [2], known), ("skel.pyd", [2], known)):
            with pytest.raises(KeyError, match=f"sample 'k2' has no member '{suffix}'; {has}"):
                cache.read_members(rows, suffix)
        with pytest.raises(IndexError):
            cache.read_members([COUNT], "json")
        with pytest.raises(KeyError):
            cache.read_members(["k11"], "json")


@pytest.mark.parametrize(
    ("raw", "suffix"),
    [(b"t\xffXT", "t\udcffxt"), ("Ä.TXT".encode(), "ä.txt"), ("İ".encode(), "i\u0307")],
    ids=["not UTF-8", "beyond ASCII", "longer in lower case"],
)
@pytest.mark.parametrize("index", ["none", "beside"])
def test_suffixes_of_other_writers(tmp_path: Path, raw: bytes, suffix: str, index: str) -> None:
    names = [b"k.S\xe2\x84\xaael.pyd", b"k.safetensors", b"k." + raw]  # with a Kelvin sign, a `k` in lower case
    members = zip(names, (*tc.encode_sample({"x": torch.tensor([3])}), b"content"), strict=True)
    parts = [raw_header(name, b"0", b"%011o" % len(c)) + c + bytes(-len(c) % 512) for name, c in members]
    path = tmp_path / "0.tar"
    path.write_bytes(b"".join(parts) + bytes(1024))
    if index != "none":
        tc.write_index(path)
    with tc.open(path) as cache:
        assert cache.members == {suffix: 1}
        assert cache.read_members(["k"], suffix) == [b"content"]
        assert cache[0]["x"].load().item() == 3
    assert tc.verify(path).ok


def test_a_cache_of_the_first_samples_of_a_long_shard(tmp_path: Path) -> None:
    """The index has the rows of this cache in one byte each, and the rows of the members in two."""
    with tc.ShardWriter(tmp_path, fsync=False) as sink:
        for i in range(258):
            named = {"first.tensorcache": {"x": torch.tensor([i])}} if i < 200 else {}
            members = {"json": i} if i % 3 else {}
            sink.write(str(i), {"y": torch.tensor([i])}, **named, **members)
    with tc.open(tmp_path, cache="first") as cache:
        assert cache.members == {"json": 133}
        assert cache.read_members([1, 199], "json") == [b"1", b"199"]


def test_joined(folder: Path, tmp_path: Path) -> None:
    """A member comes from the first cache that has it for the sample."""
    with tc.ShardWriter(tmp_path / "%d.tar", fsync=False) as sink:
        for i in reversed(range(COUNT)):
            more = {"txt": str(i)} if i % 2 else {}
            sink.write(f"k{i}", {"y": torch.tensor([i])}, json={"other": i}, png=b"p", **more)
    with tc.join([folder, tmp_path]) as cache:
        assert cache.num_shards == 4
        assert cache.members == {"json": COUNT, "meta.raw": COUNT, "jpg": 4, "png": COUNT, "txt": COUNT // 2}
        assert cache.read_members([3, "k7"], "TXT") == [b"3", b"7"]
        assert cache.read_members([2, "k7"], "json") == [members_of(2)["json"], members_of(7)["json"]]
        assert cache.filter(lambda entry: entry.key != "k0").read_members([0], "txt") == [b"1"]
        assert cache[["k3", "k1"]].read_members([0, 1], "txt") == [b"3", b"1"]
        with pytest.raises(KeyError, match="sample 'k4' has no member 'txt'"):
            cache.read_members([4], "txt")
        with pytest.raises(TypeError):
            cache.read_members("01", "txt")
