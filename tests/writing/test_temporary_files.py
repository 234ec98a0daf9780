"""An interrupt at any line of what makes temporary files: they go, and what has a name is whole."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.shards.damage import write
from wds_tensorcache.storage.atomic import write_atomically
from wds_tensorcache.storage.output import Output

FILES = ("atomic.py", "contextlib.py", "locks.py", "manifest.py", "new_folder.py", "output.py", "repair.py")


def is_interrupted(work: Callable[[], Any], number: int, files: tuple[str, ...] = FILES) -> bool:
    """Raise KeyboardInterrupt at line `number` of the files, counted as they are run; return whether there was one."""
    left, is_raised = number, False
    entered: set[tuple[int, int]] = set()  # by id: a frame that is kept keeps what it would drop

    def look(frame: Any, event: str, _: Any) -> Any:
        nonlocal left, is_raised
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "return":
            entered.difference_update([each for each in entered if each[0] == id(frame)])
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and line.startswith("with "):
            # the second time it is left: no signal comes between the end of a body and `__exit__`, if that is in C
            if (id(frame), frame.f_lineno) in entered:
                return look
            entered.add((id(frame), frame.f_lineno))
        if event == "line" and not is_raised:
            if not left:
                is_raised = True
                raise KeyboardInterrupt
            left -= 1
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return is_raised


def by_writer(folder: Path) -> None:
    with tc.ShardWriter(folder / "%d.tar", fsync=False) as sink:
        sink.write("0", {"x": 1})


def by_output(folder: Path) -> None:
    output = Output(str(folder / "x"), fsync=False)
    try:
        output.append([b"new"], 3)
        output.finish()
    except BaseException:
        output.drop()
        raise


WORK: dict[str, Callable[[Path], Any]] = {
    "write_atomically": lambda folder: write_atomically(str(folder / "x"), [b"new"]),
    "output": by_output,
    "writer": by_writer,
    "index": lambda folder: tc.write_index(folder / "000000.tar", footer=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WORK)
def test_interrupted_at_any_line(tmp_path: Path, name: str) -> None:
    write(tmp_path / "before", 1, footer=False)
    (tmp_path / "before" / "x").write_bytes(b"old")
    # in a child: where a trace function raises, the interpreter may keep what the line held, a lock say
    found = tmp_path / "found"
    assert run_in_child(lambda: found.write_text(json.dumps(interrupt_each_line(tmp_path, WORK[name])))) == 0
    number, left, changed = json.loads(found.read_text())
    assert number > 20
    assert not left
    assert not changed


def interrupt_each_line(tmp_path: Path, work: Callable[[Path], Any]) -> tuple[int, list[Any], list[int]]:
    """Return how many lines there are, which of them left temporary files, and which damaged the old file."""
    number, left, changed = 0, [], []
    while True:
        folder = shutil.copytree(tmp_path / "before", tmp_path / f"{number}")
        if not is_interrupted(lambda: work(folder), number):  # noqa: B023
            return number, left, changed
        left += [(number, each) for each in os.listdir(folder) if each.endswith(".tmp")]
        if (folder / "x").read_bytes() not in (b"old", b"new"):
            changed.append(number)
        shutil.rmtree(folder)
        number += 1


@pytest.mark.parametrize("size", [10, 5000])
def test_a_writer_that_continues_after_an_interrupt_writes_no_damaged_shard(tmp_path: Path, size: int) -> None:
    found = tmp_path / "found"
    assert run_in_child(lambda: found.write_text(json.dumps(continue_after_each_line(tmp_path, size)))) == 0
    number, damaged = json.loads(found.read_text())
    assert number > 20
    assert not damaged


def continue_after_each_line(tmp_path: Path, size: int) -> tuple[int, list[Any]]:
    """Return how many lines of writing there are, and those after which a finished shard was damaged."""
    number, damaged = 0, list[Any]()
    while True:
        folder = tmp_path / f"{number}"

        def work(folder: Path = folder) -> None:
            sink = tc.ShardWriter(folder / "%d.tar", fsync=False)
            for i in range(3):
                with contextlib.suppress(KeyboardInterrupt, OSError):
                    sink.write(f"{i}", {"x": torch.full((size,), i)})
            with contextlib.suppress(KeyboardInterrupt, OSError):
                sink.close()

        if not is_interrupted(work, number, ("unfinished_shard.py", "index_builder.py", "output.py")):
            return number, damaged
        if list(folder.glob("*.tar")) and not tc.verify(folder).ok:
            damaged.append((number, str(tc.verify(folder))))
        shutil.rmtree(folder)
        number += 1
