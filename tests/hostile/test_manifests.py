"""Manifests of strangers: they list only files in their folder, and take memory in proportion to their bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import run_any
from tests.hostile.pickles import little_memory
from tests.reading.batches import write as write_samples

OUTSIDE = (
    r"manifest\.json: lists .*p-000000\.tar', which is outside the manifest's folder; .*pass its own path to tc\.open"
)


def write(folder: Path, name: str, first: int) -> Path:
    write_samples(folder / f"{name}-%06d.tar", {f"{name}{i}": {"v": torch.full((2,), first + i)} for i in range(3)})
    return folder


def download(tmp_path: Path, url: str) -> Path:
    """Return a cache whose manifest also lists a shard of another folder, with the right length and counts."""
    private, folder = write(tmp_path / "private", "p", 100), write(tmp_path / "downloaded", "d", 0)
    (folder / "sub").mkdir()
    there, own = (json.loads((each / "manifest.json").read_text()) for each in (private, folder))
    url = url.format(private=private)
    own["shardlist"].insert(0, {**there["shardlist"][0], "url": url})
    own["tensorcache"]["caches"][url] = {"": 3}
    (folder / "manifest.json").write_text(json.dumps(own))
    return folder


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    return download(tmp_path, "../private/p-000000.tar")


@pytest.mark.parametrize("url", ["{private}/p-000000.tar", "sub/../../private/p-000000.tar"])
def test_urls_of_another_folder(tmp_path: Path, url: str) -> None:
    with pytest.raises(tc.FormatError, match=OUTSIDE):
        tc.open(download(tmp_path, url))


def build(folder: Path, out: Path) -> object:
    items = [{"__key__": f"d{i}"} for i in range(3)]
    return tc.build(items, lambda batch: [{"v": torch.zeros(2)} for _ in batch], out, fingerprint={}, reuse=folder)


USES: dict[str, Callable[[Path, Path], object]] = {
    "open": lambda folder, _: tc.open(folder),
    "open the manifest": lambda folder, _: tc.open(folder / "manifest.json"),
    "stream": lambda folder, _: tc.ResumablePipeline(str(folder), tc.decode()),
    "drop": lambda folder, out: tc.drop(folder, out, ["d0"]),
    "reuse": build,
    "write": lambda folder, _: write(folder, "e", 0),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_shard_of_another_folder_is_refused(downloaded: Path, tmp_path: Path, use: Any) -> None:
    with pytest.raises(tc.FormatError, match=OUTSIDE):
        use(downloaded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["merge", "reshard", "export", "repair", "verify", "index"])
def test_commands_do_not_copy_it(downloaded: Path, tmp_path: Path, command: str) -> None:
    result = run_any(command, downloaded, *[tmp_path / "out"] * (command not in ("verify", "index")))
    assert result.returncode == 1
    assert "is outside the manifest's folder" in result.stdout + result.stderr
    copied = [name for path in tmp_path.glob("out/*.tar") for name in tc.open(path).keys()]  # noqa: SIM118
    assert copied == (["d0", "d1", "d2"] if command == "repair" else [])


def test_links_and_folders_inside(tmp_path: Path) -> None:
    """The files of a snapshot of the Hub are links to its blobs; shards may be in folders of the folder."""
    folder, blobs = write(tmp_path / "snapshots" / "1", "a", 0), tmp_path / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        shutil.move(path, blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert len(tc.open(folder)) == 3
    assert tc.verify(folder).ok
    whole = tmp_path / "whole"
    whole.mkdir()
    write(whole / "sub", "b", 0)
    document = json.loads((whole / "sub" / "manifest.json").read_text())
    document["shardlist"][0]["url"] = "sub/b-000000.tar"
    (whole / "manifest.json").write_text(json.dumps(document))
    assert len(tc.open(whole)) == 3


def manifest(**changes: str) -> bytes:
    parts = {"wids_version": "1", "shardlist": "[]", "tensorcache": "{}", **changes}
    return ("{" + ", ".join(f'"{key}": {value}' for key, value in parts.items()) + "}").encode()


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ("{},", "tensorcache"),
        ("[],", "x"),
        ('{"a":1},', "shardlist"),
        ('{"aa":0,"ab":0,"ac":0,"ad":0},', "x"),
        ("0,", "x"),
    ],
)
def test_small_values_are_refused_by_their_number(tmp_path: Path, part: str, where: str) -> None:
    """60 MB of `{},` would take 1.8 GB."""
    values = f"[{part * (12_000_000 // len(part))}0]"
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest(**{where: f'{{"x": {values}}}' if where == "tensorcache" else values}))
    nbytes = path.stat().st_size
    match = r"manifest\.json: [0-9,]+ keys, values and containers in 1[0-9,]+ bytes, more than"
    with little_memory(2 * nbytes), pytest.raises(tc.FormatError, match=match):
        tc.open(tmp_path)


def test_a_manifest_that_is_too_long(tmp_path: Path) -> None:
    with open(tmp_path / "manifest.json", "wb") as file:
        file.truncate(1 << 40)
    message = r"has 1,099,511,627,776 bytes, more than the limit for a manifest, 268,435,456"
    with pytest.raises(tc.FormatError, match=message):
        tc.open(tmp_path)


@pytest.mark.long
def test_honest_manifests_of_any_length(tmp_path: Path) -> None:
    """The shortest entries that a writer makes, of so many shards: far from the limit."""
    count = 125_000
    urls = [f"{i}.tar" for i in range(count)]
    shards = ",\n".join(f'{{"url": "{url}", "nsamples": 1, "filesize": 2048}}' for url in urls)
    caches = ", ".join(f'"{url}": {{"": 1}}' for url in urls)
    content = manifest(shardlist=f"[\n{shards}\n]", tensorcache=f'{{"version": 1, "caches": {{{caches}}}}}')
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(
        tc.MissingShardError, match=r"'0\.tar' is listed .*renamed or deleted on purpose, run `tensorcache index "
    ):
        tc.open(tmp_path)
