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

OTHER = (
    r"a-000001\.tar: another shard has replaced the one that was listed: its index has the digest ([0-9a-f]{16}), but "
)
LISTED = r".*manifest\.json lists ([0-9a-f]{16}); copy the right shard again, or, .*`tensorcache index [^`]*/a`"


def write(folder: Path, first: int = 0, count: int = 60, **options: Any) -> Path:
    with tc.ShardWriter(folder / "a-%06d.tar", max_samples=20, fsync=False, **options) as sink:
        for i in range(count):
            sink.write(f"{first + i:06d}", {"v": torch.full((4,), first + i)})
    return folder


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    return {each["url"]: each for each in json.loads((folder / "manifest.json").read_text())["shardlist"]}


def own_digests(folder: Path) -> dict[str, str | None]:
    """Return the digest at the end of each shard, or of its sidecar."""
    found: dict[str, str | None] = {}
    for path in sorted(folder.glob("**/*.tar")):
        for content in (path.read_bytes(), *(each.read_bytes() for each in path.parent.glob(f"{path.name}.index"))):
            if content.endswith(b"tcindex1"):
                found[str(path.relative_to(folder))] = f"{int.from_bytes(content[-16:-8], 'little'):016x}"
                break
        else:
            found[str(path.relative_to(folder))] = None
    return found


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


# --- readers ---


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


def test_in_another_process(replaced: Path) -> None:
    loader = tc.torch_loader(tc.open(replaced), batch_size=20, num_workers=1, shuffle=False)
    with pytest.raises(tc.FormatError, match=OTHER):
        list(loader)


def test_commands_refuse_it(replaced: Path, tmp_path: Path) -> None:
    for command in ("merge", "reshard", "drop", "export"):
        result = run_any(command, replaced, tmp_path / command, *["000000"] * (command == "drop"))
        assert result.returncode == 1
        assert re.search(OTHER, result.stderr)


def test_a_build_does_not_resume_with_it(replaced: Path) -> None:
    with pytest.raises(tc.FormatError, match=OTHER):
        write(replaced, resume=True)


def test_verify_reports_it(replaced: Path) -> None:
    (fault,) = [fault for fault in tc.verify(replaced).faults if "digest" in fault.what]
    listed, own = entries(replaced)["a-000001.tar"]["index"], own_digests(replaced)["a-000001.tar"]
    assert fault.what == f"the shard has an index with the digest {own}, but manifest.json says {listed}"
    assert fault.kind == "index"


@pytest.mark.parametrize("argument", ["", "a-000001.tar"])
def test_index_lists_it(replaced: Path, argument: str) -> None:
    assert run_any("index", replaced / argument).returncode == 0
    assert listed_digests(replaced) == own_digests(replaced)
    with tc.open(replaced) as cache:
        assert cache[20]["v"][0] == 520
    assert tc.verify(replaced).ok


# --- manifests and shards without a digest ---


def test_a_manifest_without_digests(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    without(folder)
    with tc.open(folder) as cache:
        assert [cache[i]["v"][0] for i in (0, 20, 40)] == [0, 20, 40]
    assert tc.verify(folder).ok
    write(folder, resume=True)
    write(folder, count=80, resume=True)
    assert [entry.get("index") is not None for entry in entries(folder).values()] == [False, False, False, True]


def without(folder: Path) -> None:
    """Write the manifest as earlier versions did."""
    document = json.loads((folder / "manifest.json").read_text())
    for entry in document["shardlist"]:
        del entry["index"]
    (folder / "manifest.json").write_text(json.dumps(document))


def test_a_shard_that_is_scanned(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    path = folder / "a-000001.tar"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with tc.open(folder) as cache:
        assert cache[20]["v"][0] == 20


# --- every writer lists the digest of the index that is there ---


def by_write_index(folder: Path) -> Path:
    for number in range(2):
        tc.write_index(folder / f"a-00000{number}.tar")
    return folder


def by_version(folder: Path) -> Path:
    items = [{"__key__": f"{i:06d}"} for i in range(5, 70)]
    out = folder.parent / "out"
    tc.build(
        items,
        lambda batch: [{"v": torch.full((4,), int(item["__key__"]))} for item in batch],
        out,
        fingerprint={},
        reuse=folder,
    )
    return out


def by_drop(folder: Path) -> Path:
    tc.drop(folder, folder.parent / "out", ["000021"])
    return folder.parent / "out"


def by_repair(folder: Path) -> Path:
    tc.repair(folder, folder.parent / "out")
    return folder.parent / "out"


def by_command(command: str) -> Callable[[Path], Path]:
    def use(folder: Path) -> Path:
        assert run_any(command, folder, folder.parent / "out").returncode == 0
        return folder.parent / "out"

    return use


CHANGES: dict[str, Callable[[Path], Path]] = {
    "written": lambda folder: folder,
    "write_index": by_write_index,
    "version": by_version,
    "drop": by_drop,
    "repair": by_repair,
    "merge": by_command("merge"),
    "reshard": by_command("reshard"),
    "resumed": lambda folder: write(folder, count=90, resume=True, fingerprint={}),
    "overwritten": lambda folder: write(folder, first=5, overwrite=True),
}


@pytest.mark.parametrize("kind", ["footer", "sidecar", "both"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_writers_list_digests(tmp_path: Path, change: Callable[[Path], Path], kind: str) -> None:
    folder = write(tmp_path / "a", footer=kind != "sidecar", fingerprint={})
    if kind != "footer":
        for path in folder.glob("*.tar"):
            tc.write_index(path)
    folder = change(folder)
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
