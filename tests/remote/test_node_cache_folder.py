"""The folder of a node's cache: which folders are refused, what damage does, eviction, and full or read-only disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import children
from tests.remote.objects import Added, Objects, cached, nbytes_on_disk
from wds_tensorcache.storage.node_cache import block_file, folder
from wds_tensorcache.storage.node_cache.block_file import BLOCK, SUFFIX
from wds_tensorcache.storage.node_cache.cache import NodeCache, open_node_cache

MB = 1 << 20
COUNT = 20  # blocks of an object
NBYTES = COUNT * BLOCK


def files(path: Path) -> list[Path]:
    return sorted(path.glob(f"*{SUFFIX}"))


def read(cache: NodeCache, objects: Objects, *added: Added) -> None:
    """Read objects as a whole, and compare them."""
    for each in added:
        source = cached(cache, each)
        assert source.read(0, source.nbytes) == objects.content(source.url)


def add(objects: Objects, count: int) -> list[Added]:
    return [objects.add(f"{number}.tar", NBYTES) for number in range(count)]


def test_folders_that_are_refused(
    objects: Objects, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "open to others").mkdir()
    (tmp_path / "open to others").chmod(0o770)
    refused: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "file", NotADirectoryError, "is a file"),
        (tmp_path / "file" / "x" / "y", NotADirectoryError, "Not a directory"),
        (tmp_path / "open to others", PermissionError, "no other user may write"),
        ("s3://bucket/cache", ValueError, "expected the path of a folder on a local disk"),
        ("/proc/nothing", FileNotFoundError, "No such file"),
        ("", ValueError, "expected the path of a folder"),
    ]
    if not os.geteuid():
        path.mkdir()
        os.chown(path, 12345, 12345)
        refused.append((path, PermissionError, "owner 12345"))
    for place, error, message in refused:
        with pytest.raises(error, match=message):
            open_node_cache(place)
    monkeypatch.setattr(folder, "file_system", lambda path: ("nfs4", True))
    with pytest.raises(ValueError, match="nfs4, a network file system"):
        open_node_cache(tmp_path / "cache2")


def _overwrite(begin: int, content: bytes) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with file.open("r+b") as opened:
            opened.seek(begin)
            opened.write(content)

    return damage


def _truncate_and_extend(file: Path) -> None:
    nbytes = file.stat().st_size
    os.truncate(file, 5000)
    os.truncate(file, nbytes)


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_name("moved")))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, 5000),
    "empty": lambda file: file.write_bytes(b""),
    "open to others": lambda file: file.chmod(0o666),
    "removed": Path.unlink,
    "header": _overwrite(NBYTES + 40, b"\xff" * 8),
    "marks": _overwrite(NBYTES + BLOCK, bytes(range(3, 3 + COUNT))),
    "fifo": _fifo,
    "link": _link,
    "truncated and extended": _truncate_and_extend,
}
# A program that overwrites a file while it is in use cannot be told from the cache itself.
UNNOTICED = {"header", "marks", "fifo", "link"}


@pytest.mark.parametrize(
    ("what", "is_open"),
    [(what, is_open) for what in DAMAGES for is_open in (False, True) if not (is_open and "extended" in what)],
)
def test_damaged_files_are_replaced(objects: Objects, path: Path, what: str, is_open: bool) -> None:
    added = objects.add("a.tar", NBYTES)
    source = cached(open_node_cache(path), added)
    assert source.read(0, 10 * BLOCK) == objects.content(added[0])[: 10 * BLOCK]
    DAMAGES[what](files(path)[0])
    if not is_open:
        source = cached(open_node_cache(path), added)
    assert source.read(0, source.nbytes) == objects.content(added[0])
    objects.requests()
    if what not in UNNOTICED or not is_open:
        read(open_node_cache(path), objects, added)
        assert objects.requests() == []
        assert not files(path)[0].is_symlink()


def test_blocks_do_not_survive_a_crash_of_the_machine(
    objects: Objects, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = objects.add("a.tar", NBYTES)
    read(open_node_cache(path), objects, added)
    _overwrite(0, bytes(NBYTES))(files(path)[0])  # the crash has lost bytes, and kept the map
    monkeypatch.setattr(block_file, "boot_id", lambda: "00000000-0000-0000-0000-000000000000")
    for num_requests in (2, 0):
        read(open_node_cache(path), objects, added)
        assert len(objects.requests()) == num_requests


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\0" * 8, b"x" * 100])
def test_a_damaged_count_of_bytes_and_foreign_files(objects: Objects, path: Path, content: bytes) -> None:
    """The count is made again; files of other programs are neither counted nor deleted."""
    path.mkdir(0o700)
    (path / "train-000000.tar").write_bytes(bytes(5 * NBYTES))
    (path / ("0" * 64 + ".tar")).write_bytes(b"1")
    (path / "folder").mkdir()
    foreign = nbytes_on_disk(path)
    for each in add(objects, 6):
        read(open_node_cache(path, 3 * NBYTES), objects, each)
        (path / "space").write_bytes(content)
    assert nbytes_on_disk(path) - foreign <= 3 * NBYTES
    assert len(files(path)) == 2
    assert len(list(path.iterdir())) == 6


def test_the_least_recently_used_file_is_evicted(objects: Objects, path: Path) -> None:
    limit = (4 * (COUNT + 2) + 2) * BLOCK  # with a block for the number, and one for a table of the file system
    added = add(objects, 5)
    cache = open_node_cache(path, limit)
    for number, each in enumerate(added[:4]):
        read(cache, objects, each)
        (last,) = [file for file in files(path) if file.stat().st_mtime > 1000 * 4]
        os.utime(last, (number * 1000, number * 1000))
    # a use by another process makes the oldest the newest
    read(open_node_cache(path, limit), objects, added[0])
    read(cache, objects, added[4])
    objects.requests()
    fresh = open_node_cache(path, limit)
    read(fresh, objects, *(added[number] for number in (0, 2, 3, 4)))
    assert objects.requests() == []
    read(fresh, objects, added[1])
    assert len(objects.requests()) == 1


def test_the_limit_includes_what_the_file_system_adds(objects: Objects, path: Path) -> None:
    """ext4 lists the fifth and later runs of blocks of a file in a block of its own."""
    source = cached(open_node_cache(path, limit := 9 * BLOCK), objects.add("a.tar", 8 * MB))
    for number in range(8):
        assert source.read(number * MB, number * MB + 1) == objects.content(source.url)[number * MB :][:1]
        assert 0 < nbytes_on_disk(path) <= limit
    assert len(files(path)) == 1


def test_files_that_are_evicted_or_deleted_while_they_are_open(objects: Objects, path: Path) -> None:
    added, other = add(objects, 2)
    cache = open_node_cache(path)
    read(cache, objects, added)
    (fd,) = [each.fd for each in cache._open.values()]
    read(open_node_cache(path, NBYTES + 4 * BLOCK), objects, other)
    assert os.fstat(fd).st_blocks == 0
    source = cached(cache, added)
    for _ in range(3):
        assert source.read(0, source.nbytes) == objects.content(added[0])
        shutil.rmtree(path)
    assert source.read(0, 5) == objects.content(added[0])[:5]
    assert path.stat().st_mode & 0o777 == 0o700
    cache = open_node_cache(path, 8 * BLOCK)
    with pytest.warns(UserWarning, match="one read needs 90,112 bytes, but cache_nbytes is 32,768"):
        read(cache, objects, other)
    read(cache, objects, other)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", where], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_full_disk_means_reading_through(objects: Objects, small_disk: Path) -> None:
    (small_disk / "foreign").write_bytes(bytes(MB - NBYTES))
    added = add(objects, 30)
    cache = open_node_cache(small_disk / "cache")
    with pytest.warns(UserWarning, match="the disk is full"):
        read(cache, objects, added[0])
    read(cache, objects, *added[:3])
    (small_disk / "foreign").unlink()
    fresh = open_node_cache(small_disk / "cache")
    objects.requests()
    read(fresh, objects, added[1], added[1])
    assert len(objects.requests()) == 1
    read(fresh, objects, *added)  # a disk that the cache itself has filled evicts
    disk = os.statvfs(small_disk)
    assert disk.f_bavail >= disk.f_blocks // 50  # some of it remains free for other programs
    assert 5 <= len(files(small_disk / "cache")) <= 12
    fresh.close()
    cache.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    cache = open_node_cache(small_disk / "cache")
    with pytest.warns(UserWarning, match="Read-only"):
        read(cache, objects, added[0])
    read(cache, objects, added[1])


def test_a_lack_of_descriptors_does_not_replace_good_files(
    objects: Objects, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "0.1")
    added = add(objects, 2)
    read(open_node_cache(path), objects, *added)
    before = [file.stat().st_ino for file in files(path)]

    def work(num_free: int) -> None:
        warnings.simplefilter("ignore")
        cache = open_node_cache(path)
        with contextlib.suppress(OSError):
            children.limit_descriptors(num_free)
            read(cache, objects, *added)  # a connection to the server may be impossible

    for num_free in range(4):
        assert children.run_in_child(lambda num_free=num_free: work(num_free)) == 0
    assert [file.stat().st_ino for file in files(path)] == before
    objects.requests()
    read(open_node_cache(path), objects, *added)
    assert objects.requests() == []
