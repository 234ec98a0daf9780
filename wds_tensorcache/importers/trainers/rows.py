"""Rows of stacked tensors in `.safetensors` files, as samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import read_safetensors_header, view_stored
from wds_tensorcache.importers.source import Loaded, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder, view_open


def list_rows(
    folder: SourceFolder, name: str, needed: Sequence[str], renamed: Mapping[str, str] | None = None
) -> list[SourceSample]:
    """Return a sample for each row of a `.safetensors` file.

    The name of a sample is the file's path without suffix, a slash and the number of the row. Its entries are sorted by name,
    and followed by the renamed entries. Only the header is read.

    Args:
        needed: Names of tensors that the file must have; the last of these must have bytes for each row.
        renamed: Names of entries by the name of the tensor, if they differ.

    Raises:
        FormatError: The file is damaged or lacks a `needed` tensor, its tensors have different numbers of rows, or the last
            `needed` tensor has rows without bytes.
    """
    tensors, _ = read_safetensors_header(folder, name)
    lengths = {tensor: stored.shape[0] if stored.shape else None for tensor, stored in tensors.items()}
    if not set(needed) <= tensors.keys():
        raise FormatError(f"has no tensor{'s' * (len(needed) > 1)} {' and '.join(map(repr, needed))}")
    if len(set(lengths.values())) > 1:
        raise FormatError(f"its tensors have different numbers of rows: {lengths!r:.300}")
    num_rows, last = lengths[needed[-1]], tensors[needed[-1]]
    if num_rows is None or last.end - last.begin < num_rows:
        # Hazard: a small file could declare any number of rows without bytes.
        raise FormatError(f"{needed[-1]} are {list(last.shape)}, expected one for each row")
    entries = {tensor: tensors[tensor] for tensor in sorted(tensors)}
    for tensor, entry in (renamed or {}).items():
        if entry in entries:
            raise FormatError(f"has both a tensor {entry!r} and a tensor {tensor!r}")
        entries[entry] = entries.pop(tensor)

    def load(row: int) -> Loaded:
        sample = {}
        with folder.open(name) as file:
            for entry, stored in entries.items():
                nbytes = (stored.end - stored.begin) // num_rows
                begin = stored.begin + row * nbytes
                raw = view_open(file, begin, begin + nbytes)
                sample[entry] = view_stored(raw, stored.dtype, stored.shape[1:])
        return Loaded(sample)

    stem = name[: -len(".safetensors")]
    return [SourceSample(f"{stem}/{row:05d}", (name,), partial(load, row)) for row in range(num_rows)]
