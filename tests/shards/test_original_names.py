"""Original names: in the key as far as a tar allows, else in the index, through all tools that rewrite shards."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.shards.footers import forge

NAMES = ["a", "фжц/цю щъ ызжщ юя жж", "\udcff" * 40, "b (1)", "写真" * 30, "x" * 89]


def write(folder: Path, names: list[str] = NAMES, **options: Any) -> Path:
    with tc.ShardWriter(folder, fsync=False, **options) as sink:
        for number, name in enumerate(names):
            sink.write(tc.safe_key(name), {"x": torch.tensor(number)})
    return folder


def names_in(folder: Path) -> list[str]:
    with tc.open(folder) as cache:
        return [cache.original_name(key) for key in list(cache.keys())]


def test_keys_hold_as_much_as_a_tar_allows() -> None:
    for name in ("ф" * 14, "a" * 88, "写" * 9):
        assert tc.original_name("".join(tc.safe_key(name))) == name
    key = "".join(tc.safe_key("ф" * 15))
    assert len(key) == 80
    with pytest.raises(tc.InvalidKeyError, match="`original_name` of its cache may know the name"):
        tc.original_name(key)


def test_a_cache_knows_the_names(tmp_path: Path) -> None:
    assert names_in(write(tmp_path, max_samples=2)) == NAMES
    with tc.open(tmp_path) as cache:
        for name in NAMES:
            assert cache.original_name(tc.safe_key(name)) == name
        view = cache.select("x")[[4, 1]]
        assert view.original_name(view.keys()[0]) == NAMES[4]
        with pytest.raises(KeyError, match="no sample"):
            view.original_name("a")
        joined = tc.join({"m": cache, "n": cache})
        assert joined.original_name(joined.keys()[1]) == NAMES[1]


def test_keys_of_another_origin_have_no_name(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path) as sink:
        sink.write("a%zz", {"x": 1})
    with tc.open(tmp_path) as cache, pytest.raises(tc.InvalidKeyError, match="was not made by"):
        cache.original_name("a%zz")


def test_keys_carry_names_to_other_processes() -> None:
    key = tc.safe_key("写真" * 30)
    assert tc.original_name(pickle.loads(pickle.dumps(key))) == "写真" * 30


def test_build_keeps_names(tmp_path: Path) -> None:
    items = [{"name": name} for name in NAMES]
    tc.build(items, lambda batch: [{"x": 1}] * len(batch), tmp_path, fingerprint={}, num_workers=1,
             keys=lambda item: tc.safe_key(item["name"]))  # fmt: skip
    assert names_in(tmp_path) == NAMES


def test_keys_of_a_cache_carry_names(tmp_path: Path) -> None:
    with tc.open(write(tmp_path / "a", max_samples=2)) as cache:
        assert [tc.original_name(key) for key in list(cache.keys())] == NAMES
        assert [tc.original_name(cache.keys()[i]) for i in range(len(NAMES))] == NAMES
        assert [tc.original_name(key) for key in list(cache[::-1].keys())] == NAMES[::-1]
        with tc.ShardWriter(tmp_path / "b") as sink:
            for key in list(cache.keys()):
                sink.write(key, {"x": 1})
        tc.build(cache, lambda samples: [{"x": 1}] * len(samples), tmp_path / "c", fingerprint={})
    assert names_in(tmp_path / "b") == names_in(tmp_path / "c") == NAMES


def drop(source: Path, out: Path) -> None:
    tc.drop(source, out, ["a"])


def write_index(source: Path, out: Path) -> None:
    out.mkdir()
    for shard in source.glob("*.tar"):
        (out / shard.name).write_bytes(shard.read_bytes())
        tc.write_index(out / shard.name)


TOOLS: dict[str, Callable[[Path, Path], object]] = {
    "reshard": lambda source, out: tc.reshard(source, out, max_samples=4),
    "drop": drop,
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
    with tc.ShardWriter(tmp_path) as sink:
        sink.write(quote(name)[:38] + "%-" + sha256(name.encode()).hexdigest()[:40], {"x": torch.tensor(5)})
    with tc.open(tmp_path) as cache:
        assert cache[tc.safe_key(name)]["x"].load() == 5
        assert tc.safe_key(name) in cache
        assert "a" * 84 not in cache
    with tc.ShardWriter(tmp_path, resume=True) as sink:
        sink.write(tc.safe_key(name), {"x": torch.tensor(6)})
    assert len(tc.open(tmp_path)) == 1


def test_stock_tools_read_the_longest_keys(tmp_path: Path) -> None:
    write(tmp_path, ["a" * 88])
    with tarfile.open(tmp_path / "000000.tar") as archive:
        assert archive.getnames() == ["a" * 88 + ".skel.pyd", "a" * 88 + ".safetensors"]


U8 = np.uint8
FORGED: dict[str, dict[str, Any]] = {
    "row beyond the samples": {"originals.rows": np.array([1, 2, 4, 6], U8)},
    "row twice": {"originals.rows": np.array([1, 2, 2, 5], U8)},
    "ends that descend": {"originals.ends": np.array([30, 20, 90, 255], U8)},
    "huge end": {"originals.ends": np.array([1, 2, 3, 1 << 63], np.uint64)},
    "text that is too long": {"originals.text": np.zeros(10_000, U8)},
    "fewer ends than rows": {"originals.ends": np.array([1, 2], U8)},
    "too few digests": {"items.digest": np.ones(3, np.uint64)},
    "digests of another width": {"items.digest": np.ones(6, np.uint32)},
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
    faults = [str(fault) for fault in tc.verify(tmp_path / "c").faults]
    assert len(faults) == 1
    assert "not UTF-8" in faults[0]
    tc.repair(tmp_path / "c", tmp_path / "repaired")
    assert tc.verify(tmp_path / "repaired").ok
    with tc.open(tmp_path / "repaired") as cache:
        assert [int(sample["x"].load()) for sample in cache] == list(range(len(NAMES)))
