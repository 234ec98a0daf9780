"""Ranks from torch.distributed, of groups and meshes: two real processes with gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc

SCRIPT = """
import sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import wds_tensorcache as tc

cache = tc.open(sys.argv[1])
before = tc.Loader(cache, 4)  # from torchrun's environment
dist.init_process_group("gloo")
data = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
loaders = {
    "environment": before,
    "world": tc.Loader(cache, 4),
    "group": tc.Loader(cache, 4, group=dist.new_group([0, 1])),
    "mesh": tc.Loader(cache, 4, group=data["data"]),
    "tensor parallel": tc.Loader(cache, 4, group=data["tensor"]),
}
seen = {}
for name, loader in loaders.items():
    seen[name] = [key for _, info in loader.with_info() for key, pad in zip(info.keys, info.is_padding.tolist()) if not pad]
everyone = [None, None]
dist.all_gather_object(everyone, seen)
for name in loaders:
    mine, other = everyone[0][name], everyone[1][name]
    if name == "tensor parallel":
        assert mine == other and len(mine) == 21, name
    else:
        assert sorted(mine + other) == sorted(cache.keys()), name
        assert len(mine) == 11 and len(other) == 10, name
try:
    tc.Loader(cache, 4, group=data)
except ValueError as exc:
    assert "2 dimensions" in str(exc)
else:
    raise AssertionError("a mesh of two dimensions was taken")
print("good", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ranks") / "data.tar"
    with tc.ShardWriter(path, fsync=False) as sink:
        for i in range(21):
            sink.write(f"{i:03d}", {"x": torch.tensor(i)})
    return str(path)


@pytest.mark.long
def test_two_processes(tmp_path: Path, path: str) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(script), path], capture_output=True, text=True, timeout=180)
    assert done.stdout.count("good") == 2, done.stderr


LATE = """
import sys
import torch.distributed as dist
import wds_tensorcache as tc

path, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
cache = tc.open(path)
loaders = {
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
    try:
        list(too_large)
    except ValueError as exc:
        assert "21 samples do not fill one step of 16 on 2 ranks" in str(exc)
    else:
        raise AssertionError("no error")
for name, loader in loaders.items():
    world_size = 1 if name == "explicit" else 2
    wanted = tc.Loader(cache, 4, shuffle=True, rank=rank % world_size, world_size=world_size)
    if name == "resumed":
        wanted = tc.Loader(cache, 4, shuffle=True, last_batch="drop", rank=rank, world_size=2)
        wanted.set_epoch(1)
    assert len(loader) == len(wanted), name
    keys = [info.keys for _, info in loader.with_info()]
    assert keys == [info.keys for _, info in wanted.with_info()], (name, keys)
    assert f"world_size={world_size}" in repr(loader)
print("good")
dist.barrier()
dist.destroy_process_group()
"""


def test_torch_distributed_is_initialized_later(tmp_path: Path, path: str) -> None:
    """As by trainers that get a loader and then start their processes."""
    arguments = [sys.executable, "-c", LATE, path, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*arguments, rank], stdout=subprocess.PIPE, text=True) for rank in ("0", "1")]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["good\n", "good\n"]


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
