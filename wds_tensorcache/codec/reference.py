"""What a skeleton's reference stands for: a tensor of a layout, and the source that holds its bytes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import numpy_dtype, torch_dtype
from wds_tensorcache.codec.layout import Layout
from wds_tensorcache.codec.views import view_bytes
from wds_tensorcache.errors import FormatError

__all__ = ["MemorySource", "Reference", "Source", "check_named", "named_by", "reference_text", "resolve"]


class Source(Protocol):
    """Where bytes of a `.safetensors` member lie; offsets count from the member's first byte."""

    def read(self, begin: int, end: int) -> bytearray | np.ndarray[Any, Any]:
        """Return the bytes `[begin, end)` in memory of their own, or raise."""

    def read_into(self, buffer: memoryview, begin: int) -> None:
        """Fill `buffer` (1-D, bytes) from `begin`, or raise."""

    def view(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        """Return the bytes `[begin, end)` as uint8 without copying them; they may not be written to, whatever numpy says.

        A file's are a memory map's: if the file is cut short in place, reading them kills the process (SIGBUS).
        """

    def hold(self, begin: int, end: int) -> bytearray | np.ndarray[Any, Any]:
        """Return the bytes `[begin, end)` in memory that nothing outside this process changes; they may not be written to."""

    def cut(self, begin: int, end: int) -> tuple[Source, int]:
        """Return what another process needs to read `[begin, end)`, and where that then begins."""


class MemorySource:
    """A member that is in memory already, as webdataset's streams deliver it. Pickles as its bytes."""

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
    """One tensor of a layout as its skeleton refers to it.

    Attributes:
        name: In the `.safetensors` member.
        kind: `"tensor"` (comes back as torch.Tensor) or `"ndarray"` (as np.ndarray).
        dtype: The true one, of torch or of numpy.
        shape: In elements of `dtype`.
        begin, end: Bytes of the member.
        attribute: The reference's `dtype` attribute, if it has one.
    """

    name: str
    kind: str
    dtype: Any
    shape: tuple[int, ...]
    begin: int
    end: int
    attribute: str | None


@lru_cache(4096)  # the names are the same in every sample
def reference_text(kind: str, name: str, attribute: str | None) -> str:
    """Return how a skeleton refers to a tensor."""
    return f"{kind}:{name}" if attribute is None else f"{kind}:{name}?dtype={attribute}"


def named_by(text: str) -> tuple[str, str]:
    """Return the kind and the name in the text of a reference."""
    kind, _, rest = text.partition(":")
    return kind, rest.partition("?")[0]


def resolve(layout: Layout, text: str) -> Reference:
    """Return what the reference `text` stands for, once per layout.

    Raises:
        FormatError: No such tensor, or a kind, attribute or dtype that this release does not know.
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
    attribute = None
    for pair in attributes.split("&") if mark else ():
        key, _, value = pair.partition("=")
        if key != "dtype" or attribute is not None:
            raise FormatError(f"tensor {name!r}: unknown attribute {pair!r:.100}; a newer release may know it")
        attribute = value
    try:
        dtype, inner = (torch_dtype if kind == "tensor" else numpy_dtype)(stored.dtype, attribute)
    except (KeyError, TypeError) as exc:
        raise FormatError(f"tensor {name!r}: {exc.args[0]}") from exc
    shape = stored.shape[: len(stored.shape) - len(inner)]
    if stored.shape[len(shape) :] != inner:
        raise FormatError(f"tensor {name!r}: {stored.dtype}{list(stored.shape)} cannot be a view of {dtype}")
    if kind == "tensor":
        shape = torch.Size(shape)
    reference = Reference(name, kind, dtype, shape, stored.begin, stored.end, attribute)
    if len(layout.references) < 16 + 4 * len(layout.tensors):  # texts come from files; layouts live long
        layout.references[text] = reference
    return reference


def check_named(layout: Layout, texts: Iterable[str]) -> None:
    """Raise FormatError unless `texts`, all of which `resolve` knows, refer to every tensor of `layout`, each in one way."""
    names: set[str] = set()
    for text in texts:
        name = named_by(text)[1]
        if name in names:
            raise FormatError(f"tensor {name!r:.100} is referred to in two ways")
        names.add(name)
    extra = [name for name in layout.tensors if name not in names]
    if extra:
        raise FormatError(f"the safetensors member has tensors that the skeleton does not name: {extra!r:.200}")
