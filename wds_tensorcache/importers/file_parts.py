"""Parts of big files, read by position: rows of safetensors, files in zips, and single tensors of `torch.save`."""

from __future__ import annotations

import io
import math
import zipfile
from functools import partial
from typing import Any

import torch

from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.header import StoredTensor
from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.codec.views import check_tensor, view_tensor
from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import REMEDY, dtype_of, naming
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.integrations import arrays
from wds_tensorcache.integrations.pickles import TensorPart, index_pth
from wds_tensorcache.shards.expansion import max_expanded


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
    with naming(name):
        return check_tensor(view_tensor(folder.view(name, begin, end), dtype_of(tensor), shape))


def list_zip(folder: SourceFolder, name: str) -> list[zipfile.ZipInfo]:
    """Return the files in a zip, whose list is at its end.

    Raises:
        FormatError: The list is damaged, or two files have the same name.
    """
    with naming(name), folder.open(name) as file:
        return list(arrays.list_zip(file).values())


def view_zip_file(folder: SourceFolder, name: str, file: zipfile.ZipInfo) -> memoryview:
    """Return the content of a stored file in a zip, after a check of its CRC; nothing else of the zip is read.

    Memory: recycled when the last reference to the view is gone.

    Raises:
        FormatError: The file is compressed, encrypted, cut short or damaged.
    """
    with naming(name), naming(f"{file.filename!r:.200}"):
        if file.compress_type != zipfile.ZIP_STORED:
            raise FormatError("is compressed, expected a stored file")
        begin = arrays.find_content(folder.view(name, file.header_offset, file.header_offset + 30), file)
        content = folder.view(name, begin, begin + file.file_size)
        arrays.check_content(content, file)
        return content


def index_torch(folder: SourceFolder, name: str) -> Any:
    """Return the object in a file of `torch.save` with parts of the file in place of tensors, for `read_parts`.

    Raises:
        UnsafeSkeletonError: The file names other classes than those of tensors and plain values.
        FormatError: The file is damaged, or has another format.
    """
    with naming(name), folder.open(name) as file:
        return index_pth(file, partial(folder.view_open, file, name), max_expanded(file.seek(0, io.SEEK_END)), REMEDY)


def read_parts(folder: SourceFolder, name: str, value: Any) -> Any:
    """Return a part of the object that `index_torch` has returned, with its tensors.

    Raises:
        FormatError: The file was cut short since, or a bool is a byte other than 0 or 1.
    """
    with naming(name):
        return rebuild(value, lambda part: part.view(folder.view(name, part.begin, part.end)), TensorPart)
