"""The contents of the page as JSON values: cache, tensors, samples."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import wds_tensorcache as tc
from wds_tensorcache.inspecting.report.cards import Limits, has_photos, make_card, values_record
from wds_tensorcache.inspecting.samples_ahead import READ_ERRORS, map_samples
from wds_tensorcache.inspecting.survey import Survey, TensorStatistics, dtype_names
from wds_tensorcache.inspecting.text import escape_hidden, json_number, page_text, shape_text
from wds_tensorcache.inspecting.tree import Node, describe_samples
from wds_tensorcache.inspecting.values import ValueStatistics
from wds_tensorcache.reading.positions import spread
from wds_tensorcache.writing.build_compare import DIGEST

_NUM_STRUCTURES = 64  # samples whose structures are merged
_NUM_SHARDS = 24
_NUM_FIELDS = 100
_PICTURES_NBYTES, _TEXTS_NBYTES = 4_800_000, 1_800_000  # of all samples of a file, in Base64 and as JSON
_NUM_LINES = 16_000  # lines of statistics in a file, one for each sample and tensor; a line takes about 130 bytes
_MAX_LINES = 300  # lines of statistics of one sample


def overview(survey: Survey, title: str) -> dict[str, Any]:
    """Return the contents of the page, without the samples. The survey was made with `for_page=True`."""
    cache, described = survey.cache, survey.description
    notes = []
    if survey.errors:
        count = f"{len(survey.errors):,} of the examined samples"
        notes.append(f"{count} cannot be read; `tensorcache verify` finds all damage.")
    if described.num_samples < len(cache):
        notes.append(f"Because of damage, sizes are those of {described.num_samples:,} of {len(cache):,} samples.")
    shards = list(_list_shards(cache))
    samples = _read_structures(survey)
    return {
        "title": escape_hidden(title, 120),
        "version": tc.__version__,
        "made": datetime.date.today().isoformat(),
        "num_samples": len(cache),
        "num_examined": len(survey.indices) - len(survey.errors),
        "num_shards": len(shards),
        "nbytes": described.nbytes,
        "file_nbytes": sum(nbytes for _, nbytes, _ in shards),
        "shards": shards[:_NUM_SHARDS],
        "members": [
            [escape_hidden(name, 60), count]
            for name, count in islice(described.members.items(), _NUM_FIELDS)
            if name != DIGEST
        ],
        "fingerprint": [
            [escape_hidden(str(name), 100), _field(value)]
            for name, value in islice(described.fingerprint.items(), _NUM_FIELDS)
        ],
        "structure": _node_record(describe_samples(samples, described.tensors)) if samples else None,
        "num_tensors": len(described.tensors),
        "tensors": [_tensor_record(survey.tensors[name]) for name in survey.positions],
        "sample_sizes": _histogram_record(survey.sample_nbytes),
        "num_marked": sum(bool(survey.marks(values)) for values in survey.samples.values()) + len(survey.errors),
        "notes": notes,
    }


def _field(value: object) -> str:
    if isinstance(value, (dict, list)):
        value = json.dumps(value, ensure_ascii=False, indent=1, default=str)
    return page_text(value, 2000)


def _list_shards(cache: Any) -> Iterator[list[Any]]:
    for shard in cache._store.shards:
        nbytes = 0
        with suppress(OSError):
            nbytes = int(cache._file_nbytes(shard.path))
        yield [escape_hidden(os.path.basename(shard.path)), nbytes, len(shard)]


def _read_structures(survey: Survey) -> list[Any]:
    intact = [index for index in survey.indices if index not in survey.errors]
    samples = []
    for at in spread(len(intact), _NUM_STRUCTURES):
        with suppress(*READ_ERRORS):
            samples.append(survey.cache[intact[at]])
    return samples


def _node_record(node: Node) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": escape_hidden(node.name, 120),
        "kind": node.kind,
        "text": escape_hidden(node.text),
    }
    record |= {"types": node.types[:4], "num_samples": node.num_samples}
    if node.children:
        record["children"] = [_node_record(child) for child in node.children]
    return record


def _tensor_record(tensor: TensorStatistics) -> dict[str, Any]:
    described, stats = tensor.description, values_record(tensor.values)
    if stats is not None and tensor.values is not None:
        stats["histogram"] = _histogram_record(tensor.values)
    return {
        "name": escape_hidden(described.name),
        "dtype": " or ".join(dtype_names(described)),
        "shape": shape_text(described.shape),
        "shapes": [[shape_text(shape), count] for shape, count in described.shapes.items()],
        "num_shapes": described.num_shapes,
        "nbytes": described.nbytes,
        "num_samples": described.num_samples,
        "stats": stats,
    }


def _histogram_record(values: ValueStatistics) -> dict[str, Any] | None:
    bins = values.histogram
    if bins is None or values.max is None:
        return None
    end = bins.begin + bins.width * len(bins.counts)
    # the last bin may end after the largest integer
    low, high = json_number(bins.begin), json_number(min(end, float(values.max)))
    return {"counts": bins.counts, "low": low, "high": high, "num_outside": bins.num_below + bins.num_above}


def file_limits(survey: Survey) -> Limits:
    """Return limits that keep a few thousand samples below 10 MB."""
    num_samples = max(len(survey.indices), 1)
    share = _PICTURES_NBYTES * 3 // 4 // num_samples
    # a tensor has room beside a photo
    num_pictures = 3 if share > 12_000 else 1 + has_photos(survey)
    return Limits(
        text_nbytes=min(8000, max(300, _TEXTS_NBYTES // num_samples)),
        num_pictures=num_pictures,
        picture_side=256,
        # the first picture has twice the bytes of each other picture
        picture_nbytes=min(120_000, 2 * share // (num_pictures + 1)),
        num_tensors=min(_MAX_LINES, max(4, _NUM_LINES // num_samples)),
    )


def make_cards(survey: Survey, limits: Limits, progress: Callable[[int, int], object]) -> list[dict[str, Any]]:
    cards = []
    for card in map_samples(survey.cache, survey.indices, lambda index: make_card(survey, index, limits)):
        cards.append(card)
        progress(len(cards), len(survey.indices))
    return cards
