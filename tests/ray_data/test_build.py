"""Caches built by actors: exact, resumed by key on the same fingerprint, and complete although workers are killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.data
import torch

import wds_tensorcache as tc
from tests.same import assert_same

pytestmark = pytest.mark.long
MADE = {"model": "scale", "factor": 3}


def expected(i: int) -> dict[str, Any]:
    return {"y": torch.full((2, 3), 3.0 * i).bfloat16(), "list": [torch.arange(i % 5 + 1)], "text": f"item {i}"}


class Scale:
    """A model that notes the keys of its batches in a folder, and fails as it is told."""

    def __init__(self, notes: Path, *, fails_at: int = -1, dies_at: int = -1) -> None:
        self.notes, self.fails_at, self.dies_at = notes, fails_at, dies_at

    def __call__(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        numbers = batch["id"].tolist()
        if self.dies_at in numbers and not (self.notes / "died").exists():
            (self.notes / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fails_at in numbers:
            raise ZeroDivisionError(f"no sample {self.fails_at}")
        for i in numbers:
            with open(self.notes / f"computed-{i}", "a") as file:
                file.write("x")
        assert torch.equal(batch["x"][:, 0], batch["id"].float())
        return [expected(i) for i in numbers]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


def items(count: int, num_blocks: int = 6) -> Any:
    rows = [{"id": i, "x": np.full(4, i, np.float32)} for i in range(count)]
    return ray.data.from_items(rows, override_num_blocks=num_blocks)


def build(notes: Path, out: Path, count: int = 60, **options: Any) -> Any:
    model = {name: options.pop(name) for name in ("fails_at", "dies_at") if name in options}
    options = {"fingerprint": MADE, "key": "id", "batch_size": 8, "min_samples": 10, "max_samples": 10, **options}
    maker = options.pop("model", Scale)
    return tc.ray.build_ray(items(count), maker, out, model_args=[notes], model_kwargs=model, **options)


def check(cache: Any, count: int = 60) -> None:
    assert sorted(map(int, cache.keys())) == list(range(count))
    for i in range(count):
        assert_same(expected(i), cache[str(i)])


def times_computed(notes: Path) -> dict[int, int]:
    return {int(path.name.partition("-")[2]): len(path.read_text()) for path in notes.glob("computed-*")}


def test_build(notes: Path, tmp_path: Path) -> None:
    cache = build(notes, tmp_path / "out", concurrency=2)
    check(cache)
    assert cache.fingerprint == MADE
    assert times_computed(notes) == dict.fromkeys(range(60), 1)
    with pytest.raises(tc.StaleCacheError, match="factor"):
        build(notes, tmp_path / "out", fingerprint={"model": "scale", "factor": 4})
    with pytest.raises(TypeError, match="max_sample"):
        build(notes, tmp_path / "out", max_sample=3)
    check(build(notes, tmp_path / "out", 70), 70)
    assert times_computed(notes) == dict.fromkeys(range(70), 1)
    assert tc.verify(tmp_path / "out").ok


def test_a_failing_model_and_a_killed_actor(notes: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError, match="no sample 55"):
        build(notes, out, fails_at=55, min_samples=5, max_samples=5)
    check(build(notes, out, dies_at=58))
    assert (notes / "died").exists()


_DRIVER = """
import sys
from pathlib import Path
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
from tests.ray_data.test_build import Slow, build
build(Path(sys.argv[2]), Path(sys.argv[3]), model=Slow)
"""


class Slow(Scale):
    def __call__(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        time.sleep(0.3)
        return super().__call__(batch)


def test_a_killed_driver(notes: Path, tmp_path: Path) -> None:
    """The next build takes the finished shards, and does not compute their samples again."""
    out = tmp_path / "out"
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, address, notes, out], cwd=Path(__file__).parents[2])
    try:
        while not list(out.glob("part-*.tar")):
            assert driver.poll() is None
            time.sleep(0.02)
    finally:
        driver.kill()
        driver.wait()
    check(build(notes, out))
    assert min(times_computed(notes).values()) == 1
    assert tc.verify(out).ok


def test_shards_of_killed_builds_with_the_same_samples(notes: Path, tmp_path: Path) -> None:
    """Two attempts of a task may have finished; each sample is there once, and markers without a lock do not count."""
    out = tmp_path / "out"
    out.mkdir()
    for name, count in (("a", 20), ("b", 30)):
        build(notes, tmp_path / name, count).close()
        for path in (tmp_path / name).glob("part-*"):
            shutil.copy(path, out)
    (out / ".ray-01234567.writing").touch()
    check(build(notes, out, 40), 40)
    assert tc.verify(out).ok
    assert not list(out.glob(".*"))


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (lambda batch: [{}], ValueError, "expected one row"),
        (lambda batch: [*([{}] * 19), {"x": object()}], tc.EncodeError, "sample '19'"),
    ],
    ids=["too few samples", "an object"],
)
def test_wrong_samples(tmp_path: Path, function: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        tc.ray.build_ray(items(20, 1), lambda: function, tmp_path / "out", fingerprint={}, key="id")
    assert list((tmp_path / "out").iterdir()) == []
