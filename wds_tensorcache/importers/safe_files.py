"""Readers of numpy, torch and safetensors files. In untrusted files, no code runs, and memory is limited."""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import struct
import sys
import zipfile
import zlib
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.header import MAX_HEADER_NBYTES, Layout, StoredTensor, parse_header
from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.codec.views import check_tensor, view_bytes, view_tensor
from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.source_folder import POOL, RECYCLED, SourceFolder, naming, view_open
from wds_tensorcache.integrations import arrays
from wds_tensorcache.integrations.arrays import ZIP, gunzip, parse_npy, parse_npz
from wds_tensorcache.integrations.pickles import OLD_TORCH, decode_pickle, load_pth
from wds_tensorcache.shards.expansion import max_expanded

_GZIP, _PICKLE = b"\x1f\x8b", b"\x80"
_ZIP_HEAD = struct.Struct("<26xHH")  # of a file in a zip, with the lengths of its name and its extra field
_ALIGNMENT = 64  # of arrays in bytes, enough for every dtype
_HEAD_NBYTES = 32  # of an old file of torch: the number of the protocol, a frame, and the number that marks such files
_MAPPED = 1 << 28  # longer files of torch are mapped
REMEDY = "; if you trust the files, import them with --trust (trust=True)"


def load_npz(folder: SourceFolder, name: str) -> dict[str, Any]:
    """Return the arrays of an `.npz` file by name, converted by `as_tensor`. Objects are unpickled only in trusted files."""
    with folder.open(name) as file:
        files = arrays.list_zip(file)
        if not files:
            return {}
        begin = _ZIP_HEAD.size + sum(_ZIP_HEAD.unpack(os.pread(file.fileno(), _ZIP_HEAD.size, 0)))  # of the first array
        # Hazard: some processors copy eight times as slowly into memory that begins 1 to 15 bytes after a page.
        raw = view_open(file, shift=2 * _ALIGNMENT - begin % _ALIGNMENT)
        parsed = parse_npz(raw, files, _find_limit(len(raw), folder.trust), REMEDY, folder.trust)
        return {key: as_tensor(array) for key, array in parsed.items()}


def list_zip(folder: SourceFolder, name: str) -> list[zipfile.ZipInfo]:
    """List a zip's files; raise FormatError for damage or repeated names."""
    with folder.open(name) as file:
        return list(arrays.list_zip(file).values())


def load_npy(folder: SourceFolder, name: str) -> Any:
    """Return the array in an `.npy` file, converted by `as_tensor`. Objects are unpickled only in trusted files."""
    with naming(name):
        return as_tensor(parse_npy(folder.view(name), folder.trust))


def parse_numpy(raw: bytes, kind: str, trust: bool) -> Any:
    """Return the array or arrays in `npy` or `npz` content. Objects are unpickled only with `trust`."""
    if kind == "npy":
        return parse_npy(raw, trust)
    limit = _find_limit(len(raw), trust)
    return parse_npz(memoryview(raw), arrays.list_zip(io.BytesIO(raw)), limit, REMEDY, trust)


def load_torch(folder: SourceFolder, name: str, is_mapped: bool = False) -> Any:
    """Return the object in a file of `torch.save`; see `parse_torch`.

    Memory: tensors may alias the content; never write to them. With `is_mapped`, or if the file has more than 256 MiB, the
        content is mapped, and read on use.
    """
    with folder.open(name) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes and (is_mapped or nbytes > _MAPPED):
            # not writable, because the system limits the total length of writable maps
            raw = view_bytes(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))).data
        else:
            raw = view_open(file)
        return parse_torch(raw, folder.trust, file)


