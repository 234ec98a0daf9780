"""One cluster of Ray for all tests of this folder, and caches that it reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ray_kills import cluster
from tests.reading.batches import write as write_samples
from tests.remote.conftest import _write_process, write_server  # noqa: F401
from tests.remote.servers.write_server import WriteServer

pytest.importorskip("ray", reason="ray is missing: pip install 'wds-tensorcache[ray]'")


@pytest.fixture(scope="package")  # it ends before tests of other folders, which start one, too
def _cluster(_write_process: WriteServer) -> Iterator[None]:  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _write_process.environment.items():  # for the workers
            patch.setenv(name, value)
        with cluster():
            yield


@pytest.fixture(autouse=True)
def _on_cluster(_cluster: None) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=ResourceWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="ray")
        warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
        yield


def by_key(dataset: Any) -> list[dict[str, Any]]:
    """Return all rows in the order of their keys; Ray gives them in the order in which tasks end."""
    return sorted(dataset.take_all(), key=lambda row: row["__key__"])


def in_order(sample: Any) -> Any:
    """Return nested dicts with their keys in order: rows have the columns of tensors before others."""
    return {key: in_order(sample[key]) for key in sorted(sample, key=repr)} if type(sample) is dict else sample


def every_kind(i: int) -> dict[str, Any]:
    """A sample with every kind of column: of one shape, ragged, optional, without dimensions, without elements, of values."""
    generator = torch.Generator().manual_seed(i)
    sample: dict[str, Any] = {
        "latent": torch.randn(4, 8, 8, generator=generator).half(),
        "cond": [
            [
                torch.randn(3 + i % 4, 16, generator=generator).bfloat16(),
                {"pooled": torch.randn(16, generator=generator).bfloat16(), "prompt": f"photo {i}", "size": (64, i)},
            ]
        ],
        "float8": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
        "bools": torch.rand(11, generator=generator) > 0.5,
        "complex": torch.randn(2, dtype=torch.complex64, generator=generator),
        "number": torch.tensor(i + 0.5).bfloat16(),
        "empty": torch.empty(0, 3),
        "texts": np.array(["ab", "é€"]),
        "dates": np.array(["2020-01-01", f"{2000 + i}-02-03"], "M8[D]"),
        "i": i,
        "weight": i / 3,
        "raw": bytes([i]),
    }
    if i % 3:
        sample["mask"] = torch.full((8, 8), i, dtype=torch.uint8)
        sample["cond"].append(torch.arange(i, dtype=torch.int64))
    if i % 4 == 1:
        sample["note"] = None
    return sample


@pytest.fixture(scope="session")
def every_kind_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty samples in three shards."""
    folder = tmp_path_factory.mktemp("ray") / "cache"
    write_samples(folder / "%06d.tar", {f"{i:04d}": every_kind(i) for i in range(40)}, max_samples=15)
    return folder


@pytest.fixture
def write_cache(tmp_path: Path) -> Callable[..., Path]:
    """Write samples by number into a folder."""

    def write(sample: Callable[[int], Any], count: int, **options: Any) -> Path:
        write_samples(tmp_path / "cache" / "%06d.tar", {f"{i:04d}": sample(i) for i in range(count)}, **options)
        return tmp_path / "cache"

    return write
