"""`progress=` of `verify` and `repair`: a function or a bar of tqdm, which reaches the bytes of all shards."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.shards.damage import flip, members, write


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
    assert re.search("verify: 100%.*B/s", capsys.readouterr().err)
    tc.repair(tmp_path / "a", tmp_path / "b", progress=True)
    assert "repair: 100%" in capsys.readouterr().err
    tc.verify(tmp_path / "a")  # stderr is not a terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    tc.verify(tmp_path / "a")
    assert not capsys.readouterr().err
    with pytest.raises(ImportError, match="progress=True needs tqdm: pip install tqdm"):
        tc.verify(tmp_path / "a", progress=True)


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
