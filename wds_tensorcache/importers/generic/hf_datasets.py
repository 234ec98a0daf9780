"""Hugging Face `datasets`: folders of `Dataset.save_to_disk` and `DatasetDict.save_to_disk`.

Each row becomes a sample, a dict by column:

- `Array2D` … `Array5D`, and lists of numbers: a tensor with their dtype. If the lists of one level in some row have different
  lengths, all rows of the column have lists of tensors; if numbers are null, lists;
- numbers, texts, `ClassLabel` (its number), dates: the value itself; null is None; `binary`: a uint8 tensor [n];
- `Image`, `Audio`, `Video`, `Pdf`: members, named `COLUMN.png`, as they were encoded; lists of them `COLUMN.0.png`, …;
- structs: dicts.

Samples are named by their position, after the path of their folder, for example `train/00000012`. The description of the
columns, with the names of classes, becomes the provenance. The package `datasets` reads the rows.

Folders of `load_dataset`'s cache are not read: save them with `save_to_disk`.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.generic.arrow_values import Lists, import_pyarrow, lists_of, value_of
from wds_tensorcache.importers.generic.media import READING, import_library, read_json, separate_media
from wds_tensorcache.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder

_NUM_ROWS, _MAX_KEPT = 256, 2  # of a block, which is read at once; blocks
_STATE, _INFO = "state.json", "dataset_info.json"


def _recognize(folder: SourceFolder) -> int:
    return sum(
        f"{start}{_STATE}" in folder and f"{start}{_INFO}" in folder
        for start in (name[: name.rfind("/") + 1] for name in folder.by_suffix.get(".arrow", ()))
    )


def _open(folder: SourceFolder) -> Source:
    import_pyarrow()
    samples: list[SourceSample] = []
    bad: dict[str, str] = {}
    described: dict[str, Any] = {}
    roots = [name[: -len(_STATE)] for name in folder.by_suffix.get(".json", ()) if name.split("/")[-1] == _STATE]
    for root in [root for root in roots if f"{root}{_INFO}" in folder]:
        try:
            state, info = read_json(folder, root + _STATE), read_json(folder, root + _INFO)
            files = [root + file["filename"] for file in state["_data_files"]]
            for file in files:
                if file not in folder:
                    raise FormatError(f"lists {file!r:.200}, which is missing")
            features = info.get("features") or {}
            datasets = import_library("datasets", "datasets")
            # Hazard: fsspec takes such a path for a chain of urls, and opens another file.
            if "::" in folder.locate(root or "."):
                raise FormatError("datasets cannot open a path with '::'; rename the folder")
            dataset = datasets.Dataset.load_from_disk(folder.locate(root or ".")).with_format("arrow")
            dataset.data.validate(full=True)  # Hazard: offsets out of range would be followed to any memory
            lists: dict[str, Lists] = {}
            for batch in dataset.data.to_batches():
                for column, array in zip(batch.schema.names, batch.columns, strict=True):
                    lists[column] = max(lists.get(column, Lists.TENSORS), lists_of(array))
        except (FormatError, OSError) as exc:
            bad[root + _STATE] = str(exc)
            continue
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as exc:
            bad[root + _STATE] = f"datasets cannot open the folder: {exc!r:.300}"
            continue
        described[root.rstrip("/")] = features
        read_block = lru_cache(_MAX_KEPT)(partial(_read_block, dataset))
        for at in range(len(dataset)):
            file = files[at * len(files) // len(dataset)]  # of save_to_disk, whose files have equal numbers of rows
            load = partial(_load, read_block, at, features, lists, file)
            samples.append(SourceSample(f"{root}{at:08d}", (file, root + _STATE, root + _INFO), load))
    one = next(iter(described.values())) if len(described) == 1 else described
    return Source(samples, {"features": one}, bad)


def _read_block(dataset: Any, block: int) -> Any:
    with READING:
        return dataset[block * _NUM_ROWS : (block + 1) * _NUM_ROWS]


def _load(read_block: Any, at: int, features: dict[str, Any], lists: dict[str, Lists], file: str) -> Loaded:
    try:
        row = read_block(at // _NUM_ROWS).slice(at % _NUM_ROWS, 1).combine_chunks()
        return separate_media(
            {
                name: value_of(column.chunk(0), features.get(name), lists[name])
                for name, column in zip(row.column_names, row.columns, strict=True)
            }
        )
    except FormatError as exc:
        raise exc.at(file) from exc
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        raise FormatError(f"row {at} cannot be decoded: {exc!r:.200}").at(file) from exc


FORMAT = Format(
    "hf-datasets",
    "Hugging Face datasets: folders of save_to_disk",
    _recognize,
    _open,
    True,
)
