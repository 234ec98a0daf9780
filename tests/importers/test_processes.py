"""Worker processes import the same bytes as threads, end with their parent, and lose no error."""

from __future__ import annotations

import errno
import glob
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.children import limit_descriptors, run_in_child, wait_until
from tests.cli.command import json_of, run
from tests.cli.commands import Output, Process, the_server
from tests.importers.folders import write_files
from tests.kills import compare

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="worker processes are forked on Linux alone")


@contextmanager
def as_thread() -> Iterator[None]:
    """Run another thread meanwhile, so that an import starts no processes."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_alive(pid: int) -> bool:
    """Return whether any thread of a process is alive. After a kill, the last one to end releases the files and locks."""
    states = []
    for stat in glob.glob(f"/proc/{pid}/task/*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(Path(stat).read_text().rpartition(")")[2].split()[0])
    return any(state not in "ZX" for state in states)


@pytest.mark.parametrize(
    ("limits", "count", "num_shards"),
    [(["--max-samples", 7], 60, 9), (["--max-nbytes", 60_000], 60, 6), ([], 40, 1), ([], 130, 4)],
)
def test_the_same_bytes(tmp_path: Path, limits: list[object], count: int, num_shards: int) -> None:
    source = write_files(tmp_path / "in", count)
    options = {str(name)[2:].replace("-", "_"): value for name, value in zip(limits[::2], limits[1::2], strict=True)}
    with as_thread():
        tc.import_cache(source, tmp_path / "threads", **options)  # type: ignore[arg-type]
    for workers in (1, 3):
        run("import", source, tmp_path / f"{workers}", "--workers", workers, *limits)
        compare(tmp_path / f"{workers}", tmp_path / "threads")
    assert tc.verify(tmp_path / "1").ok
    assert len(list((tmp_path / "1").glob("*.tar"))) == num_shards


def test_a_folder_that_grows(tmp_path: Path) -> None:
    """After an import of the same folder, missing shards are made again; new samples follow in new shards."""
    source = write_files(tmp_path / "in", 40, bad=(5,))
    run("import", source, tmp_path / "out", "--on-error", "skip", "--max-samples", 8, status=1)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.tar")}
    (tmp_path / "out" / "000002.tar").unlink()
    (tmp_path / "out" / "000002.idx").unlink()
    run("import", source, tmp_path / "out", "--on-error", "skip", "--max-samples", 8, "--resume", status=1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.tar")} == whole
    for number in range(45):
        np.save(source / f"photo {number:04d} new.npy", np.zeros(3))
    np.save(source / "photo 0005.npy", np.zeros(3))  # the bad one is a sample now
    (source / "photo 0005.pt").unlink()
    found = json_of("import", source, tmp_path / "out", "--max-samples", 8, "--resume")
    assert (found["num_present"], found["num_written"], found["num_gone"]) == (39, 46, 0)
    assert len(tc.open(tmp_path / "out")) == 85
    assert {name: (tmp_path / "out" / name).read_bytes() for name in whole} == whole
    assert tc.verify(tmp_path / "out").ok


def test_bad_files(tmp_path: Path) -> None:
    """They are reported in the same order, with the same words; the first one ends an import that stops."""
    source = write_files(tmp_path / "in", 90, bad=(3, 17, 18, 19, 40, 41, 42, 43, 89))
    (source / "photo 0050.pt").write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    skipping = ["--on-error", "skip", "--max-samples", 20]
    found = json_of("import", source, tmp_path / "out", *skipping, "--narrow", status=1)
    with as_thread():
        report = tc.import_cache(source, tmp_path / "threads", on_error="skip", max_samples=20, narrow=True)
    assert [each["what"] for each in found["skipped"]] == [each.what for each in report.skipped]
    assert (found["num_written"], found["num_skipped"]) == (80, 10)
    assert (found["nbytes_narrowed"], found["lacking"]) == (
        report.nbytes_narrowed,
        {name: list(each) for name, each in report.lacking.items()},
    )
    compare(tmp_path / "out", tmp_path / "threads")
    stopped = run("import", source, tmp_path / "stopped", "--max-samples", 1, status=1)
    assert stopped.stderr.splitlines()[-1].startswith("tensorcache: photo 0003")
    assert not (tmp_path / "stopped" / "000003.tar").exists()
    assert not list((tmp_path / "stopped").glob(".*.tmp"))


def send(number: signal.Signals, *pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(pid, number)


def have_written(pid: int) -> bool:
    """Return whether two workers of an import have written: before, a stopped worker does not end with its parent."""
    with suppress(FileNotFoundError, ProcessLookupError):  # a worker has ended
        counts = [Path(f"/proc/{worker}/io").read_text() for worker in children_of(pid)]
        return len(counts) == 2 and not any("wchar: 0\n" in text for text in counts)
    return True


@contextmanager
def stopped_import(source: Path, out: Path) -> Iterator[tuple[Process, list[int], Output]]:
    """Start an import of 200 files of 80 KB, and stop its workers when both have written."""
    arguments = ["import", source, out, "--resume", "--max-samples", 4]
    for _ in range(20):
        with the_server().running(*arguments, cwd=source) as (process, said):
            wait_until(lambda: have_written(process.pid) or not is_alive(process.pid))
            workers = children_of(process.pid)
            send(signal.SIGSTOP, *workers)
            if len(workers) == 2 and len(list(out.glob("*.tar"))) < 30:
                yield process, workers, said
                return
            send(signal.SIGCONT, *workers)  # this process was not scheduled in time
            assert process.wait() == 0
            shutil.rmtree(out)
    pytest.fail("20 imports ended before their workers were stopped")


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def test_interrupt_while_workers_start(tmp_path: Path) -> None:
    source = write_files(tmp_path / "in", 200)
    with the_server().running("import", source, tmp_path / "out", "--max-samples", 4, cwd=source) as (process, said):
        wait_until(lambda: children_of(process.pid) or not is_alive(process.pid))
        send(signal.SIGINT, process.pid, *children_of(process.pid))
        assert process.wait() == 130
        assert b"Traceback" not in said.read()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """200 files of 80 KB, and the cache of an import without a signal; tests only read both."""
    folder = tmp_path_factory.mktemp("whole")
    run("import", write_files(folder / "in", 200, width=5000), folder / "out", "--max-samples", 4)
    return folder / "in", folder / "out"


@pytest.mark.parametrize(
    ("number", "victim", "status", "message"),
    [
        (signal.SIGKILL, "parent", -signal.SIGKILL, ""),
        (signal.SIGINT, "all", 130, "interrupted"),
        long(signal.SIGKILL, "first", 1, "a worker process was killed"),
        long(signal.SIGTERM, "second", 1, "a worker process was killed"),
        long(signal.SIGTERM, "parent", -signal.SIGTERM, ""),
        long(signal.SIGINT, "parent", 130, "interrupted"),
    ],
)
def test_signals(
    tmp_path: Path, whole: tuple[Path, Path], number: signal.Signals, victim: str, status: int, message: str
) -> None:
    """All processes end, also stopped ones; an interrupt of a terminal reaches all, and the parent decides."""
    source, expected = whole
    with stopped_import(source, tmp_path / "out") as (process, workers, output):
        victims = {"first": workers[:1], "second": workers[1:], "parent": [process.pid]}
        send(number, *victims.get(victim, [*workers, process.pid]))
        if status != -signal.SIGKILL:
            send(signal.SIGCONT, *workers)
        assert process.wait() == status
        said = output.read().decode()
    wait_until(lambda: not any(map(is_alive, workers)))
    assert message in said
    assert "Traceback" not in said
    run("import", source, tmp_path / "out", "--resume", "--max-samples", 4)
    compare(tmp_path / "out", expected)


def test_a_terminal_shows_progress(tmp_path: Path) -> None:
    """The thread of the bar starts after the workers."""
    source = write_files(tmp_path / "in", 40)
    found = the_server().run_on_terminal("import", source, tmp_path / "out", cwd=tmp_path)
    assert found.status == 0
    run("import", source, tmp_path / "plain")
    compare(tmp_path / "out", tmp_path / "plain")


def run_in_process(work: Callable[..., None], *arguments: object) -> None:
    """Call a function in a process that has a single thread and has not imported pyarrow, so that imports fork."""
    process = get_context("forkserver").Process(target=work, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


LIMITS = (0, 3_000, 40_000, 1_000_000)


def fill_disks(source: Path, folder: Path) -> None:
    """Import with limits of the length of files, which are errors before the last one; then resume."""
    for limit in LIMITS:

        def work() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: B023 called here
            tc.import_cache(source, folder / f"{limit}", on_error="skip", max_samples=30)  # noqa: B023

        assert run_in_child(work) == (errno.EFBIG if limit < LIMITS[-1] else 0)
        assert not list((folder / f"{limit}").glob("*.tmp"))
        tc.import_cache(source, folder / f"{limit}", max_samples=30, resume=True)


def test_a_full_disk(tmp_path: Path) -> None:
    source = write_files(tmp_path / "in", 61)
    run_in_process(fill_disks, source, tmp_path)
    run("import", source, tmp_path / "whole", "--max-samples", 30)
    for limit in LIMITS:
        compare(tmp_path / f"{limit}", tmp_path / "whole")


def use_few_descriptors(source: Path, folder: Path) -> None:
    """Import with few free descriptors, which all samples survive, or which are the error."""
    errors = []
    for num_free in (1, 4, 8, 12, 30):

        def work() -> None:
            limit_descriptors(num_free)  # noqa: B023 called here
            report = tc.import_cache(source, folder / f"{num_free}", on_error="skip")  # noqa: B023
            assert (report.num_skipped, report.num_written) == (0, 60)

        errors.append(run_in_child(work))
    assert set(errors) == {0, errno.EMFILE}
    assert errors == sorted(errors, reverse=True)


def test_few_descriptors(tmp_path: Path) -> None:
    """An import ends, and takes no good file for a bad one."""
    run_in_process(use_few_descriptors, write_files(tmp_path / "in", 60), tmp_path)
