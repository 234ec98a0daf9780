"""The corpus through its targets, without the fuzzer: no input that once broke a target breaks it again, whole or cut."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, run
from tests.hostile.pickles import little_memory

pytestmark = pytest.mark.filterwarnings("ignore:.*links to other files are not followed")
MAX_SECONDS = 1
# real encoder output, edge cases by hand, and what broke a target once (`found-…`)
FILES = sorted(path for path in (Path(__file__).parent / "corpus").rglob("*") if path.is_file())
CUTS = 12  # of each file, at offsets derived from its name; half of them for `verify`, which also repairs each

each = pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name}")


def check(target: str, data: bytes) -> None:
    began = time.process_time()
    run(target, data)
    assert time.process_time() - began < MAX_SECONDS


@each
def test_target(path: Path) -> None:
    target, data = path.parent.name, path.read_bytes()
    check(target, data)
    with little_memory(2_000_000 + 200 * len(data)):
        check(target, data)


@each
def test_cut_and_damaged(path: Path) -> None:
    target, data = path.parent.name, path.read_bytes()
    places = random.Random(path.name)
    for _ in range((CUTS // 2 if target == "verify" else CUTS) if data else 0):
        at = places.randrange(len(data))
        check(target, data[:at])
        check(target, data[:at] + bytes([data[at] ^ 1 << places.randrange(8)]) + data[at + 1 :])


def test_each_target_has_files() -> None:
    assert TARGETS.keys() == {path.parent.name for path in FILES}
