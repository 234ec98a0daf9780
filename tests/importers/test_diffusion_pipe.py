"""Caches of diffusion-pipe, written as its class Cache writes them: torch files in a `.bin`, offsets in SQLite."""

from __future__ import annotations

import io
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.importers.folders import Gadget, assert_left_out, assert_samples, imported
from tests.same import assert_same


def write_cache(folder: Path, items: list[Any], per_shard: int = 2, fingerprint: str = "0123456789abcdef") -> Path:
    """Write the items as diffusion-pipe does, with a limit in items instead of gigabytes."""
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "metadata.db")) as database:
        database.execute("CREATE TABLE IF NOT EXISTS fingerprint(value)")
        database.execute("INSERT INTO fingerprint VALUES(?)", (fingerprint,))
        database.execute("CREATE TABLE IF NOT EXISTS items(shard, shard_index)")
        for shard, begin in enumerate(range(0, len(items), per_shard)):
            database.execute(f"CREATE TABLE shard_{shard}(offset, size)")
            content = b""
            for number, item in enumerate(items[begin : begin + per_shard]):
                buffer = io.BytesIO()
                torch.save(item, buffer)
                database.execute("INSERT INTO items VALUES(?, ?)", (shard, number))
                database.execute(f"INSERT INTO shard_{shard} VALUES (?, ?)", (len(content), len(buffer.getvalue())))
                content += buffer.getvalue()
            (folder / f"shard_{shard}.bin").write_bytes(content)
        database.commit()
    return folder


def latent_item(file: str, captions: list[str], size: int = 8) -> dict[str, Any]:
    latents = torch.randn(16, 1, size, size).bfloat16()
    return {"latents": latents, "mask": None, "image_spec": [None, file], "caption": captions}


def text_item(file: str | None, name: str) -> dict[str, Any]:
    return {name: torch.randn(5, 32).bfloat16(), "image_spec": [None, file]}


def without_spec(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key != "image_spec"}


def write_dataset(
    root: Path, folder: str = "cache_512x512x1", texts: str | None = None, size: int = 8
) -> dict[str, Any]:
    """Write the latents of five pictures, and two text encoders, in another order; return the samples by name."""
    names = ["a", "sub/b", "c", "d", "e"]
    captions = {name: [f"{name} {i}" for i in range(1 + (name == "c"))] for name in names}
    latents = {name: latent_item(f"/data/photos/{name}.png", captions[name], size) for name in names}
    write_cache(root / folder / "latents", list(latents.values()))
    if texts is None:
        return {f"{folder}/{name}": item for name, item in latents.items()}
    samples = {name: {**item, "text": [{} for _ in captions[name]]} for name, item in latents.items()}
    for number, tensor in ((1, "clip_embed"), (2, "t5_embed")):
        items = []
        for name in reversed(names):
            for i in range(len(captions[name])):
                items.append(text_item(f"/data/photos/{name}.png", tensor))
                samples[name]["text"][i] |= without_spec(items[-1])
        write_cache(root / texts / f"text_embeddings_{number}", items, 4)
    return {f"{folder}/{name}": sample for name, sample in samples.items()}


def test_size_buckets(tmp_path: Path) -> None:
    """Each size has text embeddings, and the model has those of the empty caption."""
    expected = write_dataset(tmp_path / "in" / "cache" / "flux", texts="cache_512x512x1")
    uncond = [text_item(None, "clip_embed"), text_item(None, "t5_embed")]
    for number, item in enumerate(uncond, 1):
        write_cache(tmp_path / "in" / "cache" / "flux" / f"uncond_text_embeddings_{number}", [item])
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.ok, report.unused) == ("diffusion-pipe", True, [])
    assert_same({"text": [without_spec(uncond[0]) | without_spec(uncond[1])]}, found.pop("cache/flux/uncond"))
    assert list(found) == [f"cache/flux/{name}" for name in expected]
    for name, sample in expected.items():
        assert_same(sample, found[f"cache/flux/{name}"])
    assert report.fingerprint["fingerprints"]["cache/flux/cache_512x512x1/latents"] == "0123456789abcdef"


@pytest.mark.parametrize("prefix", ["1.000x", ""])
def test_aspect_ratio_buckets_share_text_embeddings(tmp_path: Path, prefix: str) -> None:
    """Two sizes of one ratio; other ratios and frames have other pictures. Old folders do not name the ratio."""
    folder = tmp_path / "in"
    expected = write_dataset(folder, f"cache_{prefix}512x512x1", "ar_frames_1.000_1")
    texts = {name: sample["text"] for name, sample in expected.items()}
    for name, item in write_dataset(folder, f"cache_{prefix}1024x1024x1", size=16).items():
        expected[name] = {**item, "text": texts[name.replace("1024", "512")]}
    write_cache(folder / "ar_frames_1.000_33" / "text_embeddings_1", [text_item("/data/photos/a.png", "clip_embed")])
    found, report = imported(folder, tmp_path / "out", on_error="skip")
    assert [each.name for each in report.skipped] == ["ar_frames_1.000_33/text_embeddings_1"]
    assert_samples(expected, found)


def test_latents_alone_and_texts_alone(tmp_path: Path) -> None:
    """Several clips may be of one video."""
    items = [latent_item("/data/clip.mp4", ["x"]), latent_item("/data/clip.mp4", ["x"]), {"latents": torch.ones(3)}]
    write_cache(tmp_path / "in" / "cache_512x512x33" / "latents", items)
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert report.ok
    assert_same(items, list(found.values()))
    items = [text_item(f"/data/{i}.png", "t5_embed") for i in range(3)]
    write_cache(tmp_path / "texts" / "text_embeddings_1", items)
    found, _ = imported(tmp_path / "texts", tmp_path / "out of texts")
    assert_same({f"text_embeddings_1/{i:08d}": item for i, item in enumerate(items)}, found)


