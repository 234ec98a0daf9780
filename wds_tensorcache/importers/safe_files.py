"""Files of numpy, torch and safetensors as tensors. No pickle runs, and a small file never takes much memory."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import sys
import zipfile
import zlib
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.header import MAX_HEADER_NBYTES, Layout, StoredTensor, parse_header
from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.codec.views import check_tensor, view_tensor
from wds_tensorcache.errors import FormatError, TensorCacheError, UnsafeSkeletonError
from wds_tensorcache.importers.crc import crc32
from wds_tensorcache.importers.source_folder import POOL, SourceFolder
from wds_tensorcache.integrations.pickles.arrays import ArrayReader, decode_pickle
from wds_tensorcache.integrations.pickles.pth import load_pth
from wds_tensorcache.integrations.pickles.pth_plans import view_pth
from wds_tensorcache.integrations.pickles.zip_list import ZippedFile, list_zipped
from wds_tensorcache.shards.expansion import max_expanded

_GZIP, _ZIP, _PICKLE = b"\x1f\x8b", b"PK\x03\x04", b"\x80"
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the first pickle in files of torch before 1.6
_IS_ENCRYPTED = 1
_PIECE_NBYTES = 1 << 20
_VIEWED = 1 << 28  # of longer files of torch, only the storages that tensors need are read
_RECYCLED = 1 << 16  # smaller arrays get ordinary memory
_MAX_NPY_HEADER = 1 << 14
_MAX_SMALL_HEADER = 1 << 14
REMEDY = "; if you trust the files, import them with --trust (trust=True)"


def load_npz(folder: SourceFolder, name: str) -> dict[str, torch.Tensor | np.ndarray[Any, Any]]:
    """Return the arrays of an `.npz` file by name, as `as_tensor` returns them.

    Raises:
        FormatError: The file is damaged, contains pickled objects or other files than arrays, or expands too much.
    """
    raw = folder.view(name, find_data=_find_first_array)
    try:
        if not raw:
            raise FormatError("is empty")
        files = list_zipped(raw, len(raw))
        if len({file.filename for file in files}) < len(files):
            raise FormatError("two files in the npz have the same name")
        expanded = sum(file.file_size for file in files)
        most = max_expanded(len(raw))
        if expanded > most:
            raise FormatError(
                f"{len(raw):,} bytes expand to {expanded:,}, expected at most {most:,}; store it uncompressed"
            )
        arrays: dict[str, torch.Tensor | np.ndarray[Any, Any]] = {}
        for file in files:
            if not file.filename.endswith(".npy"):
                raise FormatError(f"{file.filename!r:.100} in the npz is not an array")
            try:
                arrays[file.filename[:-4]] = as_tensor(parse_npy(_extract(raw, file)))
            except FormatError as exc:
                raise exc.at(f"array {file.filename[:-4]!r:.100}") from exc
        return arrays
    except TensorCacheError as exc:
        raise exc.at(name) from exc
    except MemoryError:
        raise
    except Exception as exc:  # zipfile and numpy raise many kinds of exceptions
        raise FormatError(f"cannot be decoded: {exc!r:.300}").at(name) from exc


def list_npz(folder: SourceFolder, name: str) -> list[str]:
    """Return the names of the arrays in an `.npz` file, in the order of the file. No array is read.

    Raises:
        FormatError: The list at the end of the file is damaged.
    """
    try:
        with folder.open(name) as file:
            listed = list_zipped(file, os.fstat(file.fileno()).st_size)
            return [each.filename.removesuffix(".npy") for each in listed]
    except (MemoryError, TensorCacheError):
        raise
    except Exception as exc:  # zipfile raises many kinds of exceptions
        raise FormatError(f"cannot be decoded: {exc!r:.300}").at(name) from exc


def load_npy(folder: SourceFolder, name: str) -> torch.Tensor | np.ndarray[Any, Any]:
    """Return the array in an `.npy` file, as `as_tensor` returns it.

    Raises:
        FormatError: The file is damaged, or contains pickled objects.
    """
    try:
        return as_tensor(parse_npy(folder.view(name)))
    except TensorCacheError as exc:
        raise exc.at(name) from exc
    except MemoryError:
        raise
    except Exception as exc:  # numpy raises many kinds of exceptions
        raise FormatError(f"cannot be decoded: {exc!r:.300}").at(name) from exc


def load_torch(folder: SourceFolder, name: str) -> Any:
    """Return the object in a file of `torch.save`, which may be compressed by gzip; tensors are on the CPU.

    Arrays of numpy stay arrays. If the folder is trusted, `torch.load` or `pickle.loads` reads files that contain other classes
    or have an older format.

    Raises:
        UnsafeSkeletonError: The file names other classes than those of tensors, arrays and plain values.
        FormatError: The file is damaged, has another format, or expands too much.
    """
    try:
        with folder.open(name) as opened, io.BufferedReader(opened) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if folder.trust or not file.peek().startswith(_ZIP):
                return parse_torch(file.read(), folder.trust)
            if nbytes > _VIEWED:
                return load_pth(file, max_expanded(nbytes), {}, REMEDY, REMEDY, ArrayReader)
            raw = folder.view_open(opened, name)
            return view_pth(raw, max_expanded(nbytes), REMEDY, ArrayReader)
    except TensorCacheError as exc:
        raise exc.at(name) from exc


def parse_torch(raw: bytes, trust: bool) -> Any:
    """Return the object in the content of a file of `torch.save`, as `load_torch` does.

    Args:
        raw: Content of the file, which may be compressed by gzip; or a pickle.
        trust: Read other classes and older formats with `torch.load` or `pickle.loads`, which may run code.

    Raises:
        UnsafeSkeletonError: The content names other classes than those of tensors, arrays and plain values.
        FormatError: The content is damaged, has another format, or expands too much.
    """
    if raw.startswith(_GZIP):
        raw = _gunzip(raw)
    limit = sys.maxsize if trust else max_expanded(len(raw))
    try:
        if raw.startswith(_PICKLE) and not raw.startswith(_OLD_TORCH):
            return decode_pickle(raw, limit, REMEDY)
        return load_pth(io.BytesIO(raw), limit, {}, REMEDY, REMEDY, ArrayReader)
    except FormatError as exc:
        if not trust or (raw.startswith(_ZIP) and not isinstance(exc, UnsafeSkeletonError)):
            raise
    try:
        if not raw.startswith((_ZIP, _OLD_TORCH)):
            return pickle.loads(raw)  # noqa: S301 (the user trusts the file)
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=False)
    except Exception as exc:  # whatever a trusted pickle raises
        raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc


def load_pickle(folder: SourceFolder, name: str) -> Any:
    """Return the object in a file of `pickle.dump` or `torch.save`, as `parse_pickle` does.

    Raises:
        UnsafeSkeletonError: The file names other classes than those of arrays, tensors and plain values.
        FormatError: The file is damaged, has another format, or expands too much.
    """
    try:
        return parse_pickle(folder.read(name), folder.trust)
    except TensorCacheError as exc:
        raise exc.at(name) from exc


def parse_pickle(raw: bytes, trust: bool) -> Any:
    """Return the object in a pickle; arrays become tensors, as by `as_tensor`.

    Args:
        raw: Content of a file of `pickle.dump`; or of `torch.save`, because some programs give such files the suffix `.pkl`.
        trust: Read other classes with `pickle.loads` or `torch.load`, which may run code.

    Raises:
        UnsafeSkeletonError: The content names other classes than those of arrays, tensors and plain values.
        FormatError: The content is damaged, has another format, or expands too much.
    """
    if raw.startswith((_ZIP, _OLD_TORCH, _GZIP)):
        value = parse_torch(raw, trust)
    else:
        try:
            value = decode_pickle(raw, max_expanded(len(raw)), REMEDY)
        except FormatError:
            if not trust:
                raise
            try:
                value = pickle.loads(raw)  # noqa: S301 (the user trusts the file)
            except Exception as exc:  # whatever a trusted pickle raises
                raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc
    return tensors_of(value)


def tensors_of(value: Any) -> Any:
    """Return a nested structure with tensors in place of arrays, as by `as_tensor`."""
    return rebuild(value, lambda leaf: as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf)


def load_safetensors(folder: SourceFolder, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a `.safetensors` file, in the order of its header, and its metadata.

    Raises:
        FormatError: The file is damaged.
    """
    raw = folder.view(name, find_data=lambda head: 8 + int.from_bytes(head[:8], "little"))
    try:
        data_begin = 8 + int.from_bytes(raw[:8], "little")
        parse = _parse_small_header if data_begin <= _MAX_SMALL_HEADER else _parse_header
        layout, metadata = parse(bytes(raw[:data_begin]), len(raw))
        address = np.asarray(raw).ctypes.data
        tensors = {name: _view_stored(raw, address, tensor) for name, tensor in layout.tensors.items()}
        return tensors, dict(metadata)
    except TensorCacheError as exc:
        raise exc.at(name) from exc
    except ValueError as exc:
        raise FormatError(f"cannot be decoded: {exc!r:.300}").at(name) from exc


