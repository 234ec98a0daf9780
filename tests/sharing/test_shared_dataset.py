"""One load per sample for all processes; names, owners, limits and pass-through."""

from __future__ import annotations

import ctypes
import errno
import gc
import multiprocessing
import os
import pickle
import re
import stat
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.children import finish, run_in_child, start
from tests.same import assert_same
from tests.sharing.datasets import Counted, read_all, wait_until_empty

COUNT = 40


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "log", COUNT)


def test_eight_processes_load_each_sample_once(tmp_path: Path, directory: Path) -> None:
    counted = Counted(tmp_path / "log", 100, 0.001)
    # a process that begins when no other process holds the samples loads them again
    opened = multiprocessing.get_context("fork").Barrier(8)

    def read(seed: int) -> None:
        shared = tc.SharedDataset(counted, "eight", directory=directory)
        opened.wait(60)
        read_all(shared, seed)

    children = [start(partial(read, seed)) for seed in range(8)]
    assert finish(children) == [0] * 8
    assert counted.loads() == dict.fromkeys(range(100), 1)
    wait_until_empty(directory)


def test_threads_load_each_sample_once(tmp_path: Path, directory: Path) -> None:
    counted = Counted(tmp_path / "log", COUNT, 0.001)
    with tc.SharedDataset(counted, "threads", directory=directory) as shared:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(partial(read_all, shared), range(4)))
        assert shared.stats().num_samples == COUNT
    assert counted.loads() == dict.fromkeys(range(COUNT), 1)


class Gated:
    """Sample 0 takes until sample 2 is being loaded."""

    def __init__(self) -> None:
        self.is_loading_0, self.is_loading_2 = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 0:
            self.is_loading_0.set()
            assert self.is_loading_2.wait(10)
        elif index == 2:
            self.is_loading_2.set()
        return index


def test_a_batch_loads_other_samples_before_it_waits_for_another_load(directory: Path) -> None:
    gated = Gated()
    with tc.SharedDataset(gated, "gated", directory=directory) as shared:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(shared.__getitem__, 0)
            assert gated.is_loading_0.wait(10)
            assert shared.__getitems__([0, 1, 2]) == [0, 1, 2]
        assert shared.stats().misses == 3


def test_workers_of_a_data_loader_share(counted: Counted, directory: Path) -> None:
    with tc.SharedDataset(counted, "loader", directory=directory) as shared:
        options: Any = {"multiprocessing_context": "fork", "persistent_workers": True}
        loader = DataLoader(shared, 5, num_workers=2, collate_fn=list, **options)
        for _ in range(2):
            found = [sample for batch in loader for sample in batch]
            for index, sample in enumerate(found):
                assert_same(Counted.sample(index), sample)
        del loader
        assert shared.stats().num_samples == COUNT
    assert counted.loads() == dict.fromkeys(range(COUNT), 1)
    wait_until_empty(directory)


def test_a_forked_child_holds_the_memory_after_its_parent(counted: Counted, directory: Path) -> None:
    result, told = os.pipe()

    def parent() -> None:
        shared = tc.SharedDataset(counted, "fork", directory=directory)
        read_all(shared, 0, 1)
        gate, opened = os.pipe()
        if os.fork() == 0:
            os.close(opened)
            os.read(gate, 1)  # until the parent has ended
            read_all(shared, 1, 1)
            stats = shared.stats()
            assert (stats.hits, stats.misses, stats.holders) == (COUNT, 0, (os.getpid(),))
            assert [info.num_samples for info in tc.shared_list(directory)] == [COUNT]
            os.write(told, b"right")
            os._exit(0)

    assert run_in_child(parent) == 0
    os.close(told)
    with open(result, "rb") as answer:
        assert answer.read() == b"right"
    wait_until_empty(directory)
    assert counted.loads() == dict.fromkeys(range(COUNT), 1)


def test_only_the_owner_has_permissions_whatever_the_umask(counted: Counted, directory: Path) -> None:
    before = os.umask(0)
    try:
        shared = tc.SharedDataset(counted, "mode", directory=directory)
        read_all(shared, 0, 1)
    finally:
        os.umask(before)
    [base] = directory.iterdir()
    assert stat.S_IMODE(base.stat().st_mode) == stat.S_IMODE((base / "mode").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (base / "mode").iterdir()} == {0o600}
    os.chmod(base, 0o755)
    with pytest.raises(PermissionError, match="this user alone"):
        tc.SharedDataset(counted, "mode", directory=directory)
    os.chmod(base, 0o700)
    shared.close()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a..b", "a\0b", "a\nb", "x" * 129, ".hidden"])
