"""Hugging Face `datasets`: folders of `Dataset.save_to_disk` and `DatasetDict.save_to_disk`.

Each row becomes a sample, a dict by column:

- `Array2D` … `Array5D`, and lists of numbers: a tensor with their dtype. If the lists of one level in some row have different
  lengths, all rows of the column have lists of tensors. If some numbers are null, all rows of the column have plain lists;
- numbers, texts, `ClassLabel` (its number), dates: the value itself; null is None; `binary`: a uint8 tensor [n];
- `Image`, `Audio`, `Video`, `Pdf`: members, as they were encoded, for example `COLUMN.png`; lists of them `COLUMN.0.png`, …;
- structs: dicts.

Samples are named by their position, after the path of their folder, for example `train/00000012`. The description of the
columns, with the names of classes, becomes the provenance. The package `datasets` reads the rows.

Folders of `load_dataset`'s cache are not read: save the dataset with `save_to_disk`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.arrow_values import Lists, import_pyarrow, lists_of, value_of
from wds_tensorcache.importers.generic.media import Row, import_library, open_indexes
from wds_tensorcache.importers.source import Format, Source
from wds_tensorcache.importers.source_folder import SourceFolder

_NUM_ROWS, _MAX_KEPT = 256, 2  # rows of a block, which is read at once; blocks in memory
_STATE, _INFO = "state.json", "dataset_info.json"


def _recognize(folder: SourceFolder) -> int:
    return sum(
        f"{start}{_STATE}" in folder and f"{start}{_INFO}" in folder
        for start in (name[: name.rfind("/") + 1] for name in folder.by_suffix.get(".arrow", ()))
    )


def _open(folder: SourceFolder) -> Source:
    import_pyarrow()
    described: dict[str, Any] = {}

    def open_index(index: str, root: str) -> Iterator[Row]:
        state, info = folder.read_json(index), folder.read_json(root + _INFO, names_nan=True)
        files = [root + file["filename"] for file in state["_data_files"]]
        for file in files:
            if file not in folder:
                raise FormatError(f"lists {file!r:.200}, which is missing")
        features = info.get("features") or {}
        datasets = import_library("datasets", "datasets")
        path = folder.locate(root or ".")
        # Hazard: fsspec takes such a path for a chain of urls, and opens another file.
        if "::" in path:
            raise FormatError("datasets cannot open a path with '::'; rename the folder")
        dataset = datasets.Dataset.load_from_disk(path).with_format("arrow")
        dataset.data.validate(full=True)  # Hazard: offsets out of range would be followed to any memory
        lists: dict[str, Lists] = {}
        for batch in dataset.data.to_batches():
            for column, array in zip(batch.schema.names, batch.columns, strict=True):
                lists[column] = max(lists.get(column, Lists.TENSORS), lists_of(array))
        described[root.rstrip("/")] = features
        read_block = lru_cache(_MAX_KEPT)(partial(_read_block, dataset))
        num_rows, num_longer = divmod(len(dataset), max(1, len(files)))  # `save_to_disk` makes the first files longer
        for at in range(len(dataset)):
            number = at // (num_rows + 1) if at < num_longer * (num_rows + 1) else (at - num_longer) // num_rows
            yield files[number], partial(_read, read_block, at, features, lists)

    infos = [name for name in folder.by_suffix.get(".json", ()) if name.split("/")[-1] == _INFO]
    indexes = [index for name in infos if (index := name[: -len(_INFO)] + _STATE) in folder]
    samples, bad = open_indexes(indexes, open_index)
    one = next(iter(described.values())) if len(described) == 1 else described
    return Source(samples, {"features": one}, bad, metadata_files=infos)


def _read_block(dataset: Any, block: int) -> Any:
    return dataset[block * _NUM_ROWS : (block + 1) * _NUM_ROWS]


def _read(read_block: Any, at: int, features: dict[str, Any], lists: dict[str, Lists]) -> dict[str, Any]:
    row = read_block(at // _NUM_ROWS).slice(at % _NUM_ROWS, 1).combine_chunks()
    return {
        name: value_of(column.chunk(0), features.get(name), lists[name])
        for name, column in zip(row.column_names, row.columns, strict=True)
    }


FORMAT = Format(
    "hf-datasets",
    "Hugging Face datasets: folders of save_to_disk",
    _recognize,
    _open,
    True,
)