def _parse_header(head: bytes, nbytes: int) -> tuple[Layout, dict[str, str]]:
    """Return the layout in the header of a `.safetensors` file of `nbytes` bytes, and its metadata."""
    layout, _ = parse_header(head, nbytes)
    return layout, json.loads(head[8 : layout.data_begin]).get("__metadata__") or {}


_parse_small_header = lru_cache(64)(_parse_header)  # files whose tensors have equal shapes often have equal headers


def _view_stored(raw: memoryview, address: int, tensor: StoredTensor) -> torch.Tensor:
    dtype = dtype_of(tensor)
    if (address + tensor.begin) % dtype.itemsize:
        return check_tensor(view_tensor(bytearray(raw[tensor.begin : tensor.end]), dtype, tensor.shape))
    return check_tensor(view_tensor(raw, dtype, tensor.shape, tensor.begin))


def dtype_of(tensor: StoredTensor) -> torch.dtype:
    """Return the dtype of a tensor in a `.safetensors` file; raise FormatError if the installed torch does not have it."""
    dtype = getattr(torch, STORED[tensor.dtype][1], None)
    if dtype is None:
        raise FormatError(f"{tensor.dtype} needs a newer release of torch")
    return dtype  # type: ignore[no-any-return]


def read_safetensors_header(folder: SourceFolder, name: str) -> tuple[list[str], dict[str, str]]:
    """Return the names of the tensors in a `.safetensors` file, in the order of their bytes, and its metadata.

    Raises:
        FormatError: The header is damaged.
    """
    tensors, metadata = read_safetensors_tensors(folder, name)
    return list(tensors), metadata


