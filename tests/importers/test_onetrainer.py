"""Caches of OneTrainer, written as the DiskCache of mgds writes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.importers.folders import Gadget, imported, save
from tests.same import assert_same


def group_key(*names: Any) -> str:
    text = json.dumps(list(names), sort_keys=True, ensure_ascii=True, separators=(",", ":"), indent=None)
    return hashlib.sha256(text.encode()).hexdigest()


def write_variation(cache: Path, kind: str, concept: str, number: int, items: list[Any], aggregate: list[Any]) -> Path:
    """Write the files of one variation; return its folder."""
    folder = cache / kind / group_key(concept, 7, False, {"kind": kind}) / f"variation-{number}"
    for at, item in enumerate(items):
        save(item, folder / f"{at}.pt")
    save(aggregate, folder / "aggregate.pt")
    return folder


def image_item(i: int) -> dict[str, Any]:
    return {"latent_image": torch.randn(16, 4 + i, 6).bfloat16(), "crop_offset": (0, i)}


def image_entry(concept: str, i: int) -> dict[str, Any]:
    return {"crop_resolution": (512, 768), "image_path": f"{concept}/sub/photo {i}.png"}


def text_item(i: int) -> dict[str, Any]:
    return {"tokens_1": torch.arange(77) + i, "text_encoder_2_hidden_state": torch.randn(5 + i, 32).half()}


def write_concept(cache: Path, concept: str, count: int, num_texts: int = 1) -> list[dict[str, Any]]:
    """Write the cache of a concept; return its samples, with a list of all variations of the text."""
    aggregate = [image_entry(concept, i) for i in range(count)]
    images = [image_item(i) for i in range(count)]
    write_variation(cache, "image", concept, 0, images, aggregate)
    texts = [[text_item(i) for i in range(count)] for _ in range(num_texts)]
    for number, items in enumerate(texts):
        write_variation(cache, "text", concept, number, items, [{} for _ in items])
    return [{"image": {**images[i], **aggregate[i]}, "text": [each[i] for each in texts]} for i in range(count)]


def test_images_and_texts_are_joined(tmp_path: Path) -> None:
    expected = write_concept(tmp_path / "in", "/data/cats", 3)
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.ok, report.unused) == ("onetrainer", True, [])
    assert list(found) == ["photo 0", "photo 1", "photo 2"]
    for i, sample in enumerate(expected):
        assert_same({"image": sample["image"], "text": sample["text"][0]}, found[f"photo {i}"])
    images, texts = (group_key("/data/cats", 7, False, {"kind": kind}) for kind in ("image", "text"))
    assert report.fingerprint["joined"] == {f"image/{images}": f"text/{texts}"}


def test_several_concepts_and_variations(tmp_path: Path) -> None:
    cats = write_concept(tmp_path / "in", "/data/cats", 3, num_texts=3)
    dogs = write_concept(tmp_path / "in", "/data/dogs", 2, num_texts=1)
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.ok, report.num_written) == (True, 5)
    for concept, samples in (("cats", cats), ("dogs", dogs)):
        for i, sample in enumerate(samples):
            assert_same({"image": sample["image"], "text": sample["text"]}, found[f"{concept}/sub/photo {i}"])


def test_ambiguous_concepts_are_not_joined(tmp_path: Path) -> None:
    cats = write_concept(tmp_path / "in", "/data/cats", 2)
    dogs = write_concept(tmp_path / "in", "/data/dogs", 2)
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert report.ok
    assert report.fingerprint["joined"] == {}
    assert len(found) == 8
    for concept, samples in (("cats", cats), ("dogs", dogs)):
        text = group_key(f"/data/{concept}", 7, False, {"kind": "text"})
        for i, sample in enumerate(samples):
            assert_same({"image": sample["image"]}, found[f"{concept}/sub/photo {i}"])
            assert_same({"text": sample["text"][0]}, found[f"text/{text}/{i}"])


def test_two_concepts_with_the_same_images(tmp_path: Path) -> None:
    """Other settings of one folder make another group; the same path of two suffixes is not lost either."""
    folder = tmp_path / "in"
    items = [image_item(i) for i in range(3)]
    paths = ["C:\\data\\a.png", "C:\\data\\a.jpg", "C:\\data\\b.jpg"]
    for concept in ("1", "2"):
        write_variation(folder, "image", concept, 0, items, [{"image_path": path} for path in paths])
    found, report = imported(folder, tmp_path / "out")
    assert report.ok
    assert sorted(found) == ["a.jpg", "a.jpg~2", "a.png", "a.png~2", "b", "b~2"]
    assert_same({"image": {**items[1], "image_path": paths[1]}}, found["a.jpg~2"])


def test_unfinished_and_foreign_variations(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    items, aggregate = [image_item(i) for i in range(2)], [image_entry("/c", i) for i in range(2)]
    first = write_variation(folder, "image", "c", 0, [*items, image_item(2)], aggregate)
    write_variation(folder, "image", "c", 1, items, aggregate[::-1])
    (write_variation(folder, "image", "c", 2, items, aggregate) / "aggregate.pt").unlink()
    with pytest.raises(tc.FormatError):
        tc.import_cache(folder, tmp_path / "stopped")
    found, report = imported(folder, tmp_path / "out", on_error="skip")
    for i in range(2):
        assert_same({"image": {**items[i], **aggregate[i]}}, found[f"photo {i}"])
    assert len(found) == 2
    group = first.parent.relative_to(folder).as_posix()
    what = {each.name.removeprefix(f"{group}/"): each.what for each in report.skipped}
    assert "only 2 entries" in what.pop("variation-0/2.pt")
    assert all("from other files" in what.pop(f"variation-1/{name}.pt") for name in ("0", "1", "aggregate"))
    assert all("caching was interrupted" in what.pop(f"variation-2/{name}.pt") for name in ("0", "1"))
    assert not what


def test_resume_after_a_file_was_deleted(tmp_path: Path) -> None:
    write_concept(tmp_path / "in", "/data/cats", 2)
    tc.import_cache(tmp_path / "in", tmp_path / "out")
    next((tmp_path / "in" / "image").rglob("1.pt")).unlink()
    assert tc.import_cache(tmp_path / "in", tmp_path / "out", resume=True).changed == ["photo 1"]


def test_bad_files_are_named(tmp_path: Path) -> None:
    items: list[Any] = [image_item(0), [1], image_item(2), image_item(3)]
    folder = write_variation(tmp_path / "in", "image", "c", 0, items, [image_entry("/c", i) for i in range(4)])
    (folder / "0.pt").unlink()
    (folder / "2.pt").write_bytes(b"hello")
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert list(found) == ["photo 3"]
    what = {each.name: each.what for each in report.skipped}
    for i, word in enumerate(["is missing", "expected a dict", "expected a zip"]):
        assert word in what[f"photo {i}"]
        assert f"variation-0/{i}.pt" in what[f"photo {i}"]
    for content, word in (([Gadget()], "--trust"), ([1], "not a list of dicts")):
        save(content, folder / "aggregate.pt")
        with pytest.raises(ValueError, match=f"has no samples.*{word}"):
            tc.import_cache(tmp_path / "in", tmp_path / "none", on_error="skip")
