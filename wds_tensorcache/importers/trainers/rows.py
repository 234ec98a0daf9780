"""Samples that are rows: `.safetensors` files with tensors of many samples, stacked along the first dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from wds_tensorcache.codec.header import StoredTensor
from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import read_row, read_safetensors_tensors
from wds_tensorcache.importers.source import Loaded, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder


def read_stacked(folder: SourceFolder, name: str, needed: Sequence[str]) -> tuple[dict[str, StoredTensor], int]:
    """Return the stored tensors of a file by name, and the number of their rows. Only the header is read.

    Args:
        folder, name: Folder, and name of the file in it.
        needed: Names of tensors that the file must have; the last of these must have bytes for each row.

    Raises:
        FormatError: The file is damaged or lacks a `needed` tensor, its tensors have different numbers of rows, or the last
            `needed` tensor has rows without bytes.
    """
    tensors, _ = read_safetensors_tensors(folder, name)
    lengths = {tensor: stored.shape[0] if stored.shape else None for tensor, stored in tensors.items()}
    if not set(needed) <= tensors.keys():
        raise FormatError(f"has no tensor{'s' * (len(needed) > 1)} {' and '.join(map(repr, needed))}").at(name)
    if len(set(lengths.values())) > 1:
        raise FormatError(f"its tensors have different numbers of rows: {lengths!r:.300}").at(name)
    num_rows, last = lengths[needed[-1]], tensors[needed[-1]]
    if num_rows is None or last.end - last.begin < num_rows:
        # Hazard: a small file could declare any number of rows without bytes.
        raise FormatError(f"{needed[-1]} are {list(last.shape)}, expected one for each row").at(name)
    return tensors, num_rows


def list_rows(
    folder: SourceFolder, name: str, entries: Mapping[str, StoredTensor], num_rows: int
) -> list[SourceSample]:
    """Return a sample for each row; its name is the file's path without suffix, a slash and the number of the row."""

    def load(row: int) -> Loaded:
        return Loaded({entry: read_row(folder, name, tensor, row) for entry, tensor in entries.items()})

    stem = name[: -len(".safetensors")]
    return [SourceSample(f"{stem}/{row:05d}", (name,), partial(load, row)) for row in range(num_rows)]