def read_safetensors_tensors(folder: SourceFolder, name: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a `.safetensors` file by name, in the order of their bytes, and its metadata; read only the header.

    Raises:
        FormatError: The header is damaged.
    """
    try:
        with folder.open(name) as file:
            nbytes = os.fstat(file.fileno()).st_size
            begin = file.read(8)
            begin += file.read(min(int.from_bytes(begin, "little"), nbytes, MAX_HEADER_NBYTES))
            layout, _ = parse_header(begin, nbytes)
        metadata = json.loads(begin[8 : layout.data_begin]).get("__metadata__") or {}
        "".join(metadata.values()).encode()  # raises if a value has a surrogate, from an escape in the JSON
        return layout.tensors, metadata
    except TensorCacheError as exc:
        raise exc.at(name) from exc
    except ValueError as exc:
        raise FormatError(f"cannot be decoded: {exc!r:.300}").at(name) from exc


def parse_npy(content: memoryview) -> np.ndarray[Any, Any]:
    """Return the array in the content of an `.npy` file.

    Raises:
        FormatError: The content is too short, or contains pickled objects.
        ValueError: It is not the content of an `.npy` file.

    Memory: aliases `content`, and may be unaligned.
    """
    is_short = len(content) > 6 and content[6] == 1
    begin = 10 + int.from_bytes(content[8:10], "little") if is_short else 12 + int.from_bytes(content[8:12], "little")
    if begin > min(len(content), _MAX_NPY_HEADER):
        raise FormatError(f"the header of the array has {begin:,} bytes, in a file of {len(content):,} bytes")
    shape, is_fortran, dtype = _parse_npy_header(bytes(content[:begin]))
    if dtype.hasobject:
        raise FormatError(f"an array of {dtype} contains pickled objects, which are never read; store plain arrays")
    count = math.prod(shape)
    if count and not dtype.itemsize:
        raise FormatError(f"{count:,} elements of {dtype.str!r} have no bytes")
    if min(shape, default=0) < 0 or begin + count * dtype.itemsize > len(content):
        raise FormatError(f"an array of {dtype} {list(shape)!r:.200} exceeds its file of {len(content):,} bytes")
    flat = np.frombuffer(content, dtype, count, begin) if count * dtype.itemsize else np.empty(count, dtype)
    return flat.reshape(shape, order="F" if is_fortran else "C")


@lru_cache(256)  # the arrays of a trainer have few different shapes
def _parse_npy_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and dtype; True for Fortran's order."""
    stream = io.BytesIO(head)
    # version 3 is version 2 with non-ASCII field names
    is_short = np.lib.format.read_magic(stream) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if is_short else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    return shape, is_fortran, dtype


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor | np.ndarray[Any, Any]:
    """Return a tensor with the same values; the array itself if torch has no such dtype, as for texts.

    Memory: aliases a large array that torch can use as it is; otherwise a copy, recycled when the last reference is gone.
    """
    flags, dtype = array.flags, array.dtype.newbyteorder("=")
    if array.nbytes < _RECYCLED:
        ready = np.empty(array.shape, dtype)
    elif flags.c_contiguous and flags.aligned and flags.writeable and array.dtype.isnative:
        ready = array
    else:
        ready = POOL.lease(array.nbytes).view(dtype).reshape(array.shape)
    if ready is not array:
        np.copyto(ready, array)
    try:
        return torch.from_numpy(ready)
    except TypeError:
        return ready


def _find_first_array(head: bytes) -> int:
    """Return the position of the elements of the first array in an `.npz` file, from the first bytes of the file."""
    begin = _end_of_header(memoryview(head), 0)
    return begin + 10 + int.from_bytes(head[begin + 8 : begin + 10], "little")


def _end_of_header(raw: memoryview, at: int) -> int:
    """Return the end of the header at `at` that precedes a file in a zip: 30 bytes, its name, and extra fields."""
    name_nbytes, extra_nbytes = raw[at + 26 : at + 28], raw[at + 28 : at + 30]
    return at + 30 + int.from_bytes(name_nbytes, "little") + int.from_bytes(extra_nbytes, "little")


def _extract(raw: memoryview, file: ZippedFile | zipfile.ZipInfo) -> memoryview:
    """Return the content of a file in a zip, after a check of its CRC; a view if it is not compressed."""
    at = file.header_offset
    begin = _end_of_header(raw, at)
    content = raw[begin : begin + file.compress_size]
    if raw[at : at + 4] != _ZIP or len(content) < file.compress_size or file.flag_bits & _IS_ENCRYPTED:
        raise FormatError("is cut short or encrypted")
    if file.compress_type == zipfile.ZIP_DEFLATED:
        content = memoryview(zlib.decompressobj(-15).decompress(content, file.file_size + 1))
    elif file.compress_type != zipfile.ZIP_STORED:
        raise FormatError("is compressed, but not by deflate, as numpy does")
    if len(content) != file.file_size or crc32(content) != file.CRC:
        raise FormatError("is damaged: its length or CRC is not as listed")
    return content


def _gunzip(raw: bytes) -> bytes:
    limit, expanded = max_expanded(len(raw)), bytearray()
    try:
        # in pieces, because gzip.decompress copies all bytes after each of the concatenated streams
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            while piece := file.read(_PIECE_NBYTES):
                expanded += piece
                if len(expanded) > limit:
                    raise FormatError(f"the gzip file expands to more than {limit:,} bytes; decompress it first")
    except EOFError as exc:
        raise FormatError("the gzip file is cut short") from exc
    except (OSError, zlib.error) as exc:
        raise FormatError(f"the gzip file is damaged: {exc}") from exc
    return bytes(expanded)
