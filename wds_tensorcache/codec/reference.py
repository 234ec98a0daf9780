"""References from skeletons to tensors, and sources of the tensors' bytes.

In place of a tensor, a skeleton (the pickle of a sample) contains a string, for example `tensor:latent`. A layout (the parsed
header of the `.safetensors` member) resolves that string to a reference, which contains name, dtype, shape and byte range.
Names are paths in the sample (FORMAT.md 2.3).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import true_dtype
from wds_tensorcache.codec.header import Layout
from wds_tensorcache.codec.views import view_bytes
from wds_tensorcache.errors import FormatError

RESERVED = "__metadata__"  # safetensors reserves this name
_ESCAPED = re.compile("[%.?:\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class ByteSource(Protocol):
    """The bytes of a `.safetensors` member in memory or a file. Offsets count from its first byte."""

    def read(self, begin: int, end: int) -> bytearray | np.ndarray[Any, Any]:
        """Return a private copy of the bytes `[begin, end)`. Raise an error if they cannot be read."""

    def allocate(self, nbytes: int) -> bytearray | np.ndarray[Any, Any]:
        """Return private memory of `nbytes` bytes, to read into."""

    def read_into(self, buffers: Sequence[Any], begin: int) -> None:
        """Fill 1-D byte buffers, in order, with the bytes from `begin` on. Raise an error if they cannot be read."""

    def view(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        """Return the bytes `[begin, end)` as uint8. Never write into them, even if numpy allows it.

        A file that cannot be mapped is copied. Reading a map kills the process (SIGBUS) if the file is truncated in place.
        """

    def hold(self, begin: int, end: int) -> bytearray | np.ndarray[Any, Any]:
        """Return the bytes `[begin, end)` in memory that no other process can change. Never write into them."""

    def cut(self, begin: int, end: int) -> tuple[ByteSource, int]:
        """Return a source of `[begin, end)` for another process, and `begin`'s offset there. It may contain more bytes."""


class MemorySource:
    """A source in memory, for example a member from a webdataset stream. Its pickle contains the bytes."""

    __slots__ = ("member",)

    def __init__(self, member: bytes | memoryview) -> None:
        self.member = memoryview(member)

    def read(self, begin: int, end: int) -> bytearray:
        return bytearray(self.member[begin:end])

    def allocate(self, nbytes: int) -> bytearray:
        return bytearray(nbytes)

    def read_into(self, buffers: Sequence[Any], begin: int) -> None:
        for buffer in buffers:
            memoryview(buffer)[:] = self.member[begin : begin + len(buffer)]
            begin += len(buffer)

    def view(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        return view_bytes(self.member[begin:end])

    hold = view

    def cut(self, begin: int, end: int) -> tuple[ByteSource, int]:
        return MemorySource(self.member[begin:end]), 0

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return MemorySource, (pickle.PickleBuffer(self.member) if protocol >= 5 else bytes(self.member),)


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference from a skeleton to one tensor of a layout."""

    name: str  # of the tensor in the `.safetensors` member
    kind: str  # "tensor" for a torch.Tensor, "ndarray" for an np.ndarray
    dtype: Any  # true dtype, of torch or of numpy
    shape: tuple[int, ...]  # in elements of `dtype`
    begin: int  # byte range in the member
    end: int
    attribute: str | None  # `dtype` in the string of the reference


def reference_text(kind: str, name: str, attribute: str | None) -> str:
    """Return the string of a reference, for example `tensor:latent` or `ndarray:date?dtype=datetime64[s]`."""
    return f"{kind}:{name}" if attribute is None else f"{kind}:{name}?dtype={attribute}"


def parse_reference(text: str) -> tuple[str, str, str | None]:
    """Split a reference into kind, name, and attribute `dtype` or None. Raise FormatError if one is unknown."""
    kind, _, rest = text.partition(":")
    name, mark, attributes = rest.partition("?")
    if kind not in ("tensor", "ndarray"):
        raise FormatError(f"reference {text!r:.100} begins with neither 'tensor:' nor 'ndarray:'")
    if mark and (not attributes.startswith("dtype=") or "&" in attributes):
        raise FormatError(f"tensor {name!r}: unknown attribute {attributes!r:.100}; a newer release may support it")
    return kind, name, attributes.removeprefix("dtype=") if mark else None


def resolve(layout: Layout, text: str) -> Reference:
    """Resolve the string of a reference in `layout`, which caches it. Raise FormatError if a part is unknown."""
    reference: Reference | None = layout.references.get(text)
    if reference is not None:
        return reference
    kind, name, attribute = parse_reference(text)
    stored = layout.tensors.get(name)
    if stored is None:
        raise FormatError(f"the skeleton refers to tensor {name!r:.100}, which is not in the safetensors member")
    try:
        dtype, inner = true_dtype(kind, stored.dtype, attribute)
    except (ValueError, TypeError) as exc:
        raise FormatError(f"tensor {name!r}: {exc}") from exc
    shape = stored.shape[: len(stored.shape) - len(inner)]
    if stored.shape[len(shape) :] != inner:
        raise FormatError(f"tensor {name!r}: {dtype} cannot be stored as {stored.dtype}{list(stored.shape)}")
    if kind == "tensor":
        shape = torch.Size(shape)
    reference = Reference(name, kind, dtype, shape, stored.begin, stored.end, attribute)
    # The strings come from files, so without a limit a hostile file could fill this dict.
    if len(layout.references) < 16 + 4 * len(layout.tensors):
        layout.references[text] = reference
    return reference


def check_named(layout: Layout, texts: Iterable[str]) -> None:
    """Raise FormatError unless `texts` refer to each tensor of `layout` exactly once."""
    names: set[str] = set()
    for text in texts:
        name = resolve(layout, text).name
        if name in names:
            raise FormatError(f"the skeleton refers to tensor {name!r:.100} in two ways")
        names.add(name)
    extra = [name for name in layout.tensors if name not in names]
    if extra:
        raise FormatError(f"the safetensors member has tensors that the skeleton does not refer to: {extra!r:.200}")


def _escape(key: str) -> str:
    text = _ESCAPED.sub(lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode("utf-8", "surrogatepass")), key)
    return text or "%"


short_component = lru_cache(4096)(_escape)  # samples of one cache have the same keys


def component(key: object, position: int) -> str:
    """Return the path component of a key at `position` in its dict."""
    if type(key) is str:
        return short_component(key) if len(key) < 64 else _escape(key)
    return str(key) if type(key) is int and abs(key) < 1 << 64 else f"@{position}"


def join_path(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def place(path: str) -> str:
    """Return words for the value at `path` in an error message."""
    return f"value at {path!r}" if path else "the sample"
