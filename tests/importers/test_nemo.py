"""Caches of NeMo Automodel, written as its preprocessing writes them."""

from __future__ import annotations

import json
import pickle
import shutil
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import run
from tests.importers.folders import assert_samples, imported, save
from tests.same import assert_same

MODEL = {"processor": "flux", "model_name": "black-forest-labs/FLUX.1-dev", "model_type": "flux"}


def flux_data(i: int) -> dict[str, Any]:
    return {
        "latent": torch.randn(16, 4 + i, 6).half(),
        "clip_tokens": torch.arange(77)[None],
        "prompt_embeds": torch.randn(1, 9, 32).bfloat16(),
        "bucket_resolution": (512, 256 * (1 + i % 2)),
        "prompt": f"photo {i}",
        "image_path": f"/data/{i}.jpg",
        "bucket_id": i,
    }


def write_cache(root: Path, count: int = 5, shard_size: int = 2, **options: Any) -> dict[str, Any]:
    """Write a cache of pictures with absolute paths; return the samples by name."""
    samples: dict[str, Any] = {}
    items = []
    for i in range(count):
        data = flux_data(i)
        size = "{}x{}".format(*data["bucket_resolution"])
        digest = md5("{}_{}".format(data["image_path"], size).encode()).hexdigest()
        name = f"{size}/{digest}"
        save(data, root / f"{name}.pt")
        more = {"aspect_ratio": 0.5 * (1 + i), "pixels": 1000 + i, "model_type": "flux"}
        item = {"cache_file": str(root / f"{name}.pt"), "bucket_resolution": list(data["bucket_resolution"])}
        items.append({**item, "prompt": data["prompt"], "image_path": data["image_path"], **more})
        samples[name] = {**data, **more}
    shards = []
    for at in range(0, count, shard_size):
        shards.append(f"metadata_shard_{at // shard_size:04d}.json")
        (root / shards[-1]).write_text(json.dumps(items[at : at + shard_size], indent=2))
    counts = {"total_items": count, "num_shards": len(shards), "shard_size": shard_size, "shards": shards}
    (root / "metadata.json").write_text(json.dumps({**MODEL, **options, **counts}, indent=2))
    return samples


def test_moved_caches(tmp_path: Path) -> None:
    """Two caches in one folder, whose absolute paths no longer exist."""
    expected = {}
    for name in ("one", "two/deep"):
        written = write_cache(tmp_path / "old" / name)
        expected |= {f"{name}/{key}": sample for key, sample in written.items()}
    (tmp_path / "old").rename(tmp_path / "in")
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.ok, report.unused) == ("nemo", True, [])
    assert_samples(expected, found)
    assert report.fingerprint["caches"] == {"one": MODEL, "two/deep": MODEL}


def test_edits_of_images(tmp_path: Path) -> None:
    """The files are in one folder, with relative paths; a file that is not listed is reported."""
    expected, items = {}, []
    for i in range(3):
        name = f"samples/sample_{i:08d}"
        data = {
            "target_latent": torch.randn(16, 1, 4, 4 + i).bfloat16(),
            "context_latents": [torch.randn(16, 1, 4, 6).bfloat16()] * i,
            "prompt_embeddings": torch.randn(5 + i, 8).bfloat16(),
            "metadata": {"original_ids": {"id": f"edit {i}", "row_index": i}},
        }
        save(data, tmp_path / "in" / f"{name}.pt")
        items.append({"cache_file": f"{name}.pt", "original_id": f"edit {i}", "row_index": i})
        expected[name] = {**data, "original_id": f"edit {i}", "row_index": i}
    (tmp_path / "in" / "metadata_shard_0000.json").write_text(json.dumps(items))
    described = {"dataset_name": "edits", "shards": ["metadata_shard_0000.json"]}
    (tmp_path / "in" / "metadata.json").write_text(json.dumps(described))
    samples, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.ok, report.unused) == ("nemo", True, [])
    assert_samples(expected, samples)
    assert report.fingerprint["dataset_name"] == "edits"
    save({}, tmp_path / "in" / "samples" / "sample_00000003.pt")
    with pytest.raises(tc.FormatError, match="is not listed"):
        tc.import_cache(tmp_path / "in", tmp_path / "again")


def video_data(i: int) -> dict[str, Any]:
    return {
        "video_latents": torch.randn(1, 16, 2, 4, 4 + i).bfloat16(),
        "first_frame": torch.randint(0, 255, (4, 4, 3), dtype=torch.uint8),
        "metadata": {"caption": f"clip {i}", "sizes": [1, 2]},
    }


