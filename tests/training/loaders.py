"""Small samples that are told by their numbers, loaders of every mode, and the sequence that they give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from tests.reading.batches import write

COUNT = 23
# modes of several options
COMBINED = ("weights+buckets", "mix+buckets", "mix+weights", "mix+weights+buckets", "repeats", "repeats+buckets")


def nested(i: int) -> dict[str, Any]:
    return {"x": torch.full((4,), i), "y": torch.full((1 + i % 3,), i).bfloat16(), "i": i}


def only_numbers(samples: list[Any]) -> list[int]:
    """Collate samples to their numbers: a worker sends each tensor through a separate file."""
    return [sample["i"] for sample in samples]


def write_numbers(folder: Path, numbers: range, **options: Any) -> str:
    return write(folder, {f"{i:03d}": nested(i) for i in numbers}, **{"max_samples": 100} | options)


def ranks(cache: Any, batch_size: int, world_size: int, **options: Any) -> list[tc.Loader]:
    options = {"collate": "list", "num_threads": 0, "prefetch_batches": 0} | options
    return [tc.Loader(cache, batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def steps(loaders: list[tc.Loader], count: int) -> list[list[int]]:
    """Return the samples of the next `count` steps, of all ranks together in the order of the sequence, without padding."""
    taken: list[list[int]] = []
    while len(taken) < count:
        for step in zip(*(loader.with_info() for loader in loaders), strict=True):
            rows = zip(*(zip(info.keys, info.is_padding.tolist(), strict=True) for _, info in step), strict=True)
            taken.append([int(key) for row in rows for key, is_padding in row if not is_padding])
            if len(taken) == count:
                break
    return taken


def keys(loader: Any) -> list[list[str]]:
    return [info.keys for _, info in loader.with_info()]


def saved(loader: Any) -> dict[str, Any]:
    """Return the state of a loader, as a file of JSON brings it back."""
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def modes(cache: Any, more: Any) -> dict[str, dict[str, Any]]:
    single: dict[str, dict[str, Any]] = {
        "all": {"shuffle": True},
        "in order": {},
        "blocks": {"shuffle": "blocks", "window": 4},
        "buckets": {"shuffle": True, "bucket_by": "y"},
        "weights": {"weights": np.arange(COUNT)},
        "weights+buckets": {"weights": np.arange(COUNT), "bucket_by": "y"},
    }
    mixed: dict[str, dict[str, Any]] = {
        "mix": {},
        "mix+buckets": {"bucket_by": "y"},
        "mix+weights": {"weights": {"a": np.arange(COUNT)}},
        "mix+weights+buckets": {"weights": {"b": np.arange(9) + 1, "a": np.arange(COUNT)}, "bucket_by": "y"},
        "repeats": {"repeats": {"b": 3}},
        "repeats+buckets": {"repeats": {"a": 2, "b": 3}, "bucket_by": tc.by_length("y", [1, 2])},
    }
    for name, options in mixed.items():
        mix = {"a": cache, "b": more} if "repeats" in name else {"a": (cache, 0.7), "b": (more, 0.3)}
        options |= {"cache": None, "shuffle": True, "mix": mix}
    return {name: {"cache": cache} | options for name, options in (single | mixed).items()}
