"""The contents of a sample's exported files: of `torch.save`, numpy or safetensors, and the values beside the tensors."""

from __future__ import annotations

import copyreg
import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from datetime import datetime, time
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.torch
import torch

from wds_tensorcache.codec.binding import parse_preamble
from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.header import StoredTensor
from wds_tensorcache.codec.lazy import Lazy, LazyTensor
from wds_tensorcache.codec.reference import MemorySource
from wds_tensorcache.codec.sample import EncodedSample, decode_body, encode_views
from wds_tensorcache.codec.tensor_names import component, join_path
from wds_tensorcache.codec.tree import SEQUENCES
from wds_tensorcache.errors import EncodeError
from wds_tensorcache.integrations.exporting.structure import STRUCTURE, build_structure, file_names
from wds_tensorcache.integrations.exporting.widening import WIDENED, widen
from wds_tensorcache.reading.description import shown_value

_MAX_VALUES = 1 << 18  # of a sample in an npz or safetensors file; a small one may contain one list any number of times
_MAX_NAME = 10_000


class ExportNotes:
    """Tensors and values that files hold in another form.

    Attributes:
        widened: Dtypes in the files by name, for tensors whose own dtype the files cannot hold.
        as_text: Types by name, for values that JSON cannot hold.
    """

    def __init__(self) -> None:
        self.widened: dict[str, str] = {}
        self.as_text: dict[str, str] = {}


class _Pickler(pickle.Pickler):
    """A pickler that keeps `fold`, which pickles of protocol 2 lose otherwise."""

    dispatch_table = copyreg.dispatch_table | {
        datetime: lambda value: value.__reduce_ex__(4),
        time: lambda value: value.__reduce_ex__(4),
    }


_PICKLE: Any = SimpleNamespace(**{**vars(pickle), "Pickler": _Pickler})


def encode_torch(sample: Any) -> bytes:
    """Return the content of a file of `torch.save`."""
    stream = io.BytesIO()
    torch.save(sample, stream, pickle_module=_PICKLE)
    return stream.getvalue()


def encode_files(
    sample: Any, kind: str, of_values: str, notes: ExportNotes, metadata: dict[str, str] | None
) -> dict[str, bytes]:
    """Return the contents of the files of a sample by suffix; the one with its tensors is the last.

    Args:
        sample: Sample with loaded tensors.
        kind: "npz" or "safetensors".
        of_values: Suffix of the file with the values that are not tensors.
        notes: Receives what the files hold in another form.
        metadata: Metadata of a `.safetensors` file.

    Raises:
        EncodeError: The files cannot hold the sample.
    """
    encoded = encode_views(sample, {})
    begin = parse_preamble(encoded.skeleton)[0]
    lazy = decode_body(encoded.skeleton, begin, encoded.layout, MemorySource(b""), True, {})
    leaves = list(_all_leaves(lazy))
    tensors = {leaf.name: leaf for _, leaf in leaves if isinstance(leaf, Lazy)}
    names = file_names(chain(encoded.layout.tensors, (path for path, leaf in leaves if not isinstance(leaf, Lazy))))
    stored = _stored_arrays(encoded)
    arrays: dict[str, Any] = {}
    is_plain = type(lazy) is dict and len(leaves) == len(tensors) == len(lazy) == len(stored)
    for name in (*tensors, *(name for name in stored if name not in tensors)):
        arrays[names[name]], note = _as_file_array(tensors.get(name), *stored[name], kind)
        if note:
            notes.widened[names[name]] = note
        is_plain = is_plain and not note and isinstance(tensors.get(name), LazyTensor)
    met: set[str] = set()
    for path, leaf in leaves:
        if isinstance(leaf, Lazy) and leaf.name in met:  # such a tensor has each of its names in the file
            arrays.setdefault(file_names([path])[path], arrays[names[leaf.name]])
        elif isinstance(leaf, Lazy):
            met.add(leaf.name)
    values = {names[path]: leaf for path, leaf in leaves if not isinstance(leaf, Lazy)}
    content = _write_npz(arrays) if kind == "npz" else _write_safetensors(arrays, metadata)
    order = list(arrays) if kind == "npz" else _order_of(content)
    files = {of_values: _encode_json(values, notes)} if values else {}
    if not is_plain or list(lazy) != order:
        files[STRUCTURE] = build_structure(encoded, names)
    return {**files, kind: content}


