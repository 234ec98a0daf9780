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
from tests.reading.batches import write as write_samples
from tests.shards.damage import change_manifest

MADE: dict[str, Any] = {"model": "vae", "revision": "a1b2", "scale": 0.18215, "crop": [256, 256], "dtype": "bfloat16"}
OTHER = {**MADE, "revision": "c3"}


def write(folder: Path, fingerprint: Any = MADE, name: str = "%d.tar", **options: Any) -> Path:
    samples = {str(i): {"x": torch.full((3,), i)} for i in range(5)}
    write_samples(folder / name, samples, max_samples=2, fingerprint=fingerprint, **options)
    return folder


@pytest.mark.parametrize("has_manifest", [True, False])
def test_what_is_expected(tmp_path: Path, has_manifest: bool) -> None:
    write(tmp_path, manifest=has_manifest)
    for expect in ({}, {"model": "vae"}, MADE, {"crop": (256, 256)}):
        cache = tc.open(tmp_path, expect=expect)
        for view in (cache, pickle.loads(pickle.dumps(cache)), copy.copy(cache), cache[1:3], cache.select(["x"])):
            assert view.fingerprint == MADE
    for expect, message in (
        ({"revision": "c3"}, r"0\.tar: expected revision='c3', but the cache was made with 'a1b2'"),
        ({"scale": 1}, r"expected scale=1, but the cache was made with 0\.18215"),
        ({"vocabulary": 5}, "expected vocabulary=5, but the cache has no such field"),
        ({"model": "vae", "crop": [256]}, r"expected crop=\[256\]"),
    ):
        with pytest.raises(tc.StaleCacheError, match=message):
            tc.open(tmp_path, expect=expect)


def test_shards_without_a_fingerprint(tmp_path: Path) -> None:
    write(tmp_path, None)
    assert tc.open(tmp_path).fingerprint == {}
    assert "fingerprints" not in json.loads((tmp_path / "manifest.json").read_text())["tensorcache"]
    write(tmp_path / "b", footer=False)
    assert tc.open(tmp_path / "b", expect=MADE).fingerprint == MADE
    (tmp_path / "b" / "manifest.json").unlink()
    for folder in (tmp_path, tmp_path / "b"):
        with pytest.raises(tc.StaleCacheError, match=r"0\.tar: the cache has no fingerprint"):
            tc.open(folder, expect={"model": "vae"})


def test_shards_that_differ(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, OTHER, "other-%d.tar")
    assert tc.open(tmp_path).fingerprint == {name: value for name, value in MADE.items() if name != "revision"}
    with pytest.raises(tc.StaleCacheError, match=r"other-0\.tar: expected revision='a1b2', but .* 'c3'"):
        tc.open(tmp_path, expect=MADE)
    for number, version in enumerate((1, True)):  # equal in Python, but not in JSON
        write(tmp_path / "both", {"version": version}, f"{number}-%d.tar")
    assert tc.open(tmp_path / "both").fingerprint == {}


def test_writers_that_resume(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, resume=True)
    for other in (OTHER, {**MADE, "more": 1}, {"model": "vae"}, {}, None):
        with pytest.raises(tc.StaleCacheError):
            tc.ShardWriter(tmp_path / "%d.tar", fingerprint=other, resume=True)
    write(tmp_path, OTHER, overwrite=True)
    assert tc.open(tmp_path).fingerprint["revision"] == "c3"


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), ([256, 0], [256, False]), ({"a": [1]}, {"a": [1.0]})])
def test_numbers_that_python_takes_for_equal(tmp_path: Path, one: Any, other: Any) -> None:
    """Readers, writers, builds and merges tell 1, 1.0 and true apart, as JSON does."""
    write(tmp_path / "in", {"model": "vae", "value": one}, "%06d.tar")
    made = {"model": "vae", "value": other}
    write(tmp_path / "other", made)
    for refused in (
        lambda: tc.open(tmp_path / "in", expect=made),
        lambda: tc.ShardWriter(tmp_path / "in", fingerprint=made, resume=True),
        lambda: tc.build(["0"], list, tmp_path / "in", fingerprint=made, keys=str),
        lambda: tc.build(["0"], list, tmp_path / "out", fingerprint=made, reuse=tmp_path / "in", keys=str),
        lambda: tc.merge([tmp_path / "in", tmp_path / "other"], tmp_path / "out", prefixes=["a/", "b/"]),
    ):
        with pytest.raises(tc.StaleCacheError, match="expected value="):
            refused()


@pytest.mark.parametrize("wrong", [[1], {1: 2}, {"x": float("nan")}, {"x": {1, 2}}], ids=str)
def test_what_is_no_fingerprint(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError if "nan" in str(wrong) else TypeError, match="fingerprint"):
        tc.ShardWriter(tmp_path / "%d.tar", fingerprint=wrong)


def test_a_manifest_with_other_values(tmp_path: Path) -> None:
    write(tmp_path)
    for wrong, error in ((5, tc.StaleCacheError), ({"0.tar": [1]}, tc.FormatError)):
        change_manifest(tmp_path, lambda document, wrong=wrong: document["tensorcache"].update(fingerprints=wrong))
        with pytest.raises(error):
            tc.open(tmp_path, expect=MADE)


@pytest.mark.parametrize("had_footer", [True, False])
@pytest.mark.parametrize("has_manifest", [True, False])
def test_write_index_keeps_fingerprints(tmp_path: Path, has_manifest: bool, had_footer: bool) -> None:
    path = tmp_path / "x.tar"
    footer = had_footer or not has_manifest
    write_samples(path, {"a": {"x": 1}}, fingerprint=MADE, footer=footer, manifest=has_manifest)
    for _ in range(2):
        assert tc.write_index(path).fingerprint == MADE
        for source in [path, tmp_path] if has_manifest else [path]:
            assert tc.open(source, expect=MADE).fingerprint == MADE
            assert tc.verify(source).ok
    if had_footer:  # an index whose digest fails is ignored; the manifest has the fingerprint, too
        content = path.read_bytes()
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
        Path(f"{path}.index").unlink()
        assert tc.write_index(path).fingerprint == (MADE if has_manifest else None)


def test_a_fingerprint_of_another_file_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    write_samples(path, {"a": {"x": 1}}, fingerprint=MADE, manifest=False)
    tc.write_index(path)
    (write(tmp_path / "other", None, footer=False) / "0.tar").rename(path)
    assert tc.write_index(path).fingerprint is None
