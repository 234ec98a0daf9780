"""All contents of the page as values for JSON: the cache, its tensors, and samples."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import wds_tensorcache as tc
from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.inspecting.report.cards import Limits, make_card, statistics
from wds_tensorcache.inspecting.report.structure import structure_of
from wds_tensorcache.inspecting.report.survey import MAX_TENSORS, READ_ERRORS, Survey
from wds_tensorcache.inspecting.report.texts import number, visible, words
from wds_tensorcache.inspecting.tensors_ahead import NUM_AHEAD, pool_for
from wds_tensorcache.inspecting.values import ValueStatistics
from wds_tensorcache.reading.description import TensorDescription
from wds_tensorcache.reading.positions import spread
from wds_tensorcache.storage.threads import run_in_order

_NUM_STRUCTURES = 64  # samples whose structures are merged
_NUM_SIZES, _NUM_BARS = 20_000, 48  # samples whose sizes are counted, and bars that show them
_NUM_SHARDS = 24
_NUM_FIELDS = 100
_PICTURES_NBYTES, _TEXTS_NBYTES = 4_800_000, 1_800_000  # of all samples of a file, in Base64 and as JSON
_NUM_LINES = 16_000  # lines of statistics in a file, one for each sample and tensor; each takes about 130 bytes


def overview(survey: Survey, title: str) -> dict[str, Any]:
    """Return the contents of the page, without the samples.

    Args:
        survey: Findings in some samples.
        title: Name of the cache.
    """
    cache, found = survey.cache, survey.description
    notes = []
    if survey.errors:
        notes.append(
            f"{len(survey.errors):,} of the examined samples cannot be read; `tensorcache verify` finds all damage."
        )
    if found.num_samples < len(cache):
        notes.append(f"Because of damage, sizes are those of {found.num_samples:,} of {len(cache):,} samples.")
    shards = list(_shards(cache))
    return {
        "title": visible(title, 120),
        "version": tc.__version__,
        "made": datetime.date.today().isoformat(),
        "num_samples": len(cache),
        "num_examined": len(survey.numbers) - len(survey.errors),
        "num_shards": len(shards),
        "nbytes": found.nbytes,
        "file_nbytes": sum(nbytes for _, nbytes, _ in shards),
        "shards": shards[:_NUM_SHARDS],
        "members": [[visible(suffix, 60), count] for suffix, count in list(found.members.items())[:_NUM_FIELDS]],
        "fingerprint": [[visible(str(name), 100), _field(value)] for name, value in _some(found.fingerprint)],
        "structure": structure_of(_intact(survey)),
        "num_tensors": len(found.tensors),
        "tensors": [_tensor(found.tensors[name], survey.totals.get(name)) for name in survey.positions],
        "sample_sizes": _sample_sizes(survey),
        "num_marked": sum(bool(survey.marks(values)) for values in survey.values.values()) + len(survey.errors),
        "notes": notes,
    }


def _some(fields: dict[str, object]) -> list[tuple[str, object]]:
    return list(fields.items())[:_NUM_FIELDS]


def _field(value: object) -> str:
    if isinstance(value, (dict, list)):
        return visible(json.dumps(value, ensure_ascii=False, indent=1, default=str), 2000)
    return words(value, 2000)


def _shards(cache: Any) -> list[list[Any]]:
    counts = [len(shard) for shard in cache._store.shards]
    paths = [shard.path for shard in cache._store.shards]
    return [
        [visible(os.path.basename(path)), _file_nbytes(cache, path), count]
        for path, count in zip(paths, counts, strict=True)
    ]


def _file_nbytes(cache: Any, path: str) -> int:
    try:
        return int(cache._file_nbytes(path))
    except OSError:
        return 0


def _intact(survey: Survey) -> list[Any]:
    numbers = [at for at in survey.numbers if at not in survey.errors]
    samples = []
    for at in spread(len(numbers), _NUM_STRUCTURES):
        try:
            samples.append(survey.cache[numbers[at]])
        except READ_ERRORS:
            continue
    return samples


def _tensor(described: TensorDescription, values: ValueStatistics | None) -> dict[str, Any]:
    dtypes = described.dtype if isinstance(described.dtype, tuple) else (described.dtype,)
    stats = statistics(values)
    if stats is not None and values is not None and values.histogram is not None:
        bins = values.histogram
        stats["histogram"] = {
            "counts": bins.counts,
            "low": number(bins.begin),
            "high": number(bins.begin + bins.width * len(bins.counts)),
            "num_outside": bins.num_below + bins.num_above,
        }
    return {
        "name": visible(described.name),
        "dtype": " or ".join(map(dtype_name, dtypes)),
        "shape": _range_of_shapes(described.shape),
        "shapes": [[f"[{', '.join(map(str, shape))}]", count] for shape, count in described.shapes.items()],
        "num_shapes": described.num_shapes,
        "nbytes": described.nbytes,
        "num_samples": described.num_samples,
        "stats": stats,
    }


def _range_of_shapes(shape: tuple[int | tuple[int, int], ...] | None) -> str:
    if shape is None:
        return "[…]"
    return f"[{', '.join(f'{size[0]}..{size[1]}' if isinstance(size, tuple) else str(size) for size in shape)}]"


def _sample_sizes(survey: Survey) -> dict[str, Any] | None:
    """Return a histogram of the bytes of samples, from the indexes."""
    cache = survey.cache
    numbers = np.array(spread(len(cache), _NUM_SIZES), np.int64)
    try:
        sizes = np.array([entry.nbytes for entry in cache[numbers]._entries()], np.int64)
    except READ_ERRORS:
        return None
    if not len(sizes):
        return None
    low, high = int(sizes.min()), int(sizes.max())
    counts, _ = np.histogram(sizes, min(_NUM_BARS, max(1, high - low)), (low, max(high, low + 1)))
    return {"low": low, "high": high, "counts": counts.tolist()}


def file_limits(survey: Survey, num_samples: int) -> Limits:
    """Return limits with which `num_samples` samples take less than 10 MB in a file."""
    num_samples = max(num_samples, 1)
    share = _PICTURES_NBYTES * 3 // 4 // num_samples
    num_tensors = min(MAX_TENSORS, max(4, _NUM_LINES // num_samples))
    # the first picture has twice the bytes of each of the other ones
    num_pictures = 3 if share > 12_000 else 1
    return Limits(
        text_nbytes=min(8000, max(300, _TEXTS_NBYTES // num_samples)),
        num_pictures=num_pictures,
        picture_side=256,
        picture_nbytes=min(120_000, 2 * share // (num_pictures + 1)),
        num_tensors=num_tensors,
    )


def cards_of(
    survey: Survey,
    numbers: Sequence[int],
    limits: Limits,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Return the samples at `numbers` for JSON."""
    cards = []
    with pool_for(survey.cache) as pool:
        for card in run_in_order(numbers, lambda at: make_card(survey, at, limits), pool, NUM_AHEAD):
            cards.append(card)
            progress(len(cards), len(numbers))
    return cards
