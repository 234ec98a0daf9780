"""Ranks from torch.distributed, of groups and meshes: two real processes with gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import wds_tensorcache as tc
from tests.children import finish, start
from tests.reading.batches import folder_of
from tests.training.loaders import keys

path = folder_of([{"x": torch.tensor(i)} for i in range(21)], max_samples=21)


def check_late(path: str, store: Path, rank: int) -> None:
    cache = tc.open(path)
    loaders: dict[str, Any] = {
        "new": tc.Loader(cache, 4, shuffle=True),
        "torch": tc.torch_loader(cache, 4, shuffle=True),
        "resumed": tc.Loader(cache, 4, shuffle=True, last_batch="drop"),
        "explicit": tc.Loader(cache, 4, shuffle=True, rank=0, world_size=1),
    }
    whole = tc.Loader(cache, 16, shuffle=True, rank=0, world_size=1)
    next(iter(whole))
    loaders["resumed"].load_state_dict(whole.state_dict())  # 5 samples are left, too few for a step of 8
    too_large = tc.Loader(cache, 16, last_batch="drop")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for _ in range(2):  # not an empty epoch
        with pytest.raises(ValueError, match="21 samples do not fill one step of 16 on 2 ranks"):
            list(too_large)
    for name, loader in loaders.items():
        world_size = 1 if name == "explicit" else 2
        last_batch = "drop" if name == "resumed" else "short"
        wanted = tc.Loader(cache, 4, shuffle=True, last_batch=last_batch, rank=rank % world_size, world_size=world_size)
        wanted.set_epoch(1 if name == "resumed" else 0)
        assert len(loader) == len(wanted), name
        assert keys(loader) == keys(wanted), name
    data = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    halves = [keys(tc.Loader(cache, 4, rank=number, world_size=2)) for number in range(2)]
    assert keys(tc.Loader(cache, 4, group=dist.new_group([0, 1]))) == halves[rank]
    assert keys(tc.Loader(cache, 4, group=data["data"])) == halves[rank]
    whole = tc.Loader(cache, 4, group=data["tensor"])  # tensor parallel ranks have the same samples
    assert [key for batch in keys(whole) for key in batch] == list(cache.keys())
    with pytest.raises(ValueError, match="2 dimensions"):
        tc.Loader(cache, 4, group=data)
    dist.barrier()


def test_torch_distributed_is_initialized_later(tmp_path: Path, path: str) -> None:
    """As by trainers that get a loader and then start their processes."""
    ranks = [start(lambda rank=rank: check_late(path, tmp_path / "store", rank)) for rank in range(2)]  # type: ignore[misc]
    assert finish(ranks) == [0, 0]


def test_the_environment_of_torchrun(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tc.open(path)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "rank=3, world_size=4" in repr(tc.StepSampler(cache))
    assert "rank=0, world_size=1" in repr(tc.StepSampler(cache, rank=0, world_size=1))
    with pytest.raises(ValueError, match="not both"):
        tc.StepSampler(cache, rank=0, world_size=1, group=object())
    monkeypatch.delenv("RANK")
    assert "rank=1, world_size=2" in repr(tc.StepSampler(cache, rank=1, world_size=2))
    # a trainer may have set WORLD_SIZE, and initialize torch.distributed later; without this, no rank is guessed
    loader = tc.Loader(cache, 1)
    for use in (len, list):
        with pytest.raises(ValueError, match="WORLD_SIZE=4 is set and RANK is not"):
            use(loader)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "rank=0, world_size=1" in repr(tc.StepSampler(cache))
