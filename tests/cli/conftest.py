"""The command line, a cache to look at, and caches that are damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.cli.commands import Result, Server, the_server
from tests.reading.batches import write

pytest.importorskip("click")
pytest.importorskip("rich")

# all that a terminal might obey, or that could forge a line
HOSTILE = (
    "red \x1b[31m title \x1b]0;owned\x07 up \x9b1A line\nforged: line\r back\x08 \u202egnp.\u2066 zero\u200bwidth \x7f"
)


@pytest.fixture(scope="session")
def server() -> Server:
    return the_server()


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Callable[..., Result]:
    """Run `tensorcache` with arguments in `tmp_path`."""
    return lambda *arguments, **environment: server.run(*arguments, cwd=tmp_path, **environment)


@pytest.fixture
def on_terminal(server: Server, tmp_path: Path) -> Callable[..., Result]:
    """Run `tensorcache` on a pseudo-terminal."""
    return lambda *arguments, **options: server.run_on_terminal(*arguments, cwd=tmp_path, **options)


def make_sample(i: int) -> dict[str, Any]:
    ramp = torch.linspace(-1, 1, 16 * 16).reshape(1, 16, 16)
    return {
        "latents": torch.cat([ramp * (i + 1), ramp.transpose(1, 2)]).bfloat16(),
        "text": {"states": torch.full((3 + i % 2, 40), 0.5 + i), "mask": torch.arange(6) < 4},
        "size": (64, 48),
        "crop": np.array([0, 1, 2, 3]),
        "prompt": f"photo {i}",
        "zeros": torch.zeros(100),
    }


@pytest.fixture(scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caches") / "cache"
    samples = {tc.safe_key(f"photos/{i:03d} a"): make_sample(i) for i in range(10)}
    options: Any = {"max_samples": 4, "fingerprint": {"model": "vae"}}
    write(folder / "%d.tar", samples, lambda i: {"json": {"label": i}, "jpg": b"\xff\xd8\xff" + bytes(20)}, **options)
    return folder


@pytest.fixture
def cache(_cache: Path, tmp_path: Path) -> Path:
    """A cache of ten samples in three shards, in `tmp_path`."""
    return Path(shutil.copytree(_cache, tmp_path / "cache"))


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A cache whose names, values and members contain what a terminal would obey."""
    sample = {
        HOSTILE: torch.tensor([1.0, float("nan"), float("inf")] * 8),
        "prompt": HOSTILE,
        "list": [HOSTILE, {HOSTILE: (HOSTILE,)}],
        "array": np.array([HOSTILE, "b"]),
    }
    fingerprint = {HOSTILE: HOSTILE}
    write(tmp_path / "hostile/0.tar", {"a": sample, "b": sample}, lambda i: {"txt": HOSTILE}, fingerprint=fingerprint)
    return tmp_path / "hostile"
