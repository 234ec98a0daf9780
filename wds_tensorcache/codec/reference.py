"""References in a skeleton: each names a tensor of a layout; a source provides the tensor's bytes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import true_dtype
from wds_tensorcache.codec.layout import Layout
from wds_tensorcache.codec.views import view_bytes
from wds_tensorcache.errors import FormatError

__all__ = ["MemorySource", "Reference", "Source", "check_named", "named_by", "reference_text", "resolve"]


class Source(Protocol):
    """Bytes of a `.safetensors` member; offsets count from the member's first byte."""

    def read(self, begin: int, end: int) -> bytearray | np.ndarray[Any, Any]:
        """Return a private copy of the bytes `[begin, end)`, or raise."""

    def read_into(self, buffer: memoryview, begin: int) -> None:
        """Fill `buffer` (1-D, bytes) from `begin`, or raise."""

    def view(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        """Return the bytes `[begin, end)` as uint8 without a copy; the caller must never write into them, even if numpy can.

        The view of a file is a memory map: reading it kills the process (SIGBUS) if the file is truncated in place.
        """

    def hold(self, begin: int, end: int) -> bytearray | np.ndarray[Any, Any]:
        """Return the bytes `[begin, end)`, read-only, in memory that no other process can change."""

    def cut(self, begin: int, end: int) -> tuple[Source, int]:
        """Return a source of `[begin, end)` for another process, and the offset of `begin` in it."""


class MemorySource:
    """A member in memory, for example from a stream of webdataset; pickled as its bytes."""

    __slots__ = ("member",)

    def __init__(self, member: bytes | memoryview) -> None:
        self.member = memoryview(member)

    def read(self, begin: int, end: int) -> bytearray:
        return bytearray(self.member[begin:end])

    def read_into(self, buffer: memoryview, begin: int) -> None:
        buffer[:] = self.member[begin : begin + len(buffer)]

    def view(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        return view_bytes(self.member[begin:end])

    hold = view

    def cut(self, begin: int, end: int) -> tuple[Source, int]:
        return MemorySource(self.member[begin:end]), 0

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return MemorySource, (pickle.PickleBuffer(self.member) if protocol >= 5 else bytes(self.member),)


@dataclass(frozen=True, slots=True)
class Reference:
    """A skeleton's reference to one tensor of a layout.

    Attributes:
        name: Name in the `.safetensors` member.
        kind: `"tensor"` for a torch.Tensor, `"ndarray"` for an np.ndarray.
        dtype: True dtype, of torch or of numpy.
        shape: Shape in elements of `dtype`.
        begin, end: Range of bytes in the member.
        attribute: The reference's `dtype` attribute, or None.
    """

    name: str
    kind: str
    dtype: Any
    shape: tuple[int, ...]
    begin: int
    end: int
    attribute: str | None


@lru_cache(4096)  # samples of one cache have the same names
def reference_text(kind: str, name: str, attribute: str | None) -> str:
    """Return the text of a reference."""
    return f"{kind}:{name}" if attribute is None else f"{kind}:{name}?dtype={attribute}"


def named_by(text: str) -> tuple[str, str]:
    """Return the kind and the name in a reference text."""
    kind, _, rest = text.partition(":")
    return kind, rest.partition("?")[0]


def resolve(layout: Layout, text: str) -> Reference:
    """Return the reference for this text; the layout caches it.

    Raises:
        FormatError: The tensor, the kind, the attribute or the dtype is unknown.
    """
    known = layout.references.get(text)
    if known is not None:
        return known  # type: ignore[no-any-return]
    kind, _, rest = text.partition(":")
    name, mark, attributes = rest.partition("?")
    stored = layout.tensors.get(name)
    if kind not in ("tensor", "ndarray"):
        raise FormatError(f"reference {text!r:.100} is neither a tensor nor an ndarray")
    if stored is None:
        raise FormatError(f"the skeleton names tensor {name!r:.100}, which the safetensors member does not have")
    if mark and (not attributes.startswith("dtype=") or "&" in attributes):
        raise FormatError(f"tensor {name!r}: unknown attribute {attributes!r:.100}; a newer release may know it")
    attribute = attributes.removeprefix("dtype=") if mark else None
    try:
        dtype, inner = true_dtype(kind, stored.dtype, attribute)
    except (ValueError, TypeError) as exc:
        raise FormatError(f"tensor {name!r}: {exc}") from exc
    shape = stored.shape[: len(stored.shape) - len(inner)]
    if stored.shape[len(shape) :] != inner:
        raise FormatError(f"tensor {name!r}: {stored.dtype}{list(stored.shape)} cannot be a view of {dtype}")
    if kind == "tensor":
        shape = torch.Size(shape)
    reference = Reference(name, kind, dtype, shape, stored.begin, stored.end, attribute)
    # Hazard: texts come from files, and layouts live long.
    if len(layout.references) < 16 + 4 * len(layout.tensors):
        layout.references[text] = reference
    return reference


def check_named(layout: Layout, texts: Iterable[str]) -> None:
    """Raise FormatError unless the resolved `texts` together name each tensor of `layout` exactly once."""
    names: set[str] = set()
    for text in texts:
        name = named_by(text)[1]
        if name in names:
            raise FormatError(f"tensor {name!r:.100} is referred to in two ways")
        names.add(name)
    extra = [name for name in layout.tensors if name not in names]
    if extra:
        raise FormatError(f"the safetensors member has tensors that the skeleton does not name: {extra!r:.200}")