def _all_leaves(sample: Any) -> Iterator[tuple[str, Any]]:
    try:
        for number, (name, leaf) in enumerate(_leaves(sample, "")):
            if number >= _MAX_VALUES or len(name) > _MAX_NAME:
                what = f"has more than {_MAX_VALUES:,} values, or a name of more than {_MAX_NAME:,} characters; use pt"
                raise EncodeError(what)
            yield name, leaf
    except RecursionError as exc:
        raise EncodeError("is nested too deeply, or contains itself; use pt") from exc


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and other values of nested containers, by their paths; empty containers are values."""
    if isinstance(value, dict) and value:
        items = [(component(key, position), item) for position, (key, item) in enumerate(value.items())]
    elif isinstance(value, SEQUENCES) and any(isinstance(item, (dict, *SEQUENCES, Lazy)) for item in value):
        items = [(str(position), item) for position, item in enumerate(value)]
    else:
        yield name, value
        return
    yield from chain.from_iterable(_leaves(item, join_path(name, part)) for part, item in items)


def _stored_arrays(encoded: EncodedSample) -> dict[str, tuple[np.ndarray[Any, Any], StoredTensor]]:
    """Return the bytes of each tensor as the cache stores them, uint8 without dimensions, by its name in the cache."""
    content = np.frombuffer(b"".join(encoded.buffers), np.uint8)
    first = len(encoded.header)
    return {
        name: (content[tensor.begin - first : tensor.end - first], tensor)
        for name, tensor in encoded.layout.tensors.items()
    }


def _as_file_array(lazy: Lazy | None, raw: np.ndarray[Any, Any], stored: StoredTensor, kind: str) -> tuple[Any, str]:
    """Return an array for an npz or a tensor for safetensors, and its dtype in the file if that is not its own."""
    _, torch_name, numpy_name = STORED[stored.dtype]
    own = str(getattr(lazy, "dtype", torch_name)).removeprefix("torch.")
    if kind == "safetensors":
        tensor = torch.empty(stored.shape, dtype=getattr(torch, torch_name))
        if raw.size:
            tensor.reshape(-1).view(torch.uint8).numpy()[:] = raw
        return tensor, torch_name if own != torch_name and own != numpy_name else ""
    if stored.dtype in WIDENED:
        bits = raw.view(np.uint16 if stored.dtype == "BF16" else np.uint8).reshape(stored.shape)
        return widen(bits, stored.dtype), "float32"
    try:
        dtype = np.dtype(own if isinstance(lazy, LazyTensor) else getattr(lazy, "dtype", numpy_name))
        shape: tuple[int, ...] = tuple(stored.shape if lazy is None else lazy.shape)
    except TypeError:  # torch alone has it
        dtype, shape = np.dtype(numpy_name), stored.shape
    return raw.view(dtype).reshape(shape), "" if dtype.name == own or str(dtype) == own else dtype.name


def _write_npz(arrays: dict[str, np.ndarray[Any, Any]]) -> bytes:
    # not `np.savez`, which has a parameter `file`
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue())
    return stream.getvalue()


def _write_safetensors(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> bytes:
    # a copy: a tensor may occur twice, and safetensors refuses tensors that share memory
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        return safetensors.torch.save(copies, metadata)
    except (KeyError, ValueError, RuntimeError) as exc:
        raise EncodeError(f"a safetensors file cannot hold the sample: {exc!r:.300}; use pt") from exc


def _order_of(content: bytes) -> list[str]:
    """Return the names in the header of a `.safetensors` file, in its order."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def _encode_json(values: dict[str, Any], notes: ExportNotes) -> bytes:
    held = {}
    for name, value in values.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            same = None
        if same == value or (isinstance(value, tuple) and same == list(value)):
            held[name] = value
        else:
            held[name] = shown_value(value)
            notes.as_text[name] = type(value).__name__
    try:
        return json.dumps(held, ensure_ascii=False, indent=1).encode("utf-8")
    except UnicodeEncodeError:  # lone surrogates, as in names of files that are not UTF-8
        return json.dumps(held, indent=1).encode("ascii")
