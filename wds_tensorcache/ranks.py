"""The rank of this process among the data-parallel processes."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from wds_tensorcache.arguments import as_int


def is_distributed() -> bool:
    """Return whether torch.distributed is initialized in this process."""
    return dist.is_available() and dist.is_initialized()


def find_rank(rank: int | None, world_size: int | None, group: Any = None, *, is_final: bool = True) -> tuple[int, int]:
    """Return `(rank, world_size)` of this process.

    They come from the arguments, else from torch.distributed, else from torchrun's environment, else they are `(0, 1)`.
    `group` is a process group or a 1-D device mesh; pass it instead of `rank` and `world_size`. If `is_final` is False, the
    environment may contain only a world size; the rank is then 0.

    Raises:
        TypeError: `rank` or `world_size` is not an integer.
        ValueError: The arguments or the environment are invalid or inconsistent.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank}, world_size={world_size}: pass both or neither")
    if group is not None:
        if rank is not None:
            raise ValueError("group determines rank and world_size: pass group, or rank and world_size, not both")
        if not hasattr(group, "get_local_rank"):
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        elif group.ndim == 1:
            rank, world_size = group.get_local_rank(), group.size()
        else:
            raise ValueError(
                f"group is a mesh of {group.ndim} dimensions, expected the one of data parallelism, for example mesh['dp']"
            )
    elif rank is None and is_distributed():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    elif rank is None:
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if is_final and world_size > 1 and "RANK" not in os.environ:
            raise ValueError(
                f"WORLD_SIZE={world_size} is set and RANK is not, so this process cannot tell its rank: pass rank= and "
                "world_size=, or call this after torch.distributed.init_process_group"
            )
    rank, world_size = as_int("rank", rank), as_int("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} out of range [0, {world_size}), where world_size={world_size}")
    return rank, world_size