def test_impossible_names_are_refused(counted: Counted, directory: Path, name: str) -> None:
    with pytest.raises(tc.InvalidKeyError, match="name"):
        tc.SharedDataset(counted, name, directory=directory)
    with pytest.raises(tc.InvalidKeyError, match="name"):
        tc.shared_clear(name, directory)


def test_another_dataset_under_the_name_is_refused_with_both_fingerprints(counted: Counted, directory: Path) -> None:
    with tc.SharedDataset(counted, "clash", directory=directory, fingerprint="v1"):
        for dataset, fingerprint in ((counted, "v2"), (Counted(counted.log, 3), "v1"), ([1] * COUNT, "v1")):
            with pytest.raises(tc.StaleCacheError, match=r"'v1'.*another|another.*'v1'") as caught:
                tc.SharedDataset(dataset, "clash", directory=directory, fingerprint=fingerprint)
            assert fingerprint in str(caught.value)
    tc.SharedDataset([1] * COUNT, "clash", directory=directory).close()


class Odd:
    """Sample 1 contains an object that the format cannot represent; the first load of sample 0 fails."""

    has_failed = False

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        if index == 0 and not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EIO, "a bad disk")
        return {"deep": [object() if index == 1 else index], "x": torch.arange(3)}


def test_errors_and_samples_that_pass_through_with_one_warning(directory: Path) -> None:
    with tc.SharedDataset(Odd(), "odd", directory=directory) as shared:
        with pytest.raises(OSError, match="bad disk"):
            shared[0]
        for index in (3, -4):
            with pytest.raises(IndexError):
                shared[index]
        with pytest.warns(UserWarning, match=r"sample 1 of .* is not shared: .*deep.*0") as warned:
            found = shared[1]
        assert [warning.filename for warning in warned] == [__file__]
        assert type(found["deep"][0]) is object
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [shared[0]["deep"], shared[2]["deep"]] == [[0], [2]]
            assert [type(each["deep"][0]) for each in shared.__getitems__([1, 2, 1])] == [object, int, object]
        stats = shared.stats()
        assert (stats.misses, stats.passed_through, stats.num_samples) == (4, 2, 2)
        with pytest.raises(tc.EncodeError, match=r"sample 1.*deep"):
            shared.read_batch([2, 1], collate="list")
    warned = pytest.warns(UserWarning, match="is not shared")
    with tc.SharedDataset([{"x": torch.ones(2), "f": len}], "first", directory=directory) as shared, warned:
        assert shared.schema == {}


@pytest.mark.parametrize("verify", [False, True])
def test_hits_share_nothing_that_can_be_changed(directory: Path, verify: bool) -> None:
    dataset = [{"x": torch.full((20_000,), i), "nested": [{"i": i}, (i, [i])]} for i in range(4)]
    with tc.SharedDataset(dataset, "hits", directory=directory, verify=verify) as shared:
        for _ in range(3):
            for i in range(4):
                found = shared[i]
                assert_same(dataset[i], found)
                found["x"].load()[:] = -1
                found["nested"][0]["i"] = -1
                found["nested"][1][1].append(-1)
                found["nested"].append(-1)
                found["more"] = found.pop("x")
        assert shared.stats().hits == 8


class Label:
    """A class that samples may contain only with `allow=`."""

    def __init__(self, text: str) -> None:
        self.text = text


