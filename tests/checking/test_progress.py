"""`progress=` of `verify` and `repair`: a function or a bar of tqdm, which reaches the bytes of all shards."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.shards.damage import flip, members, write
from wds_tensorcache.checking.progress import ByteProgress
from wds_tensorcache.checking.shard_check import check_shard
from wds_tensorcache.storage.readahead import Readers
from wds_tensorcache.storage.threads import run_in_order


class Patient:
    """A class in skeletons; building its second object waits until `progress` was called in the middle of the shard."""

    called = threading.Event()
    num_built = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        Patient.num_built += 1
        if Patient.num_built == 2:
            assert self.called.wait(20)


class Calls(list[tuple[int, int]]):
    """A function for `progress=` that records its calls, all of which must come from one thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def __call__(self, done: int, total: int) -> None:
        assert threading.get_ident() == self.thread
        self.append((done, total))

    def check(self, total: int) -> None:
        assert self[0] == (0, total)
        assert self[-1] == (total, total)
        assert self == sorted(set(self))
        assert {each for _, each in self} == {total}


def nbytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.tar"))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_functions(tmp_path: Path, num_threads: int) -> None:
    folder = tmp_path / "a"
    write(folder, 40, per_shard=10)
    calls = Calls()
    assert tc.verify(folder, num_threads=num_threads, progress=calls).ok
    calls.check(nbytes_of(folder))
    assert len(calls) >= 5  # the beginning, and each shard
    calls = Calls()
    report = tc.repair(folder, tmp_path / "b", num_threads=num_threads, progress=calls)
    assert report.num_samples_written == 40
    calls.check(2 * nbytes_of(folder))
    assert len(calls) >= 9


def test_damaged_and_missing_shards(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    path = write(folder, 30, per_shard=10)
    (folder / "000001.tar").unlink()
    (folder / "000002.tar").write_bytes(b"")
    for begin, _ in members(path).values():
        flip(path, begin)  # two passes, and nothing is left to write
    calls = Calls()
    report = tc.verify(folder, progress=calls)
    assert report.faults == tc.verify(folder).faults
    calls.check(nbytes_of(folder))
    calls = Calls()
    tc.repair(folder, tmp_path / "b", progress=calls)
    calls.check(2 * nbytes_of(folder))
    calls = Calls()
    with pytest.raises(tc.FormatError, match="drop=False"):
        tc.repair(folder, tmp_path / "c", drop=False, progress=calls)
    assert calls[-1] == (nbytes_of(folder), 2 * nbytes_of(folder))


def test_an_error_of_the_function_ends_the_call(tmp_path: Path) -> None:
    write(tmp_path / "a", 30, per_shard=10)

    def fail(done: int, total: int) -> None:
        if done:
            raise OSError("not a fault of a shard")

    for num_threads in (1, 3):
        with pytest.raises(OSError, match="not a fault of a shard"):
            tc.verify(tmp_path / "a", num_threads=num_threads, progress=fail)
        with pytest.raises(OSError, match="not a fault of a shard"):
            tc.repair(tmp_path / "a", tmp_path / "b", num_threads=num_threads, progress=fail)
    assert not (tmp_path / "b").exists()


def test_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", 30, per_shard=10)
    tc.verify(tmp_path / "a", progress=True)
    shown = capsys.readouterr().err
    assert "verify: 100%" in shown
    assert "B/s" in shown
    tc.repair(tmp_path / "a", tmp_path / "b", progress=True)
    assert "repair: 100%" in capsys.readouterr().err
    tc.verify(tmp_path / "a", progress=False)
    tc.verify(tmp_path / "a")  # stderr is not a terminal
    assert not capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tc.verify(tmp_path / "a")
    assert "verify: 100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert tc.verify(tmp_path / "a").ok
    assert not capsys.readouterr().err
    with pytest.raises(ImportError, match="progress=True needs tqdm: pip install tqdm"):
        tc.verify(tmp_path / "a", progress=True)


def test_samples_of_one_large_shard_count(tmp_path: Path) -> None:
    path = write(tmp_path, 100)
    offsets: list[int] = []
    check_shard(str(path), {}, Readers(), offsets.append)
    assert len(offsets) == 100
    assert offsets == sorted(offsets)
    assert path.stat().st_size // 2 < offsets[-1] <= path.stat().st_size


def test_one_thread_shows_progress_within_a_shard(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path, fsync=False, allow=[Patient]) as sink:
        for i in range(3):
            made = Patient()
            made.x = i  # type: ignore[attr-defined]
            sink.write(str(i), {"it": made})
    path = tmp_path / "000000.tar"

    def note(done: int, total: int) -> None:
        if 0 < done < total:
            Patient.called.set()

    Patient.called.clear()
    Patient.num_built = 0
    assert tc.verify(path, num_threads=1, allow=[Patient], progress=note).ok
    assert Patient.num_built == 3


def test_the_caller_is_called_while_it_waits() -> None:
    """The job ends only after the caller was called three times."""
    calls: list[int] = []
    has_been_called = threading.Event()

    def meanwhile() -> None:
        calls.append(threading.get_ident())
        if len(calls) == 3:
            has_been_called.set()

    with ThreadPoolExecutor(1, "test") as pool:
        found = list(run_in_order([1, 2], lambda job: has_been_called.wait(20) and job, pool, 1, meanwhile))
    assert found == [1, 2]
    assert set(calls) == {threading.get_ident()}


@given(
    st.dictionaries(st.text("ab", max_size=3), st.integers(0, 100), max_size=6),
    st.lists(st.integers(0, 150)),
    st.randoms(),
)
def test_done_never_falls_and_never_exceeds_the_total(nbytes: dict[str, int], offsets: list[int], rng: Any) -> None:
    calls: list[tuple[int, int]] = []
    progress = ByteProgress(lambda done, total: calls.append((done, total)), "test", rounds=2)
    progress.begin(nbytes)
    for number in range(2):
        if number:
            progress.begin_next()
        for offset in offsets if nbytes else ():
            progress.reach(rng.choice(sorted(nbytes)), offset)
            progress.show()
        progress.finish_round()
    assert calls == sorted(set(calls))
    assert calls[-1] == (2 * sum(nbytes.values()),) * 2
