"""How a cache was made is kept with it, and compared with what its reader expects."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc

MADE: dict[str, Any] = {"model": "vae", "revision": "a1b2", "scale": 0.18215, "crop": [256, 256], "dtype": "bfloat16"}


def write(folder: Path, fingerprint: Any = MADE, name: str = "%d.tar", **options: Any) -> Path:
    with tc.ShardWriter(folder / name, max_samples=2, fsync=False, fingerprint=fingerprint, **options) as sink:
        for i in range(5):
            sink.write(str(i), {"x": torch.full((3,), i)})
    return folder


@pytest.mark.parametrize("lost", [[], ["manifest.json"]], ids=["with a manifest", "without"])
def test_what_is_expected(tmp_path: Path, lost: list[str]) -> None:
    write(tmp_path)
    for name in lost:
        (tmp_path / name).unlink()
    for expect in ({}, {"model": "vae"}, MADE, {"crop": (256, 256)}):
        cache = tc.open(tmp_path, expect=expect)
        assert cache.fingerprint == MADE
        for other in (pickle.loads(pickle.dumps(cache)), copy.copy(cache), cache[1:3], cache.select(["x"])):
            assert other.fingerprint == MADE
    for expect, message in (
        ({"revision": "c3"}, r"0\.tar: expected revision='c3', but the cache was made with 'a1b2'"),
        ({"scale": 1}, r"expected scale=1, but the cache was made with 0\.18215"),
        ({"vocabulary": 5}, "expected vocabulary=5, but the cache has no such field"),
        ({"model": "vae", "crop": [256]}, r"expected crop=\[256\]"),
    ):
        with pytest.raises(tc.StaleCacheError, match=message):
            tc.open(tmp_path, expect=expect)


def test_shards_that_say_nothing(tmp_path: Path) -> None:
    write(tmp_path, None)
    assert tc.open(tmp_path).fingerprint == {}
    with pytest.raises(tc.StaleCacheError, match=r"0\.tar: the cache has no fingerprint"):
        tc.open(tmp_path, expect={"model": "vae"})
    assert "fingerprints" not in json.loads((tmp_path / "manifest.json").read_text())["tensorcache"]


def test_shards_without_a_footer(tmp_path: Path) -> None:
    write(tmp_path, footer=False)
    assert tc.open(tmp_path, expect=MADE).fingerprint == MADE
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(tc.StaleCacheError, match="has no fingerprint"):
        tc.open(tmp_path, expect=MADE)


def test_shards_that_differ(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, {**MADE, "revision": "c3"}, "other-%d.tar")
    assert tc.open(tmp_path).fingerprint == {name: value for name, value in MADE.items() if name != "revision"}
    with pytest.raises(tc.StaleCacheError, match=r"other-0\.tar: expected revision='a1b2', but .* 'c3'"):
        tc.open(tmp_path, expect=MADE)


def test_writers_that_go_on(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, resume=True)
    for other in ({**MADE, "revision": "c3"}, {**MADE, "more": 1}, {"model": "vae"}, {}, None):
        with pytest.raises(tc.StaleCacheError):
            tc.ShardWriter(tmp_path / "%d.tar", fingerprint=other, resume=True)
    write(tmp_path, {**MADE, "revision": "c3"}, overwrite=True)
    assert tc.open(tmp_path).fingerprint["revision"] == "c3"


@pytest.mark.parametrize(
    "wrong", [[1], "vae", {1: 2}, {"x": float("nan")}, {"x": {1, 2}}, {"x": torch.ones(1)}], ids=str
)
def test_what_is_no_fingerprint(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError if "nan" in str(wrong) else TypeError, match="fingerprint"):
        tc.ShardWriter(tmp_path / "%d.tar", fingerprint=wrong)


def test_a_manifest_that_says_nonsense(tmp_path: Path) -> None:
    manifest = write(tmp_path) / "manifest.json"
    document = json.loads(manifest.read_text())
    for wrong in (5, {"0.tar": [1]}):
        document["tensorcache"]["fingerprints"] = wrong
        manifest.write_text(json.dumps(document))
        with pytest.raises(tc.FormatError if wrong != 5 else tc.StaleCacheError):
            tc.open(tmp_path, expect=MADE)
