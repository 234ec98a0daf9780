"""New samples take the places of old ones at once: whenever a writer is killed, readers see old, new, or an error."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.building.test_build import COUNT, MADE, Numbers, build, digest, double
from tests.kills import compare
from tests.same import assert_same
from wds_tensorcache.shards.manifest import read_manifest
from wds_tensorcache.storage.output import Output

CHANGES = {
    "some": Numbers((0, 7, 8, 9, 13, 22)),
    "some, and more are added": Numbers((0, 1, 2, 3, 4, 13), COUNT + 8),
    "all": Numbers(tuple(range(COUNT))),
}
STEPS = ("replace", "rename", "remove")  # of os: what others can see, and a kill can come between


def rebuild(folder: Path, source: Numbers, **options: Any) -> None:
    build(source, folder, digest=digest, **options).close()


def values(source: Numbers) -> dict[str, int]:
    return {f"{i:09d}": source[i]["value"] for i in range(len(source))}


def look(folder: Path, source: Numbers, refusals: Any = tc.FormatError) -> int:
    """Assert that a reader sees the old state (0), an error (1) or the new state (2), and return which."""
    try:
        with tc.open(folder, expect=MADE) as cache:
            keys = list(cache.keys())
            samples = [tc.realize(cache[row]) for row in range(len(cache))]
    except refusals:
        return 1
    assert len(set(keys)) == len(keys)
    found = {key: sample["of"] for key, sample in zip(keys, samples, strict=True)}
    for sample in samples:
        assert_same(double([{"value": sample["of"]}])[0], sample)
    assert found in (values(Numbers()), values(source))
    return 2 if found == values(source) else 0


def in_a_child(work: Callable[[], Any]) -> int:
    """Do something in another process, and return its number."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def end_of(child: int) -> bool:
    """Wait for a process, and return whether it was killed."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def stop_at(step: int) -> None:
    """Let this process be killed instead of the renames and deletions from the `step`-th on."""
    done = 0

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def stop_or_call(*arguments: Any) -> None:
            nonlocal done
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            call(*arguments)

        return stop_or_call

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))


def killed_at(step: int, folder: Path, source: Numbers, **options: Any) -> bool:
    """Build again until some step, and return whether it came to that."""

    def work() -> None:
        stop_at(step)
        rebuild(folder, source, **options)

    return end_of(in_a_child(work))


def prepare(folder: Path, source: Numbers, again: dict[str, Any] | None = None, **options: Any) -> tuple[Path, Path]:
    """Return an old cache, and what becomes of it where nothing is killed."""
    build(Numbers(), folder / "old", digest=digest, **options).close()
    shutil.copytree(folder / "old", folder / "whole")
    rebuild(folder / "whole", source, **options, **again or {})
    assert look(folder / "whole", source) == 2
    return folder / "old", folder / "whole"


@pytest.mark.parametrize(
    ("change", "options"),
    [*((change, {}) for change in CHANGES), ("some, and more are added", {"footer": False}), ("some", {"idx": False})],
    ids=str,
)
def test_killed_at_every_step(tmp_path: Path, change: str, options: dict[str, Any]) -> None:
    """Killed once at each step, then wherever chance says, until it is done."""
    source, chance = CHANGES[change], random.Random(3)
    old, whole = prepare(tmp_path, source, **options)
    seen: list[int] = []
    step, is_killed = 0, True
    while is_killed:
        folder = tmp_path / f"{step}"
        shutil.copytree(old, folder)
        is_killed = killed_at(step, folder, source, **options)
        states = [look(folder, source)]
        seen += states
        if is_killed:
            for _ in range(2):
                killed_at(chance.randrange(12), folder, source, **options)
                states.append(look(folder, source))
            assert states == sorted(states), f"step {step}: {states}"  # what is new never becomes old again
            rebuild(folder, source, **options)
        compare(folder, whole)
        shutil.rmtree(folder)
        step += 1
    assert step > 8
    assert seen == sorted(seen)
    assert set(seen) == ({0, 2} if change == "all" else {0, 1, 2})  # where no old shard stays, one rename does it all


@pytest.mark.parametrize("change", CHANGES)
def test_killed_at_random(tmp_path: Path, change: str) -> None:
    source, chance = CHANGES[change], random.Random(2)
    old, whole = prepare(tmp_path, source, {"max_samples": 2})
    for number, longest in enumerate((0.03, 0.05, 0.1)):
        folder = tmp_path / f"{number}"
        shutil.copytree(old, folder)
        states = [0]
        for _ in range(15):
            child = in_a_child(lambda folder=folder: rebuild(folder, source, max_samples=2))  # type: ignore[misc]
            time.sleep(chance.uniform(0, longest))
            os.kill(child, signal.SIGKILL)
            end_of(child)
            states.append(look(folder, source))
        assert states == sorted(states)
        rebuild(folder, source, max_samples=2)
        assert look(folder, source) == 2
        compare(folder, whole)


@pytest.mark.parametrize("change", CHANGES)
def test_readers_meanwhile(tmp_path: Path, change: str) -> None:
    """Another process builds; shards that were listed a moment ago may be gone."""
    source = CHANGES[change]
    old, whole = prepare(tmp_path, source)
    child = in_a_child(lambda: rebuild(old, source, fsync=True))
    states = [0]
    while not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        states.append(look(old, source, (tc.FormatError, FileNotFoundError)))
    assert not end_of(child)
    states.append(look(old, source))
    assert states[-1] == 2
    assert [state for state in states if state != 1] == sorted(state for state in states if state != 1)
    compare(old, whole)


def test_an_exception_in_between(tmp_path: Path) -> None:
    """What was finished before is listed when the next writer is closed, whichever it is."""
    source = CHANGES["some"]
    old, _ = prepare(tmp_path, source)

    def broken(items: list[Any]) -> Any:
        if any(item["value"] == 122 for item in items):
            raise ZeroDivisionError("of the model")
        return double(items)

    with pytest.raises(ZeroDivisionError):
        build(source, old, broken, digest=digest, max_samples=2, batch_size=3)
    assert look(old, source) == 0
    with tc.ShardWriter(old / "%06d.tar", fingerprint=MADE, resume=True, fsync=False) as sink:
        sink.write("other", {"of": 5})
    cache = tc.open(old)
    assert sorted(cache.keys()) == [*sorted(values(source)), "other"]
    assert {key: cache[key]["of"] for key in values(source)} == values(Numbers((0, 7)))
    assert tc.verify(old)
    rebuild(old, source)
    with tc.open(old) as cache:
        assert {key: cache[key]["of"] for key in values(source)} == values(source)
    assert list(read_manifest(str(old / "manifest.json"))[1]) == ["version", "caches", "fingerprints"]


@pytest.mark.parametrize("step", range(0, 16, 2))
def test_changed_again_before_it_was_done(tmp_path: Path, step: int) -> None:
    source = CHANGES["some, and more are added"]
    old, _ = prepare(tmp_path, source)
    assert killed_at(step, old, source)
    for last in (Numbers((0, 5)), Numbers((1,), COUNT + 3)):
        rebuild(old, last)
        with tc.open(old, expect=MADE) as cache:
            found = {key: cache[key]["of"] for key in cache.keys()}  # noqa: SIM118
        assert {key: found[key] for key in values(last)} == values(last)
        assert tc.verify(old)


def test_a_switch_that_was_killed_goes_first(tmp_path: Path) -> None:
    """Readers do not wait for what the next writer has to do besides."""
    source = CHANGES["some"]
    old, whole = prepare(tmp_path, source)
    num_refused, step = 0, 0
    while killed_at(step, folder := shutil.copytree(old, tmp_path / f"{step}"), source):
        state, step = look(folder, source), step + 1
        tc.ShardWriter(folder / "%06d.tar", fingerprint=MADE, resume=True, fsync=False)  # and dies
        assert look(folder, source) == (2 if state else 0)
        num_refused += state == 1
        if state:
            compare(folder, whole)
    assert num_refused > 5


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While old shards are written again: they stay, and what was written goes."""
    source = CHANGES["some"]
    old, whole = prepare(tmp_path, source)
    complete, done = Output.complete, 0

    def fail(output: Output, fsync: bool) -> None:
        nonlocal done
        done += output.path.endswith("2.tar")
        if done:
            raise OSError(errno.ENOSPC, "no space left")
        complete(output, fsync)

    monkeypatch.setattr(Output, "complete", fail)
    with pytest.raises(OSError, match="no space left"):
        rebuild(old, source)
    monkeypatch.undo()
    assert look(old, source) == 0
    assert not [name for name in os.listdir(old) if name.endswith(".tmp")]
    rebuild(old, source)
    compare(old, whole)


