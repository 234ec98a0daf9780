"""Ranks from torch.distributed, of groups and meshes: two real processes with gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from wds_tensorcache.training.ranks import find_rank

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
dist.barrier()
print("good", flush=True)
dist.destroy_process_group()
"""


def test_two_processes(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "data.tar", fsync=False) as sink:
        for i in range(21):
            sink.write(f"{i:03d}", {"x": torch.tensor(i)})
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "2", str(script), str(tmp_path / "data.tar")],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stdout.count("good") == 2, done.stderr


def test_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_rank(None, None) == (0, 1)
    assert find_rank(2, 5) == (2, 5)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert find_rank(None, None) == (3, 4)
    assert find_rank(0, 1) == (0, 1)
    with pytest.raises(ValueError, match="not both"):
        find_rank(0, 1, object())


def test_a_world_size_without_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 is set and RANK is not"):
        find_rank(None, None)
    assert find_rank(1, 2) == (1, 2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_rank(None, None) == (0, 1)