def test_long_captions_and_tensors_of_many_dtypes(tmp_path: Path) -> None:
    """The image_spec follows 100 KB of captions, so that the first bytes of an item do not contain it."""
    caption = "a very long caption " * 5000
    item = {"caption": [caption], "latents": torch.randn(4, 8, 8).half(), "mask": torch.ones(2, 2)}
    item["image_spec"] = ["/data/a.tar", "a.png"]
    text = {"text_embeddings": torch.randn(3, 8).to(torch.float8_e4m3fn), "image_spec": ["/data/a.tar", "a.png"]}
    write_cache(tmp_path / "in" / "latents", [item])
    write_cache(tmp_path / "in" / "text_embeddings_1", [text])
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_same({**item, "text": [without_spec(text)]}, found["a"])


def test_missing_and_ambiguous_captions(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    files = ["a", "b", "c", "d"]
    write_cache(folder / "cache_8x8x1" / "latents", [latent_item(file, ["x"] * (1 + (file == "b"))) for file in files])
    write_cache(folder / "ar_frames_1.000_1" / "text_embeddings_1", [text_item(file, "e") for file in ("a", "b", "d")])
    write_cache(folder / "ar_frames_1.500_1" / "text_embeddings_1", [text_item(file, "e") for file in "d"])
    found, report = imported(folder, tmp_path / "out", on_error="skip")
    assert list(found) == ["cache_8x8x1/a"]
    what = {each.name: each.what for each in report.skipped}
    assert "has 2 captions, but text_embeddings_1 has 1 items" in what["cache_8x8x1/b"]
    assert "in no folder" in what["cache_8x8x1/c"]
    assert "ar_frames_1.000_1 and ar_frames_1.500_1" in what["cache_8x8x1/d"]


def test_items_that_need_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_cache(Path("in/latents"), [latent_item("/a.png", ["x"]), {"latents": torch.ones(2), "run": Gadget()}, [1]])
    with pytest.raises(tc.UnsafeSkeletonError, match=r"latents/shard_0.bin, item at byte \d+: .*--trust"):
        tc.import_cache("in", "stopped")
    found, report = imported(Path("in"), Path("out"), on_error="skip")
    assert len(found) == 1
    assert "expected a dict" in report.skipped[1].what
    assert not Path("hacked").exists()
    found, _ = imported(Path("in"), Path("trusted"), on_error="skip", trust=True)
    assert len(found) == 2
    assert Path("hacked").exists()


HOSTILE = {
    "negative offset": "UPDATE shard_0 SET offset = -5 WHERE rowid = 1",
    "overlap": "UPDATE shard_0 SET offset = 0",
    "gap": "UPDATE shard_0 SET size = size - 1 WHERE rowid = 1",
    "beyond the end": "UPDATE shard_0 SET size = size + 100 WHERE rowid = 2",
    "text": "UPDATE shard_0 SET size = 'x'",
    "unknown shard": "UPDATE items SET shard = 99",
    "an item twice": "UPDATE items SET shard_index = 0",
    "missing items": "DELETE FROM items WHERE rowid = 1",
    "no items": "DROP TABLE items",
    "no bin": "CREATE TABLE shard_7(offset, size)",
    "a view": "DROP TABLE items; CREATE VIEW items AS WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) "
    "SELECT 0 AS shard, i AS shard_index FROM n",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON items BEGIN DELETE FROM items; END",
    "a virtual table": "CREATE VIRTUAL TABLE more USING fts5(x)",
    "a generated column": "CREATE TABLE shard_7(offset, size AS (hex(zeroblob(500000000))))",
    "an index": "CREATE INDEX more ON items(abs(shard))",
}


@pytest.mark.parametrize("statements", HOSTILE.values(), ids=HOSTILE)
def test_hostile_databases(tmp_path: Path, statements: str) -> None:
    folder = write_cache(tmp_path / "in" / "latents", [latent_item(f"/{i}.png", ["x"]) for i in range(3)])
    good = write_cache(tmp_path / "in" / "good" / "latents", [latent_item("/good.png", ["x"])])
    with closing(sqlite3.connect(folder / "metadata.db")) as database:
        database.executescript(statements)
    before = {path: path.read_bytes() for path in (tmp_path / "in").rglob("*") if path.is_file()}
    assert_left_out(tmp_path / "in", "latents/metadata.db", "latents/metadata.db", ["good/good"])
    assert {path: path.read_bytes() for path in (tmp_path / "in").rglob("*") if path.is_file()} == before
    assert good.exists()


def test_an_interrupted_cache(tmp_path: Path) -> None:
    """The trainer was killed while it wrote a shard: its rows are not committed, or its journal exists."""
    folder = write_cache(tmp_path / "in" / "latents", [latent_item(f"/{i}.png", ["x"]) for i in range(2)])
    (folder / "shard_1.bin").write_bytes(b"half an item")
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert len(found) == 2
    assert [each.name for each in report.skipped] == ["latents/shard_1.bin"]
    (folder / "metadata.db-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(600))
    with pytest.raises(ValueError, match="was interrupted or still runs"):
        tc.import_cache(tmp_path / "in", tmp_path / "other", on_error="skip")
    assert (folder / "metadata.db-journal").exists()


def test_a_database_with_a_journal_mode(tmp_path: Path) -> None:
    """Nothing is written next to it."""
    write_dataset(tmp_path / "in")
    (path,) = (tmp_path / "in").rglob("metadata.db")
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "in").rglob("*")}
    assert tc.import_cache(tmp_path / "in", tmp_path / "out").num_written == 5
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "in").rglob("*")} == before
