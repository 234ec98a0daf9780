"""Small shards, and ways to damage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wds_tensorcache as tc
from tests.shards.tars import BLOCK, by_tarfile_in


def sample(index: int) -> dict[str, Any]:
    """A sample of 30 halves, ragged floats and small values."""
    latent = torch.arange(30).reshape(5, 6).half() + index
    return {"latent": latent, "text": torch.full((2 + index % 3, 2), index / 7), "prompt": f"photo {index}"}


def write(folder: Path, count: int = 4, *, per_shard: int = 100, caches: tuple[str, ...] = (), **options: Any) -> Path:
    """Write samples with a `json` and a `jpg` each, and return the first shard."""
    with tc.ShardWriter(folder / "%06d.tar", max_samples=per_shard, fsync=False, **options) as writer:
        for i in range(count):
            others: dict[str, Any] = {f"{name}.tensorcache": sample(i + at) for at, name in enumerate(caches, 1)}
            writer.write(f"{i:03d}", sample(i), json={"label": i}, jpg=bytes([i]) * 700, **others)
    return folder / "000000.tar"


def members(path: Path) -> dict[str, tuple[int, int]]:
    """Return where the content of each member is, [begin, end), by name."""
    return {name: (begin, begin + nbytes) for name, begin, nbytes in by_tarfile_in(path)}


def member(path: Path, name: str) -> bytes:
    """Return a member with its tar header and padding."""
    begin, end = members(path)[name]
    return path.read_bytes()[begin - BLOCK : end + -end % BLOCK]


def flip(path: Path, at: int, mask: int = 0xFF) -> None:
    """Invert bits of the byte at an offset."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def faults(source: Any, **options: Any) -> list[tuple[str | None, str]]:
    """Return key and text of each fault; with one thread and with three, which must find the same."""
    report = tc.verify(source, num_threads=1, **options)
    assert report.faults == tc.verify(source, num_threads=3, **options).faults
    assert report.ok is (not report.faults)
    return [(fault.key, fault.what) for fault in report.faults]


def change_manifest(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the JSON of a folder's manifest in place."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a folder and its subfolders."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def erase(path: Path, begin: int, end: int) -> None:
    """Overwrite the bytes `[begin, end)` of a file with zeros."""
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(end - begin))