def parse_torch(raw: Any, trust: bool, file: BinaryIO | None = None) -> Any:
    """Return the object in a file of `torch.save` or `pickle.dump`. Tensors are on the CPU; arrays stay arrays.

    Args:
        raw: Content of the file, which may be compressed by gzip.
        trust: Read other classes and older formats with `torch.load` or `pickle.loads`, which may run code. Modules
            become their state dicts.
        file: The file itself, if there is one.

    Raises:
        UnsafeSkeletonError: Without `trust`, the content names a class other than those of tensors, arrays and plain values.
        FormatError: The content is damaged, or has an unknown format, or expands too much.
    """
    limit = _find_limit(len(raw), trust)
    if raw[:2] == _GZIP:
        try:
            raw, file = gunzip(raw, limit, REMEDY), None
        except (EOFError, OSError, zlib.error) as exc:
            raise FormatError(f"the gzip file is damaged or cut short: {exc}") from exc
        limit = _find_limit(len(raw), trust)
    is_old = OLD_TORCH[2:] in bytes(raw[:_HEAD_NBYTES])  # without the number of the protocol, which may be 2 to 5
    stream = io.BytesIO(raw) if file is None else file
    try:
        if raw[:1] == _PICKLE and not is_old:
            return decode_pickle(bytes(raw), limit, REMEDY)
        return load_pth(stream, raw, limit, REMEDY)
    except FormatError:
        if not trust:
            raise
    try:
        if is_old or raw[:4] == ZIP:
            stream.seek(0)
            value = torch.load(stream, map_location="cpu", weights_only=False)
        else:
            pickled = io.BytesIO(raw)
            value = pickle.load(pickled)  # noqa: S301 (the user trusts the file)
            if pickled.read(1):
                raise ValueError("bytes follow the pickle")
        return rebuild(value, lambda module: module.state_dict(), torch.nn.Module)
    except Exception as exc:  # whatever a trusted pickle raises
        raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc


def _find_limit(nbytes: int, trust: bool) -> int:
    return sys.maxsize if trust else max_expanded(nbytes)


def load_pickle(folder: SourceFolder, name: str) -> Any:
    """Return the object that `load_torch` returns, with tensors in place of arrays."""
    return tensors_of(load_torch(folder, name))


def tensors_of(value: Any) -> Any:
    """Return a nested structure with tensors in place of arrays; see `as_tensor`."""
    return rebuild(value, lambda leaf: as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf)


def load_safetensors(folder: SourceFolder, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and metadata of a `.safetensors` file. Tensors are in the order of their bytes."""
    with naming(name):
        raw = folder.view(name)
        data_begin = 8 + int.from_bytes(raw[:8], "little")
        layout, metadata = _parse_header(bytes(raw[:data_begin]), len(raw))
        tensors = {}
        for key, tensor in layout.tensors.items():
            content = raw[tensor.begin : tensor.end]
            is_aligned = tensor.begin % STORED[tensor.dtype][0] == 0
            tensors[key] = view_stored(content if is_aligned else bytearray(content), tensor.dtype, tensor.shape)
        return tensors, dict(metadata)


@lru_cache(16)  # files whose tensors have equal shapes often have equal headers
def _parse_header(head: bytes, nbytes: int) -> tuple[Layout, dict[str, str]]:
    layout, _ = parse_header(head, nbytes)
    return layout, json.loads(head[8 : layout.data_begin]).get("__metadata__") or {}


def view_stored(content: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """View aligned, writable bytes of a `.safetensors` file as a tensor. `dtype` is a name of safetensors."""
    return check_tensor(view_tensor(content, getattr(torch, STORED[dtype][1]), shape))


def read_safetensors_header(folder: SourceFolder, name: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors and metadata in the header of a `.safetensors` file.

    Tensors are by name, in the order of their bytes. Only the header is read.
    """
    with folder.open(name) as file:
        nbytes = os.fstat(file.fileno()).st_size
        begin = file.read(8)
        begin += file.read(min(int.from_bytes(begin, "little"), nbytes, MAX_HEADER_NBYTES))
        layout, metadata = _parse_header(begin, nbytes)
        "".join(metadata.values()).encode()  # raises if a value has a surrogate, from an escape in the JSON
        return layout.tensors, metadata


def as_tensor(array: np.ndarray[Any, Any]) -> Any:
    """Return a tensor with the values of an array. If torch lacks the dtype, for example for texts, return an array.

    A text of shape `[]` becomes a str. An array of objects, which only a trusted file may contain, becomes nested lists, or its
    only object if its shape is `[]`.

    Memory: aliases a large array that torch can use as it is. Otherwise the values are copied. The memory of a large copy is
    recycled when the last reference is gone.
    """
    if array.dtype.hasobject:
        return tensors_of(array.tolist())
    if array.dtype.kind == "U" and not array.ndim:
        return array.item()  # the dtype of a text has its length, so texts as arrays cannot form a batch
    flags, dtype = array.flags, array.dtype.newbyteorder("=")
    if array.nbytes < RECYCLED:
        ready = np.empty(array.shape, dtype)
        ready[...] = array
    elif flags.c_contiguous and flags.aligned and flags.writeable and array.dtype.isnative:
        ready = array
    else:
        ready = POOL.lease(array.nbytes).view(dtype).reshape(array.shape)
        ready[...] = array
    try:
        return torch.from_numpy(ready)
    except TypeError:
        return ready
