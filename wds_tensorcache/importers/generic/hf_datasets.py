"""Hugging Face `datasets`: folders of `Dataset.save_to_disk` and `DatasetDict.save_to_disk`.

Each row becomes a sample, a dict by column:

- `Array2D` … `Array5D`, and lists of numbers: a tensor with their dtype. If the lists of one level in some row have different
  lengths, all rows of the column have lists of tensors; if numbers are null, lists;
- numbers, texts, `ClassLabel` (its number), dates: the value itself; null is None; `binary`: a uint8 tensor [n];
- `Image`, `Audio`, `Video`, `Pdf`: members, named `COLUMN.png`, as they were encoded; lists of them `COLUMN.0.png`, …;
- structs: dicts.

Samples are named by their position, after the path of their folder, for example `train/00000012`. The description of the
columns, with the names of classes, becomes the provenance. Selected or shuffled rows are read as they were saved.

Arrow files are read without `datasets`, which would decode pictures; pyarrow is needed. Folders of `load_dataset`'s cache are
not read: save them with `save_to_disk`.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.arrow_stream import StoredBatch, find_batches
from wds_tensorcache.importers.generic.arrow_values import (
    Lists,
    import_pyarrow,
    lists_of,
    value_of,
)
from wds_tensorcache.importers.generic.chunk_files import Recent, read_json
from wds_tensorcache.importers.generic.media import separate_media
from wds_tensorcache.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder

_STATE, _INFO = "state.json", "dataset_info.json"
_MAX_KEPT = 2  # batches, which have a thousand rows by default


def _recognize(folder: SourceFolder) -> int:
    return sum(
        f"{start}{_STATE}" in folder and f"{start}{_INFO}" in folder
        for start in (name[: name.rfind("/") + 1] for name in folder.by_suffix.get(".arrow", ()))
    )


def _open(folder: SourceFolder) -> Source:
    arrow = import_pyarrow()
    samples: list[SourceSample] = []
    bad: dict[str, str] = {}
    described: dict[str, Any] = {}
    checked: Recent[Any] = Recent(_MAX_KEPT)
    roots = [name[: -len(_STATE)] for name in folder.by_suffix.get(".json", ()) if name.split("/")[-1] == _STATE]
    for root in [root for root in roots if f"{root}{_INFO}" in folder]:
        try:
            state, info = read_json(folder, root + _STATE), read_json(folder, root + _INFO)
            if state.get("_indices_data_files") or state.get("_indices_files"):
                raise FormatError("its rows are selected by an old release of datasets; save it again with a new one")
            files = [root + each["filename"] for each in state["_data_files"]]
            features = info.get("features")
        except (KeyError, TypeError) as exc:
            bad[root + _STATE] = f"is not a state of datasets: {exc!r:.200}"
            continue
        except (FormatError, OSError) as exc:
            bad[root + _STATE] = str(exc)
            continue
        features = features if isinstance(features, dict) else {}
        described[root.rstrip("/")] = features
        lists: dict[str, Lists] = {}
        at = 0
        for name, count in Counter(files).items():
            try:
                if name not in folder:
                    raise FormatError(f"is missing, but {_STATE} lists it")
                if count > 1:
                    raise FormatError(f"{_STATE} lists it {count:,} times")
                nbytes = os.path.getsize(folder.locate(name))
                for stored in find_batches(folder, name):
                    batch = stored.read(folder)
                    if batch.num_rows > nbytes:
                        raise FormatError(f"has a batch of {batch.num_rows:,} rows in {nbytes:,} bytes")
                    for column, array in zip(batch.schema.names, batch.columns, strict=True):
                        lists[column] = max(lists.get(column, Lists.TENSORS), lists_of(array))
                    for row in range(batch.num_rows):
                        load = partial(_load, folder, checked, stored, row, features, lists)
                        samples.append(SourceSample(f"{root}{at:08d}", (name, root + _STATE, root + _INFO), load))
                        at += 1
            except (arrow.ArrowException, ValueError, IndexError, OSError) as exc:
                bad[name] = str(exc)
    one = next(iter(described.values())) if len(described) == 1 else described
    return Source(samples, {"features": one}, bad)


def _load(
    folder: SourceFolder,
    checked: Recent[Any],
    stored: StoredBatch,
    row: int,
    features: dict[str, Any],
    lists: dict[str, Lists],
) -> Loaded:
    arrow = import_pyarrow()
    try:
        # Offsets out of range would be followed to any memory.
        batch = checked.get((stored.name, stored.begin), lambda: _check(stored.read(folder)))
        columns = {
            column: value_of(batch.column(number).slice(row, 1), features.get(column), lists[column])
            for number, column in enumerate(batch.schema.names)
        }
        return separate_media(columns)
    except FormatError as exc:
        raise exc.at(stored.name) from exc
    except (arrow.ArrowException, ValueError) as exc:
        raise FormatError(f"row {row} of a batch cannot be decoded: {exc!r:.200}").at(stored.name) from exc


def _check(batch: Any) -> Any:
    batch.validate(full=True)
    return batch


FORMAT = Format(
    "hf-datasets",
    "Hugging Face datasets: folders of save_to_disk",
    _recognize,
    _open,
    True,
)