def test_meta_files(tmp_path: Path) -> None:
    """Old ones are pickles, or their first frame is an array of numpy, whose pickle names functions of numpy."""
    expected = {name: video_data(i) for i, name in enumerate("abcd")}
    for name in "cd":
        expected[name]["first_frame"] = torch.arange(12, dtype=torch.uint8).view(2, 2, 3).numpy()
    for name in "abc":
        save(expected[name], tmp_path / "in" / f"{name}.meta")
    (tmp_path / "in" / "d.meta").write_bytes(pickle.dumps(expected["d"]))
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.ok) == ("nemo", True)
    assert_same(expected, found)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.meta").write_text("fileFormatVersion: 2")  # of another program
    with pytest.raises(ValueError, match="belongs to a known format"):
        tc.import_cache(tmp_path / "other", tmp_path / "none")


def test_files_out_of_the_folder_are_not_read(tmp_path: Path) -> None:
    expected = write_cache(tmp_path / "in", 2)
    secret = tmp_path / "secret.pt"
    torch.save({"latent": torch.ones(2)}, secret)
    paths = [str(secret), "../secret.pt", "/etc/passwd", "512x256/../../secret.pt", "", "metadata.json", 7, None]
    shard = tmp_path / "in" / "metadata_shard_0000.json"
    items = json.loads(shard.read_text())
    shard.write_text(json.dumps([*({"cache_file": path} for path in paths), *items, "text"]))
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert found.keys() == expected.keys()
    assert len(report.skipped) == len(paths) + 1
    assert all("is not in the folder" in each.what for each in report.skipped)
    assert "metadata_shard_0000.json, item 0" in {each.name for each in report.skipped}


def test_files_that_are_missing_or_not_listed(tmp_path: Path) -> None:
    expected = write_cache(tmp_path / "in")
    names = list(expected)
    (tmp_path / "in" / f"{names[0]}.pt").unlink()
    shutil.copy(tmp_path / "in" / f"{names[1]}.pt", tmp_path / "in" / "512x256" / "more.pt")
    (tmp_path / "in" / "metadata_shard_0001.json").unlink()
    torch.save([1], tmp_path / "in" / f"{names[4]}.pt")
    with pytest.raises(tc.FormatError):
        tc.import_cache(tmp_path / "in", tmp_path / "stopped")
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert found.keys() == {names[1]}
    assert {each.name for each in report.skipped} == {
        "metadata_shard_0000.json, item 0",
        "metadata_shard_0001.json",
        f"{names[2]}.pt",
        f"{names[3]}.pt",
        "512x256/more.pt",
        names[4],
    }
    assert report.skipped[-1].what == f"{names[4]}: {names[4]}.pt: contains list, expected a dict"


@pytest.mark.parametrize("content", ["", "[" * 100_000, "7", "\ud800", '{"shards": ["metadata.json"]}'])
def test_bad_json(tmp_path: Path, content: str) -> None:
    write_cache(tmp_path / "in")
    good = write_cache(tmp_path / "in" / "good")
    (tmp_path / "in" / "metadata.json").write_text(content, errors="surrogatepass")
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip", format="nemo")
    assert {f"good/{name}" for name in good} <= found.keys()
    assert "metadata.json" in {each.name for each in report.skipped}


def test_hostile_metadata(tmp_path: Path) -> None:
    """Metadata cannot change the format in the fingerprint, and deep nesting or NaN does not end the import."""
    deep = json.loads("[" * 900 + "]" * 900)
    expected = write_cache(tmp_path / "in", 2, format="kohya", source="elsewhere", loss=float("nan"), text="\ud800")
    shard = tmp_path / "in" / "metadata_shard_0000.json"
    items = json.loads(shard.read_text())
    items[0]["more"] = deep
    shard.write_text(json.dumps(items))
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert list(found) == list(expected)[1:]
    assert "nested too deeply" in report.skipped[0].what
    assert report.fingerprint["format"] == "nemo"
    assert report.fingerprint["source"] == str(tmp_path / "in")
    assert report.fingerprint["loss"] == "NaN"
    assert {name: report.fingerprint[name] for name in MODEL} == MODEL
    assert "num_shards" not in report.fingerprint
    write_cache(tmp_path / "deep", 2, more=deep)
    with pytest.raises(tc.FormatError, match=r"metadata\.json: containers nest more than"):
        tc.import_cache(tmp_path / "deep", tmp_path / "none")


def test_items_of_one_file(tmp_path: Path) -> None:
    """An image is listed twice, with two prompts; its second file has replaced the first one."""
    write_cache(tmp_path / "in", count=2)
    listed = tmp_path / "in" / "metadata_shard_0000.json"
    items = json.loads(listed.read_text())
    listed.write_text(json.dumps([*items, {**items[0], "prompt": "another prompt"}]))
    said = run("import", tmp_path / "in", tmp_path / "out")
    assert said.stdout.splitlines()[-1] == "2 samples read, 2 written, 0 skipped"
    assert "1 items have the cache_file of an earlier item, and were not used, for example item 2 of" in said.stderr
