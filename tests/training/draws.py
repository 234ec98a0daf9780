"""Samples with alternatives and moments, and all that is random about each row of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import wds_tensorcache as tc
from tests.reading.batches import write as write_samples

COUNT = 23
CHOOSE = {"latent": ["latent", "latent_flipped"], "text": {"captions.0": 2, "captions.*": 1}}
EMPTY = torch.full((2,), -1.0)
MOMENTS = tc.sample_moments("latent", to="drawn")
TRANSFORMS = [MOMENTS, tc.drop_text(0.5, {"text": EMPTY}, mark="is_dropped")]
# also strings, which are chosen in another way than tensors
WITH_PROMPTS: dict[str, Any] = {
    "choose": CHOOSE | {"prompt": "prompts.*"},
    "transform": [MOMENTS, tc.drop_text(0.5, {"text": EMPTY, "prompt": ""}, mark="is_dropped")],
}


class Row(NamedTuple):
    """All that is random about a row of a batch, with the key of its sample."""

    key: str
    seed: int
    names: tuple[str, ...]
    latent: bytes
    text: bytes
    prompt: str | None
    is_dropped: bool


def nested(i: int, num_captions: int | None = None) -> dict[str, Any]:
    count = 1 + i % 4 if num_captions is None else num_captions
    latent = torch.full((4,), float(i))
    return {
        "latent": latent,
        "latent_flipped": -latent,
        "captions": [torch.full((2,), 100.0 * i + number) for number in range(count)],
        "prompts": [f"{i}.{number}" for number in range(1 + i % 3)],
        "y": torch.zeros(1 + i % 3),
        "i": i,
    }


def write(folder: Path, numbers: range) -> str:
    return write_samples(folder, {f"{i:03d}": nested(i) for i in numbers})


def loaders(world_size: int, batch_size: int, **options: Any) -> list[tc.Loader]:
    """Return the loaders of all ranks."""
    options = {"choose": CHOOSE, "collate": {"y": "list"}, "num_threads": 0, "prefetch_batches": 0} | options
    options.setdefault("transform", TRANSFORMS)
    return [tc.Loader(batch_size=batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def rows_of(batch: Any, info: tc.BatchInfo, *, padding: bool = False) -> list[Row]:
    """Return the rows of a batch; without those that are padding, unless `padding`."""
    choices = info.choices
    found = map(
        Row,
        info.keys,
        info.seeds.tolist(),
        zip(*map(choices.chosen, choices), strict=True),
        map(_bytes, batch["drawn"]),
        map(_bytes, batch["text"]),
        batch.get("prompt", [None] * len(info.keys)),
        batch["is_dropped"].tolist(),
    )
    return [row for row, is_padding in zip(found, info.is_padding.tolist(), strict=True) if padding or not is_padding]


def interleaved(ranked: list[list[Any]]) -> list[Any]:
    """Return the rows of one step on all ranks, in the order of the sequence."""
    return [rows[at] for at in range(max(map(len, ranked))) for rows in ranked if at < len(rows)]


def steps_of(ranks: list[Any]) -> Iterator[list[tuple[int, Row]]]:
    """Yield epoch and row of each row of the next steps, over all ranks, in the order of the sequence; endless."""
    while True:
        for step in zip(*(loader.with_info() for loader in ranks), strict=True):
            yield interleaved([[(info.epoch, row) for row in rows_of(batch, info)] for batch, info in step])


def _bytes(row: torch.Tensor) -> bytes:
    return row.numpy().tobytes()
