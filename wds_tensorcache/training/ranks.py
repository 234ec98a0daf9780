"""Which of how many data-parallel processes this one is."""

from __future__ import annotations

import operator
import os
from typing import Any

import torch.distributed as dist

__all__ = ["find_rank"]


def find_rank(rank: int | None, world_size: int | None, group: Any = None) -> tuple[int, int]:
    """Return rank and world size: those given, else the group's, torch.distributed's, those of torchrun, or 0 of 1.

    Args:
        group: A process group, or a DeviceMesh of one dimension: `mesh["dp"]`.

    Raises:
        ValueError: Only one of two was given, both and a group, a mesh of several dimensions, or out of range; the environment
            has a world size and no rank.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank}, world_size={world_size}: both or neither")
    if group is not None:
        if rank is not None:
            raise ValueError("rank and world_size come from the group: give one or the other")
        rank, world_size = _of_group(group)
    elif rank is None:
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        else:
            rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
            if world_size > 1 and "RANK" not in os.environ:
                raise ValueError(
                    f"WORLD_SIZE={world_size} is set and RANK is not, so this process cannot tell its rank: pass rank= and "
                    "world_size=, or call this after torch.distributed.init_process_group"
                )
    if rank is not None and world_size is not None:
        rank, world_size = operator.index(rank), operator.index(world_size)
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: out of range")
    return rank, world_size


def _of_group(group: Any) -> tuple[int, int]:
    if not hasattr(group, "get_local_rank"):
        return dist.get_rank(group), dist.get_world_size(group)
    if group.ndim != 1:
        raise ValueError(f"a mesh of {group.ndim} dimensions: pass the one of data parallelism, mesh['dp'] say")
    return group.get_local_rank(), group.size()