def test_without_a_manifest(tmp_path: Path) -> None:
    source = CHANGES["some"]
    old, whole = prepare(tmp_path, source, manifest=False)
    step = 0
    while killed_at(step, shutil.copytree(old, tmp_path / f"{step}"), source, manifest=False):
        rebuild(tmp_path / f"{step}", source, manifest=False)
        compare(tmp_path / f"{step}", whole)
        step += 1
    assert step > 10


def test_a_writer_alone(tmp_path: Path) -> None:
    """Older samples of a key that is written again go when the writer is closed, once."""
    for values_of, replaced in (({"a": 1, "b": 1}, ""), ({"a": 2, "c": 2}, "a"), ({"c": 3}, "cb")):
        sink = tc.ShardWriter(tmp_path / "%d.tar", resume=True, fsync=False)
        for key in replaced:
            sink.replace(key)
        for key, value in values_of.items():
            sink.write(key, {"of": value})
        sink.close()
        sink.close()
    cache = tc.open(tmp_path)
    assert {key: cache[key]["of"] for key in cache.keys()} == {"a": 2, "b": 1, "c": 3}  # noqa: SIM118
    assert tc.verify(tmp_path)


def test_one_key_in_several_shards(tmp_path: Path) -> None:
    """That they are several is no replacement, unless a writer has said so."""
    for name in ("0.tar", "1.tar"):
        with tc.ShardWriter(tmp_path / name, fsync=False, manifest=False) as sink:
            sink.write("a", {"of": name})
    tc.ShardWriter(tmp_path / "%d.tar", resume=True, fsync=False).close()
    assert list(tc.open(tmp_path).keys()) == ["a", "a"]
    (tmp_path / "manifest.json").unlink()
    tc.ShardWriter(tmp_path / "%d.tar", resume=True, fsync=False).close()
    assert list(tc.open(tmp_path).keys()) == ["a", "a"]


def test_only_shards_of_the_pattern_are_deleted(tmp_path: Path) -> None:
    """A manifest is a file like any other: what it says is gone is not deleted where it is listed, or is no shard of ours."""
    with tc.ShardWriter(tmp_path / "x" / "%d.tar", fsync=False) as sink:
        sink.write("a", {"of": 1})
    names = ["../other.tar", "other.tar", "00.tar", "1.tar"]
    for name in names:
        (tmp_path / "x" / name).write_bytes(b"")
    path = tmp_path / "x" / "manifest.json"
    text = path.read_text()
    path.write_text(
        text.replace('"version": 1', '"version": 1, "gone": ["../other.tar", "other.tar", "00.tar", "0.tar", "1.tar"]')
    )
    tc.ShardWriter(tmp_path / "x" / "%d.tar", fsync=False, resume=True).close()
    assert [name for name in names if not (tmp_path / "x" / name).exists()] == ["1.tar"]
    assert list(tc.open(tmp_path / "x").keys()) == ["a"]
