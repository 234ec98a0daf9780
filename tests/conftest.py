"""Fixtures: samples from a seed that a failure prints, and shards in `tmp_path`."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import pkgutil
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc

# Keep no indexes of remote shards in the folder of the user, also in child processes.
os.environ["TENSORCACHE_INDEXES"] = "off"

# A shell lets what it starts in the background ignore interrupts, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# For each worker process of an iteration that an error ended, torch waits for half a second, not for five.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5

# Whichever test starts the process of "forkserver", it imports torch and the commands, so that its children need not.
FOLDER = f"{Path(tc.__file__).parent}/cli"
COMMANDS = [module.name for module in pkgutil.walk_packages([FOLDER], "wds_tensorcache.cli.")]
MODULES = ["wds_tensorcache.checking.repair", "wds_tensorcache.training", "tests.remote.written"]
multiprocessing.set_forkserver_preload([name for name in COMMANDS if not name.endswith("__main__")] + MODULES)

if importlib.util.find_spec("hypothesis"):  # the `gpu` tests run where it cannot be installed
    from hypothesis import HealthCheck, settings

    # The default profile tries the same examples in each run; `pytest --hypothesis-profile=random` tries new ones.
    settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
    settings.register_profile("ci", settings.get_profile("random"), derandomize=True)
    settings.load_profile("ci")


# Ten thousand tests are collected in two thirds of the time without garbage collections, each of which looks at all of them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """Exempt what exists before a module's tests from garbage collection: with it, each collection takes a second.

    It stays exempt, so that the collection before the next module is short, too.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def cache(folder: Path | str) -> Iterator[tc.TensorCache]:
    """The cache in the fixture `folder` of a module."""
    with tc.open(folder) as opened:
        yield opened


class Seeded(random.Random):
    """A generator whose repr, and so every failing test's output, shows its seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed_value = seed

    def __repr__(self) -> str:
        return f"Seeded({self.seed_value})"


@pytest.fixture
def rng() -> Seeded:
    return Seeded(20240607)


def diffusion_sample(index: int) -> dict[str, Any]:
    """A small sample in the shape that diffusion trainers use."""
    generator = torch.Generator().manual_seed(index)
    latent = torch.randn(1, 4, 8, 8, generator=generator).half()
    text = torch.randn(1, 5, 16, generator=generator).bfloat16()
    pooled = torch.randn(1, 16, generator=generator)
    return {
        "latent": {"samples": latent},
        "cond": [[text, {"pooled_output": pooled, "prompt": f"photo {index}", "size": (64, 48)}]],
    }


@pytest.fixture
def write_shard(tmp_path: Path) -> Callable[..., str]:
    """Write samples with webdataset's own TarWriter; returns the path."""

    def write(samples: list[dict[str, Any]], name: str = "shard.tar", **encoder: Any) -> str:
        path = str(tmp_path / name)
        with wds.TarWriter(path, encoder=tc.encoder(**encoder), mtime=0) as sink:
            for sample in samples:
                sink.write(sample)
        return path

    return write


@pytest.fixture
def shard(write_shard: Callable[..., str]) -> str:
    """Ten samples with a json member each."""
    return write_shard(
        [{"__key__": f"{i:03d}", "tensorcache": diffusion_sample(i), "json": {"label": i}} for i in range(10)]
    )


@pytest.fixture
def gnu_tar() -> str:
    """The path of GNU tar."""
    path = shutil.which("tar")
    if path is None or "GNU tar" not in subprocess.run([path, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("GNU tar is missing: apt install tar")
    return path
