"""The digest of a shard's index in the manifest: a shard that another one of the same length has replaced is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import run_any
from tests.reading.batches import write as write_samples
from tests.shards.damage import change_manifest, flip

OTHER = r"a-000001\.tar: another shard has replaced the one .*: its index has the digest ([0-9a-f]{16}), but "
LISTED = r".*manifest\.json lists ([0-9a-f]{16}); copy the right shard again, or, .*`tensorcache index [^`]*/a`"


def write(folder: Path, first: int = 0, count: int = 60, **options: Any) -> Path:
    samples = {f"{first + i:06d}": {"v": torch.full((4,), first + i)} for i in range(count)}
    return Path(write_samples(folder / "a-%06d.tar", samples, max_samples=20, **options)).parent


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    return {each["url"]: each for each in json.loads((folder / "manifest.json").read_text())["shardlist"]}


def own_digests(folder: Path) -> dict[str, str | None]:
    """Return the digest at the end of each shard, or of its sidecar."""

    def digest_of(path: Path) -> str | None:
        contents = [path.read_bytes(), *(sidecar.read_bytes() for sidecar in path.parent.glob(f"{path.name}.index"))]
        digests = [content[-16:-8] for content in contents if content.endswith(b"tcindex1")]
        return f"{int.from_bytes(digests[0], 'little'):016x}" if digests else None

    return {str(path.relative_to(folder)): digest_of(path) for path in sorted(folder.glob("**/*.tar"))}


def listed_digests(folder: Path) -> dict[str, str | None]:
    return {url: entry.get("index") for url, entry in sorted(entries(folder).items())}


@pytest.fixture
def replaced(tmp_path: Path) -> Path:
    """A cache of 60 samples whose second shard is that of another run, of the same length and with as many samples."""
    folder, other = write(tmp_path / "a"), write(tmp_path / "other", 500)
    assert os.path.getsize(folder / "a-000001.tar") == os.path.getsize(other / "a-000001.tar")
    times = os.stat(folder / "a-000001.tar")
    shutil.copyfile(other / "a-000001.tar", folder / "a-000001.tar")
    os.utime(folder / "a-000001.tar", ns=(times.st_atime_ns, times.st_mtime_ns))
    return folder


def test_a_replaced_shard_is_refused_when_it_is_first_used(replaced: Path) -> None:
    with tc.open(replaced) as cache:
        assert cache[0]["v"][0] == 0
        for use in (lambda: cache[20], lambda: cache.read_batch([25]), lambda: cache["000003"]):
            with pytest.raises(tc.FormatError, match=OTHER + LISTED) as caught:
                use()
        found = re.search(OTHER + LISTED, str(caught.value))
        assert found is not None
        assert found[1] == own_digests(replaced)["a-000001.tar"]
        assert found[2] == entries(replaced)["a-000001.tar"]["index"]


def test_tools_refuse_it(replaced: Path, tmp_path: Path) -> None:
    loader = tc.torch_loader(tc.open(replaced), batch_size=20, num_workers=1, shuffle=False)
    calls: list[Callable[[], object]] = [
        lambda: list(loader),
        lambda: tc.merge([replaced], tmp_path / "out"),
        lambda: tc.drop(replaced, tmp_path / "out", ["000000"]),
        lambda: tc.export_cache(tc.open(replaced), tmp_path / "out", "npz"),
        lambda: write(replaced, resume=True),
    ]
    for call in calls:
        with pytest.raises(tc.FormatError, match=OTHER):
            call()
    (fault,) = [fault for fault in tc.verify(replaced).faults if "digest" in fault.what]
    listed, own = entries(replaced)["a-000001.tar"]["index"], own_digests(replaced)["a-000001.tar"]
    assert fault.what == f"the shard has an index with the digest {own}, but manifest.json says {listed}"
    assert fault.kind == "index"


@pytest.mark.parametrize("argument", ["", "a-000001.tar"])
def test_index_lists_it(replaced: Path, argument: str) -> None:
    assert run_any("index", replaced / argument).returncode == 0
    assert listed_digests(replaced) == own_digests(replaced)
    assert tc.open(replaced)[20]["v"][0] == 520
    assert tc.verify(replaced).ok


def test_a_manifest_without_digests(tmp_path: Path) -> None:
    """As earlier versions have written it."""
    folder = write(tmp_path / "a")
    change_manifest(folder, lambda document: [entry.pop("index") for entry in document["shardlist"]])
    with tc.open(folder) as cache:
        assert [cache[i]["v"][0] for i in (0, 20, 40)] == [0, 20, 40]
    assert tc.verify(folder).ok
    write(folder, resume=True)
    write(folder, count=80, resume=True)
    assert [entry.get("index") is not None for entry in entries(folder).values()] == [False, False, False, True]


def test_a_shard_that_is_scanned(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    path = folder / "a-000001.tar"
    flip(path, path.stat().st_size - 100)
    assert tc.open(folder)[20]["v"][0] == 20


def build_anew(folder: Path, out: Path) -> None:
    def compute(batch: list[dict[str, str]]) -> list[Any]:
        return [{"v": torch.full((4,), int(item["__key__"]))} for item in batch]

    tc.build([{"__key__": f"{i:06d}"} for i in range(5, 70)], compute, out, fingerprint={}, reuse=folder)


NEW: dict[str, Callable[[Path, Path], object]] = {
    "version": build_anew,
    "drop": lambda folder, out: tc.drop(folder, out, ["000021"]),
    "repair": tc.repair,
    "merge": lambda folder, out: tc.merge([folder], out),
    "reshard": lambda folder, out: tc.reshard(folder, out, max_samples=25),
}
IN_PLACE: dict[str, Callable[[Path], object]] = {
    "written": lambda folder: None,
    "write_index": lambda folder: [tc.write_index(folder / f"a-00000{number}.tar") for number in range(2)],
    "resumed": lambda folder: write(folder, count=90, resume=True, fingerprint={}),
    "overwritten": lambda folder: write(folder, first=5, overwrite=True),
}


@pytest.mark.parametrize("kind", ["footer", "sidecar", "both"])
@pytest.mark.parametrize("change", [*NEW, *IN_PLACE])
def test_writers_list_digests(tmp_path: Path, change: str, kind: str) -> None:
    folder = write(tmp_path / "a", footer=kind != "sidecar", fingerprint={})
    if kind != "footer":
        for path in folder.glob("*.tar"):
            tc.write_index(path)
    if change in NEW:
        NEW[change](folder, tmp_path / "out")
        folder = tmp_path / "out"
    else:
        IN_PLACE[change](folder)
    assert listed_digests(folder) == own_digests(folder)
    assert tc.verify(folder).ok
    with tc.open(folder) as cache:
        assert all(int(sample["v"][0]) == int(key) for key, sample in zip(cache.keys(), cache, strict=True))


def test_another_sidecar_changes_the_digest(tmp_path: Path) -> None:
    """An index with less in it, as of another version of the package, is replaced by a new one: the manifest follows."""
    folder = write(tmp_path / "a", footer=False, fingerprint={"a": 1})
    path = folder / "a-000001.tar"
    (folder / "manifest.json").rename(tmp_path / "kept.json")
    tc.write_index(path)  # without a fingerprint, which the manifest alone has
    shutil.copy(tmp_path / "kept.json", folder / "manifest.json")
    first = own_digests(folder)["a-000001.tar"]
    tc.write_index(path)
    assert own_digests(folder)["a-000001.tar"] != first
    assert listed_digests(folder) == {**own_digests(folder), "a-000000.tar": None, "a-000002.tar": None}
