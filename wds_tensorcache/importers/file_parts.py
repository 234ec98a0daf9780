"""Parts of big files, read by position: rows of safetensors, files in zips, and single tensors of `torch.save`."""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.header import StoredTensor
from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.codec.views import check_tensor, view_tensor
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.importers.crc import crc32
from wds_tensorcache.importers.safe_files import REMEDY, dtype_of
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.integrations.pickles.pth_index import TensorPart, index_pth
from wds_tensorcache.shards.expansion import max_expanded

_ZIP = b"PK\x03\x04"
_IS_ENCRYPTED = 1


def read_row(folder: SourceFolder, name: str, tensor: StoredTensor, row: int) -> torch.Tensor:
    """Return `tensor[row]` of a `.safetensors` file; only its bytes are read.

    Raises:
        FormatError: The file was cut short, or the tensor has no such row, an unknown dtype or an invalid bool.
    """
    shape = tensor.shape[1:]
    nbytes = math.prod(shape) * STORED[tensor.dtype][0]
    begin = tensor.begin + row * nbytes
    if not tensor.shape or not 0 <= row < tensor.shape[0]:
        raise FormatError(f"tensor {tensor.name!r:.100} is {list(tensor.shape)}, and has no row {row}").at(name)
    return _view(folder, name, tensor, begin, begin + nbytes, shape)


def read_tensor(folder: SourceFolder, name: str, tensor: StoredTensor) -> torch.Tensor:
    """Return a tensor of a `.safetensors` file; only its bytes are read. It raises the same errors as `read_row`."""
    return _view(folder, name, tensor, tensor.begin, tensor.end, tensor.shape)


def _view(
    folder: SourceFolder, name: str, tensor: StoredTensor, begin: int, end: int, shape: tuple[int, ...]
) -> torch.Tensor:
    try:
        return check_tensor(view_tensor(np.asarray(folder.view(name, begin, end)), dtype_of(tensor), shape))
    except FormatError as exc:
        raise exc.at(name) from exc


def list_zip(folder: SourceFolder, name: str) -> list[zipfile.ZipInfo]:
    """Return the files in a zip, whose list is at its end.

    Raises:
        FormatError: The list is damaged, or two files have the same name.
    """
    try:
        with folder.open(name) as opened, zipfile.ZipFile(opened) as archive:
            files = archive.infolist()
        if len({file.filename for file in files}) < len(files):
            raise FormatError("two files in the zip have the same name")
        if not all(file.filename for file in files):
            raise FormatError("a file in the zip has no name")
        return files
    except TensorCacheError as exc:
        raise exc.at(name) from exc
    except Exception as exc:  # zipfile raises many kinds of exceptions
        raise FormatError(f"cannot be decoded: {exc!r:.300}").at(name) from exc


def view_zip_file(folder: SourceFolder, name: str, file: zipfile.ZipInfo) -> memoryview:
    """Return the content of a stored file in a zip, after a check of its CRC; nothing else of the zip is read.

    Memory: recycled when the last reference to the view is gone.

    Raises:
        FormatError: The file is compressed, encrypted, cut short or damaged.
    """
    try:
        if file.compress_type != zipfile.ZIP_STORED or file.flag_bits & _IS_ENCRYPTED:
            raise FormatError("is compressed or encrypted, expected a stored file")
        at = file.header_offset
        head = folder.view(name, at, at + 30)
        begin = at + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        content = folder.view(name, begin, begin + file.file_size)
        if head[:4] != _ZIP or crc32(content) != file.CRC:
            raise FormatError("is damaged: its CRC is not as listed")
        return content
    except FormatError as exc:
        raise FormatError(f"{file.filename!r:.200}: {exc.reason}").at(name) from exc


def index_torch(folder: SourceFolder, name: str) -> Any:
    """Return the object in a file of `torch.save` with parts of the file in place of tensors, for `read_parts`.

    Raises:
        UnsafeSkeletonError: The file names other classes than those of tensors and plain values.
        FormatError: The file is damaged, or has another format.
    """
    try:
        with folder.open(name) as opened, io.BufferedReader(opened) as file:
            return index_pth(file, max_expanded(file.seek(0, io.SEEK_END)), REMEDY)
    except TensorCacheError as exc:
        raise exc.at(name) from exc


def read_parts(folder: SourceFolder, name: str, value: Any) -> Any:
    """Return a part of the object that `index_torch` has returned, with its tensors.

    Raises:
        FormatError: The file was cut short since, or a bool is a byte other than 0 or 1.
    """

    def read(part: TensorPart) -> torch.Tensor:
        try:
            return part.view(np.asarray(folder.view(name, part.begin, part.end)))
        except FormatError as exc:
            raise exc.at(name) from exc

    return rebuild(value, read, TensorPart)
