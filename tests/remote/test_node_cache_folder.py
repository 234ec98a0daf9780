"""The folder of a node's cache: which folders are refused, what damage does, eviction, and full or read-only disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import children
from tests.remote.objects import Added, Objects, cached
from wds_tensorcache.storage.node_cache.block_file import BLOCK, SUFFIX
from wds_tensorcache.storage.node_cache.cache import NodeCache, open_node_cache

MB = 1 << 20
COUNT = 20  # blocks of an object


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(tmp_path / "objects")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def files(path: Path) -> list[Path]:
    return sorted(path.glob(f"*{SUFFIX}"))


def read(cache: NodeCache, objects: Objects, added: Added) -> None:
    """Read an object as a whole, and compare it."""
    source = cached(cache, added)
    assert source.read(0, source.nbytes) == objects.content(source.url)


def test_folders_of_other_users_or_open_to_them_are_refused(objects: Objects, path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)
    with pytest.raises(PermissionError, match="no other user may write"):
        open_node_cache(path, None, objects.fetch)
    path.chmod(0o755)
    open_node_cache(path, None, objects.fetch)
    if os.geteuid():
        pytest.skip("needs root, to make a folder of another user")
    os.chown(path, 12345, 12345)
    with pytest.raises(PermissionError, match="owner 12345"):
        open_node_cache(path, None, objects.fetch)


def test_a_file_and_a_limit_of_zero_are_refused(objects: Objects, path: Path) -> None:
    path.write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        open_node_cache(path, None, objects.fetch)
    with pytest.raises(ValueError, match="cache_nbytes=0"):
        open_node_cache(path.parent / "other", 0, objects.fetch)


def test_paths_that_cannot_be_folders(objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, error, message in (
        (tmp_path / "file", NotADirectoryError, "is a file"),
        ("s3://bucket/cache", ValueError, "is a url, expected the path of a folder on a local disk"),
        (tmp_path / "file" / "x" / "y", NotADirectoryError, "leads through a file"),
        ("/proc/nothing", FileNotFoundError, r"cannot be created \(No such file"),
        ("", ValueError, "is empty"),
    ):
        with pytest.raises(error, match=f"cache_dir= {message}"):
            open_node_cache(path, None, objects.fetch)


def _truncate(file: Path) -> None:
    os.truncate(file, 5000)


def _truncate_and_extend(file: Path) -> None:
    nbytes = file.stat().st_size
    os.truncate(file, 5000)
    os.truncate(file, nbytes)


def _spoil_header(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(COUNT * BLOCK + 40)
        opened.write(b"\xff" * 8)


def _other_marks(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek((COUNT + 1) * BLOCK)
        opened.write(bytes(range(3, 3 + COUNT)))


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _link(file: Path) -> None:
    moved = file.with_name("moved")
    file.rename(moved)
    file.symlink_to(moved)


def _dangling_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def _writable_by_others(file: Path) -> None:
    file.chmod(0o666)


_UNNOTICED = [_spoil_header, _other_marks, _fifo, _link, _dangling_link]  # by a process that has the file open
_NOTICED = [_truncate, _empty, _writable_by_others, Path.unlink]


# A program that overwrites a file while it is in use cannot be told from the cache itself.
@pytest.mark.parametrize(
    ("damage", "is_open"),
    [(damage, False) for damage in [*_NOTICED, *_UNNOTICED, _truncate_and_extend]]
    + [(damage, True) for damage in [*_NOTICED, *_UNNOTICED]],
)
def test_damaged_files_are_replaced(
    objects: Objects, path: Path, damage: Callable[[Path], object], is_open: bool
) -> None:
    added = objects.add("a.tar", COUNT * BLOCK)
    cache = open_node_cache(path, None, objects.fetch)
    source = cached(cache, added)
    assert source.read(0, 10 * BLOCK) == objects.content(added[0])[: 10 * BLOCK]
    damage(files(path)[0])
    if not is_open:
        source = cached(open_node_cache(path, None, objects.fetch), added)
    assert source.read(0, source.nbytes) == objects.content(added[0])
    objects.requests()
    if damage not in _UNNOTICED or not is_open:
        read(open_node_cache(path, None, objects.fetch), objects, added)
        assert objects.requests() == []
        assert not files(path)[0].is_symlink()


def test_a_folder_with_the_name_of_a_file_means_reading_through(objects: Objects, path: Path) -> None:
    added, other = objects.add("a.tar", COUNT * BLOCK), objects.add("b.tar", BLOCK)
    read(open_node_cache(path, None, objects.fetch), objects, added)
    name = files(path)[0]
    name.unlink()
    (name / "inside").mkdir(parents=True)
    cache = open_node_cache(path, None, objects.fetch)
    with pytest.warns(UserWarning, match="reading without the cache"):
        read(cache, objects, added)
    read(cache, objects, added)  # one warning
    assert (name / "inside").exists()
    read(open_node_cache(path, None, objects.fetch), objects, other)
    objects.requests()
    read(open_node_cache(path, None, objects.fetch), objects, other)
    assert objects.requests() == []


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, b"\0" * 8, b"x" * 100])
def test_a_damaged_count_of_bytes_is_counted_again(objects: Objects, path: Path, content: bytes) -> None:
    limit = 3 * COUNT * BLOCK
    added = [objects.add(f"{number}.tar", COUNT * BLOCK) for number in range(6)]
    for each in added:
        read(open_node_cache(path, limit, objects.fetch), objects, each)
        (path / "space").write_bytes(content)
    assert sum(512 * each.stat().st_blocks for each in files(path)) <= limit
    assert len(files(path)) == 2


def test_foreign_files_are_neither_counted_nor_deleted(objects: Objects, path: Path) -> None:
    path.mkdir(0o700)
    foreign = path / "train-000000.tar"
    foreign.write_bytes(bytes(100 * BLOCK))
    (path / ("0" * 64 + ".tar")).write_bytes(b"1")
    (path / "folder").mkdir()
    limit = 3 * COUNT * BLOCK
    cache = open_node_cache(path, limit, objects.fetch)
    for number in range(6):
        read(cache, objects, objects.add(f"{number}.tar", COUNT * BLOCK))
    assert len(files(path)) == 2
    assert foreign.stat().st_size == 100 * BLOCK
    assert len(list(path.iterdir())) == 6


def test_the_least_recently_used_file_is_evicted(objects: Objects, path: Path) -> None:
    limit = (4 * (COUNT + 2) + 2) * BLOCK  # with a block for the number, and one for a table of the file system
    added = [objects.add(f"{number}.tar", COUNT * BLOCK) for number in range(5)]
    cache = open_node_cache(path, limit, objects.fetch)
    for number, each in enumerate(added[:4]):
        read(cache, objects, each)
        (last,) = [file for file in files(path) if file.stat().st_mtime > 1000 * 4]
        os.utime(last, (number * 1000, number * 1000))
    # a use by another process makes the oldest the newest
    read(open_node_cache(path, limit, objects.fetch), objects, added[0])
    read(cache, objects, added[4])
    objects.requests()
    fresh = open_node_cache(path, limit, objects.fetch)
    for number in (0, 2, 3, 4):
        read(fresh, objects, added[number])
    assert objects.requests() == []
    read(fresh, objects, added[1])
    assert len(objects.requests()) == 1


def test_files_that_were_there_before_count(objects: Objects, path: Path) -> None:
    added = [objects.add(f"{number}.tar", COUNT * BLOCK) for number in range(6)]
    without_limit = open_node_cache(path, None, objects.fetch)
    for each in added:
        read(without_limit, objects, each)
    assert len(files(path)) == 6
    limit = 3 * COUNT * BLOCK
    extra = objects.add("extra.tar", COUNT * BLOCK)
    read(open_node_cache(path, limit, objects.fetch), objects, extra)
    assert sum(512 * each.stat().st_blocks for each in files(path)) <= limit


def test_the_limit_includes_what_the_file_system_adds(objects: Objects, path: Path) -> None:
    """ext4 lists the fifth and later runs of blocks of a file in a block of its own."""
    added = objects.add("a.tar", 8 * MB)
    cache = open_node_cache(path, limit := 9 * BLOCK, objects.fetch)
    source = cached(cache, added)
    for number in range(8):
        assert source.read(number * MB, number * MB + 1) == objects.content(source.url)[number * MB :][:1]
        assert 0 < sum(512 * file.stat().st_blocks for file in path.iterdir()) <= limit
    assert len(files(path)) == 1


def test_an_evicted_file_that_is_open_takes_no_space_and_is_read_again(objects: Objects, path: Path) -> None:
    added = objects.add("a.tar", COUNT * BLOCK)
    source = cached(open_node_cache(path, None, objects.fetch), added)
    source.read(0, source.nbytes)
    (fd,) = [each.fd for each in source.cache._open.values()]
    other = open_node_cache(path, (COUNT + 4) * BLOCK, objects.fetch)
    read(other, objects, objects.add("b.tar", COUNT * BLOCK))
    assert os.fstat(fd).st_blocks == 0
    assert source.read(0, source.nbytes) == objects.content(added[0])


def test_a_limit_below_one_read_means_reading_through(objects: Objects, path: Path) -> None:
    added = objects.add("a.tar", COUNT * BLOCK)
    cache = open_node_cache(path, 8 * BLOCK, objects.fetch)
    with pytest.warns(UserWarning, match="one read needs 90,112 bytes, but cache_nbytes is 32,768"):
        read(cache, objects, added)
    read(cache, objects, added)


def test_a_deleted_folder_is_made_again(objects: Objects, path: Path) -> None:
    added = objects.add("a.tar", COUNT * BLOCK)
    cache = open_node_cache(path, MB, objects.fetch)
    source = cached(cache, added)
    for _ in range(3):
        assert source.read(0, source.nbytes) == objects.content(added[0])
        assert len(objects.requests()) == 1
        shutil.rmtree(path)
    assert source.read(0, 5) == objects.content(added[0])[:5]
    assert path.stat().st_mode & 0o777 == 0o700


def test_unfinished_files_are_deleted(objects: Objects, path: Path) -> None:
    cache = open_node_cache(path, 3 * COUNT * BLOCK, objects.fetch)
    stray = path / f".{'0' * 64}.{'1' * 16}.tmp"
    stray.write_bytes(bytes(BLOCK))
    for number in range(4):
        read(cache, objects, objects.add(f"{number}.tar", COUNT * BLOCK))
    assert not stray.exists()


def test_after_a_crash_only_synced_blocks_count(objects: Objects, path: Path) -> None:
    added = objects.add("a.tar", COUNT * BLOCK)
    cache = open_node_cache(path, None, objects.fetch)
    source = cached(cache, added)
    source.read(0, 5 * BLOCK)
    cache.sync()
    source.read(5 * BLOCK, 10 * BLOCK)
    objects.requests()
    with files(path)[0].open("r+b") as opened:
        # as another boot left it; the crash has lost the bytes of blocks that were not synced
        opened.seek(5 * BLOCK)
        opened.write(bytes(5 * BLOCK))
        opened.seek(COUNT * BLOCK + 64)
        opened.write(b"00000000-0000-0000-0000-000000000000")
    again = cached(open_node_cache(path, None, objects.fetch), added)
    assert again.read(0, 10 * BLOCK) == objects.content(added[0])[: 10 * BLOCK]
    assert objects.requests() == [(added[0], 5 * BLOCK, 5 * BLOCK)]
    read(open_node_cache(path, None, objects.fetch), objects, added)
    assert objects.requests() == [(added[0], 10 * BLOCK, 10 * BLOCK)]


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
    (small_disk / "foreign").write_bytes(bytes(MB - 20 * BLOCK))
    added = [objects.add(f"{number}.tar", COUNT * BLOCK) for number in range(3)]
    cache = open_node_cache(small_disk / "cache", None, objects.fetch)
    with pytest.warns(UserWarning, match="the disk is full"):
        read(cache, objects, added[0])
    for each in added:
        read(cache, objects, each)
    (small_disk / "foreign").unlink()
    fresh = open_node_cache(small_disk / "cache", None, objects.fetch)
    objects.requests()
    for _ in range(2):
        read(fresh, objects, added[1])
    assert len(objects.requests()) == 1


def test_a_disk_that_the_cache_has_filled_evicts(objects: Objects, small_disk: Path) -> None:
    cache = open_node_cache(small_disk / "cache", None, objects.fetch)
    for number in range(30):
        read(cache, objects, objects.add(f"{number}.tar", COUNT * BLOCK))
    disk = os.statvfs(small_disk)
    assert disk.f_bavail >= disk.f_blocks // 50  # some of it remains free for other programs
    assert 5 <= len(files(small_disk / "cache")) <= 12


def test_a_read_only_folder_means_reading_through(objects: Objects, small_disk: Path) -> None:
    added = [objects.add(f"{number}.tar", COUNT * BLOCK) for number in range(2)]
    read(open_node_cache(small_disk / "cache", None, objects.fetch), objects, added[0])
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    cache = open_node_cache(small_disk / "cache", None, objects.fetch)
    with pytest.warns(UserWarning, match="Read-only"):
        read(cache, objects, added[0])
    read(cache, objects, added[1])


def test_a_folder_without_permission_means_reading_through(objects: Objects, path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    added = [objects.add(f"{number}.tar", COUNT * BLOCK) for number in range(2)]
    path.mkdir(0o700)
    os.chown(path, 12345, 12345)
    for folder in path.parents:
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    objects.folder.chmod(0o777)

    def work() -> None:
        os.setresuid(12345, 12345, 12345)
        cache = open_node_cache(path, None, objects.fetch)
        source = cached(cache, added[0])
        source.read(0, BLOCK)
        path.chmod(0o500)
        assert source.read(0, source.nbytes) == objects.content(added[0][0])  # the file may still be written
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                read(cache, objects, added[1])
            path.chmod(0o700)
            (path / "space").unlink()
            path.chmod(0o500)
            read(open_node_cache(path, None, objects.fetch), objects, added[1])
        assert len(caught) == 2
        for each in caught:
            assert f"{path}: [Errno 13] the folder cannot be written (Permission denied); corr" in str(each.message)
            assert each.filename == __file__

    assert children.run_in_child(work) == 0


def test_network_file_systems_are_refused(objects: Objects, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wds_tensorcache.storage.node_cache.folder.file_system", lambda path: ("nfs4", True))
    with pytest.raises(ValueError, match="nfs4, a network file system"):
        open_node_cache(path, None, objects.fetch)


def test_a_lack_of_descriptors_does_not_replace_good_files(objects: Objects, path: Path) -> None:
    added = [objects.add(f"{number}.tar", COUNT * BLOCK) for number in range(2)]
    for each in added:
        read(open_node_cache(path, None, objects.fetch), objects, each)
    before = [file.stat().st_ino for file in files(path)]

    def work(num_free: int) -> None:
        warnings.simplefilter("ignore")
        cache = open_node_cache(path, None, objects.fetch)
        with contextlib.suppress(OSError):
            children.limit_descriptors(num_free)
            for each in added:
                read(cache, objects, each)  # the object itself may be impossible to open

    for num_free in range(4):
        assert children.run_in_child(lambda num_free=num_free: work(num_free)) == 0
    assert [file.stat().st_ino for file in files(path)] == before
    objects.requests()
    for each in added:
        read(open_node_cache(path, None, objects.fetch), objects, each)
    assert objects.requests() == []