def test_allowed_classes_are_shared(directory: Path) -> None:
    dataset = [{"x": torch.zeros(3), "label": Label(f"text {i}")} for i in range(3)]
    with tc.SharedDataset(dataset, "allow", directory=directory, allow=[Label]) as shared:
        for _ in range(2):
            assert [sample["label"].text for sample in shared] == ["text 0", "text 1", "text 2"]
            assert [label.text for label in shared.read_batch([2, 0])["label"]] == ["text 2", "text 0"]
        assert (shared.stats().misses, shared.stats().num_samples) == (3, 3)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_nbytes": 0}, "max_nbytes=0"),
        ({"fingerprint": 3}, "fingerprint=3"),
        ({"dataset": iter([1])}, "map-style"),
    ],
)
def test_options_with_impossible_values_are_refused(directory: Path, options: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        tc.SharedDataset(**{"dataset": [1], "name": "options", "directory": directory, **options})
    assert list(directory.iterdir()) == []


def test_writing_into_a_view_changes_no_read_of_another_process(counted: Counted, directory: Path) -> None:
    gate, opened = os.pipe()

    def read_later() -> None:
        os.close(opened)
        with tc.SharedDataset(counted, "views", directory=directory) as other:
            read_all(other, 0, 1)
            os.read(gate, 1)  # until this process has written
            read_all(other, 1, 1)

    with tc.SharedDataset(counted, "views", directory=directory) as shared:
        child = start(read_later)
        for index in (1, 2, 3):
            view = shared[index]["x"].load(copy=False)
            view.fill_(77)
            with tc.SharedDataset(counted, "views", directory=directory) as again:
                assert_same(Counted.sample(index), again[index])
        for index in range(4, COUNT):  # this process or the child appends them after the pages that were written to
            assert_same(Counted.sample(index), shared[index])
        os.close(opened)
        assert finish([child]) == [0]


def test_persistent_memory_is_found_by_a_later_process(counted: Counted, directory: Path) -> None:
    def work() -> None:
        read_all(tc.SharedDataset(counted, "kept", directory=directory, persistent=True), 0)

    assert run_in_child(work) == 0
    assert run_in_child(work) == 0
    assert counted.loads() == dict.fromkeys(range(COUNT), 1)
    [info] = tc.shared_list(directory)
    assert (info.name, info.num_samples, info.holders, info.is_persistent) == ("kept", COUNT, (), True)
    with tc.SharedDataset(counted, "kept", directory=directory), pytest.raises(BlockingIOError, match=str(os.getpid())):
        tc.shared_clear("kept", directory)
    tc.shared_clear("kept", directory)
    assert tc.shared_list(directory) == []
    with pytest.raises(FileNotFoundError):
        tc.shared_clear("kept", directory)


def _damage_sample_2(counted: Counted, directory: Path) -> Path:
    """Make persistent memory `torn`, and flip a bit of sample 2; return its folder."""
    with tc.SharedDataset(counted, "torn", directory=directory, persistent=True) as shared:
        read_all(shared, 0, 1)
    [segment] = next(directory.iterdir()).glob("torn/segment-*")
    content = bytearray(segment.read_bytes())
    at = content.index(Counted.sample(2)["x"].view(torch.uint8).numpy().tobytes())
    content[at + 5000] ^= 1
    segment.write_bytes(content)
    return segment.parent


def test_verify_compares_digests_at_every_access(counted: Counted, directory: Path) -> None:
    _damage_sample_2(counted, directory)
    with tc.SharedDataset(counted, "torn", directory=directory, verify=True) as shared:
        for _ in range(2):
            with pytest.raises(tc.FormatError, match="digest"):
                shared[2]
            with pytest.raises(tc.FormatError, match="digest"):
                shared.read_batch([2])
            assert_same(Counted.sample(3), shared[3])
    with tc.SharedDataset(counted, "torn", directory=directory) as shared:
        shared[2]  # without `verify`, digests are compared only after a restart of the machine
    del shared
    tc.shared_clear("torn", directory)


def test_damaged_samples_are_refused_after_a_restart_of_the_machine(counted: Counted, directory: Path) -> None:
    head = _damage_sample_2(counted, directory) / "head.json"
    head.write_text(head.read_text().replace('"boot": "', '"boot": "an earlier '))
    for _ in range(2):  # each time the memory is opened
        shared = tc.SharedDataset(counted, "torn", directory=directory, persistent=True)
        with pytest.raises(tc.FormatError, match="digest"):
            shared[2]
        assert_same(Counted.sample(3), shared[3])
    shared.close()
    del shared
    tc.shared_clear("torn", directory)


def _mount_4_mib(directory: Path) -> None:
    """Mount a small file system, which only this process sees, in namespaces of its own."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
    assert libc.unshare(0x1002_0000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUSER | CLONE_NEWNS
    for name, text in (("uid_map", f"0 {user} 1"), ("setgroups", "deny"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
    options = os.fsencode(directory), b"tmpfs", 0, b"size=4m,mode=700"
    assert libc.mount(b"none", *options) == 0, os.strerror(ctypes.get_errno())


def test_a_full_file_system_is_an_error_that_says_what_to_do(directory: Path) -> None:
    def work() -> None:
        _mount_4_mib(directory)
        dataset = [{"x": torch.full((20_000,), i)} for i in range(40)]  # 160 KB each
        errors = []
        with tc.SharedDataset(dataset, "small", directory=directory) as shared:
            for i in [*range(40)] * 2:
                try:
                    found = shared[i]
                except OSError as exc:
                    errors.append(str(exc))
                else:
                    assert found["x"].load(copy=False).tolist() == [i] * 20_000
            assert shared.stats().num_samples + len(errors) // 2 == 40, shared.stats()
        assert 20 < len(errors) < 60
        left = r"no memory for a sample of [\d,]+ bytes: the file system has [\d,]+ of 4,194,304 bytes left"
        assert all(re.search(left, error) for error in errors)
        with pytest.raises(OSError, match="no memory for a file of 8,") as caught:
            tc.SharedDataset(range(1_000_000), "large", directory=directory)  # its table alone has 8 MB
        assert all("directory=" in error and "--shm-size" in error for error in (*errors, str(caught.value)))

    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "mount", "-t", "tmpfs", "none", str(directory)], capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system")
    assert run_in_child(work) == 0


def test_nothing_keeps_descriptors_open(counted: Counted, directory: Path) -> None:
    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/dev/fd"))

    tc.SharedDataset(counted, "descriptors", directory=directory).close()
    before = num_open()
    for _ in range(5):
        with tc.SharedDataset(counted, "descriptors", directory=directory) as shared:
            read_all(shared, 0)
            held = shared[5]
            pickle.loads(pickle.dumps(shared)).close()
        del shared
        assert_same(Counted.sample(5), held)
        del held
    assert num_open() == before


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.long
def test_workers_share_a_dataset_that_the_main_script_defines(tmp_path: Path, directory: Path, context: str) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        f"""
import torch, wds_tensorcache as tc

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {{"x": torch.full((3,), index)}}

if __name__ == "__main__":
    with tc.SharedDataset(Slow(), "main", directory={str(directory)!r}) as shared:
        loader = torch.utils.data.DataLoader(shared, 4, num_workers=1, multiprocessing_context={context!r})
        print(sum(int(batch["x"].sum()) for batch in loader), shared.stats().num_samples)
"""
    )
    assert subprocess.check_output([sys.executable, str(script)], text=True, timeout=120).split() == ["84", "8"]


def test_a_closed_dataset_refuses_every_access(counted: Counted, directory: Path) -> None:
    closed = tc.SharedDataset(counted, "closed", directory=directory)
    closed[0]
    closed.close()
    with tc.SharedDataset(counted, "closed", directory=directory) as shared:
        read_all(shared, 0, 1)
        uses = [lambda: closed[0], lambda: closed[12], lambda: closed.read_batch([1]), lambda: closed.select("x")]
        for use in (*uses, closed.stats):
            with pytest.raises(ValueError, match="is closed"):
                use()
        read_all(shared, 1, 1)


class Crossing:
    """Samples 0 and 1 need each other, sample 2 needs itself."""

    shared: Any = None
    both = threading.Barrier(2, timeout=20)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            return self.shared[2]
        if threading.current_thread().name in ("0", "1"):
            self.both.wait()
            threading.current_thread().name = "done"
            return {"other": self.shared[1 - index]["x"] + 1, "x": torch.zeros(1)}
        return {"x": torch.zeros(1)}


def test_samples_that_need_each_other_do_not_wait_for_ever(directory: Path) -> None:
    crossing = Crossing()
    with tc.SharedDataset(crossing, "crossing", directory=directory) as crossing.shared:
        with pytest.raises(RecursionError, match="sample 2 itself"):
            crossing.shared[2]
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda i=i: found.append(crossing.shared[i]), name=str(i), daemon=True)  # type: ignore[misc]
            for i in range(2)
        ]
        list(map(threading.Thread.start, threads))
        for thread in threads:
            thread.join(20)
        assert [int(each["other"].load()) for each in found] == [1, 1]
    crossing.shared = None


def _spoil(folder: Path, name: str, how: str) -> None:
    """Delete a file of shared memory, and unless it is "gone", put something else in its place."""
    (folder / name).unlink()
    if how == "fifo":
        os.mkfifo(folder / name, 0o600)
    elif how == "link":
        (folder / name).symlink_to("/etc/passwd")
    elif how != "gone":
        (folder / name).write_bytes({"empty": b"", "short": b"{}xxxxxxx"}[how])
        (folder / name).chmod(0o600)


@pytest.mark.parametrize("how", ["gone", "empty", "short", "fifo", "link"])
@pytest.mark.parametrize("name", ["holders", "head.json", "table", "locks", "segment-1"])
def test_a_damaged_folder_is_an_error_or_made_anew_and_harms_no_other(
    tmp_path: Path, directory: Path, name: str, how: str
) -> None:
    counted = Counted(tmp_path / "log", 9)

    def work() -> None:
        with tc.SharedDataset(counted, "spoiled", directory=directory, persistent=True) as shared:
            read_all(shared, 0, 1)
        [base] = directory.iterdir()
        _spoil(base / "spoiled", name, how)
        with tc.SharedDataset(counted, "other", directory=directory) as shared:
            read_all(shared, 0, 1)
        tc.shared_list(directory)
        error = None
        try:
            with tc.SharedDataset(counted, "spoiled", directory=directory, persistent=True) as shared:
                read_all(shared, 0, 1)
        except (OSError, tc.FormatError) as exc:
            error = str(exc)
        assert error is None or "spoiled" in error

    assert run_in_child(work, 60) == 0
