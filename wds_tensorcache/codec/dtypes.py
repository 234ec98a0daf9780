"""The table of FORMAT.md 3.2: which dtype is stored as what.

A *stored* dtype is a name of the safetensors specification that every admitted safetensors release loads. A *true* dtype
that safetensors cannot hold is stored as a view of one that it can, and named by the reference's `dtype` attribute.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import torch

__all__ = ["STORED", "TORCH_TRUE", "TrueDtype", "numpy_dtype", "numpy_true_dtype", "torch_dtype"]

# safetensors name -> (bytes per element, torch name, numpy name); a torch release may lack the newest of them
STORED: dict[str, tuple[int, str, str | None]] = {
    "BOOL": (1, "bool", "bool"),
    "U8": (1, "uint8", "uint8"),
    "I8": (1, "int8", "int8"),
    "F8_E4M3": (1, "float8_e4m3fn", None),
    "F8_E5M2": (1, "float8_e5m2", None),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz", None),
    "F8_E5M2FNUZ": (1, "float8_e5m2fnuz", None),
    "U16": (2, "uint16", "uint16"),
    "I16": (2, "int16", "int16"),
    "F16": (2, "float16", "float16"),
    "BF16": (2, "bfloat16", None),
    "U32": (4, "uint32", "uint32"),
    "I32": (4, "int32", "int32"),
    "F32": (4, "float32", "float32"),
    "U64": (8, "uint64", "uint64"),
    "I64": (8, "int64", "int64"),
    "F64": (8, "float64", "float64"),
    "C64": (8, "complex64", "complex64"),
}


@dataclass(frozen=True, slots=True)
class TrueDtype:
    """How one dtype lies in the file.

    Attributes:
        stored: safetensors dtype name.
        inner: Elements of the stored dtype in one element of the true one; they become a last dimension, `()` if one.
        attribute: Value of the reference's `dtype` attribute; None where the stored dtype says it all.
        itemsize: Bytes per element of the *stored* dtype, which is what alignment goes by.
    """

    stored: str
    inner: tuple[int, ...] = ()
    attribute: str | None = None
    itemsize: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "itemsize", STORED[self.stored][0])


# torch names that safetensors has no dtype for, or saves and then cannot load
_TORCH_VIEWS = {
    "complex32": TrueDtype("F16", (2,), "complex32"),
    "complex128": TrueDtype("F64", (2,), "complex128"),
    "float8_e8m0fnu": TrueDtype("U8", (), "float8_e8m0fnu"),
    "float4_e2m1fn_x2": TrueDtype("U8", (), "float4_e2m1fn_x2"),
}
_TORCH_BY_NAME = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# how each dtype of torch is stored; those that the format has no place for (quantised, bits, sub-byte ints) are missing
TORCH_TRUE = {
    _TORCH_BY_NAME[name]: true
    for name, true in (*((row[1], TrueDtype(stored)) for stored, row in STORED.items()), *_TORCH_VIEWS.items())
    if name in _TORCH_BY_NAME
}
_NUMPY_NATIVE = {np.dtype(row[2]): TrueDtype(stored) for stored, row in STORED.items() if row[2] is not None}

# the generic unit has no name that numpy.dtype() takes back, and no meaning either: it is not in the table
_TIME = re.compile(r"(?:datetime|timedelta)64\[(?:[1-9]\d{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\]", re.ASCII)
_TEXT = re.compile(r"([SU])([1-9]\d{0,8})", re.ASCII)


def numpy_true_dtype(dtype: np.dtype) -> TrueDtype | None:
    """Return how `dtype`, in little-endian order, is stored; None for objects, records, long doubles and unknown kinds."""
    little = dtype.newbyteorder("<")
    native = _NUMPY_NATIVE.get(little)
    if native is not None:
        return native
    name = f"{dtype.kind}{dtype.itemsize // (4 if dtype.kind == 'U' else 1)}" if dtype.kind in "SU" else little.name
    return _numpy_view(name)


def _numpy_view(attribute: str) -> TrueDtype | None:
    if attribute == "complex128":
        return TrueDtype("F64", (2,), attribute)
    if _TIME.fullmatch(attribute):
        return TrueDtype("I64", (), attribute)
    text = _TEXT.fullmatch(attribute)
    if text:
        return TrueDtype("U8" if text[1] == "S" else "U32", (int(text[2]),), attribute)
    return None


def torch_dtype(stored: str, attribute: str | None) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return (true dtype, inner shape) of a tensor from its stored dtype and its reference's attribute.

    Raises:
        KeyError: They do not go together, or this torch release has no such dtype; the message is the key.
    """
    if attribute is None:
        return _find_torch(STORED[stored][1]), ()
    view = _TORCH_VIEWS.get(attribute)
    if view is None or view.stored != stored:
        raise KeyError(f"dtype={attribute} is not a view of {stored}")
    return _find_torch(attribute), view.inner


def _find_torch(name: str) -> torch.dtype:
    if name not in _TORCH_BY_NAME:
        raise KeyError(f"torch {torch.__version__} has no dtype {name}; a newer torch reads it")
    return _TORCH_BY_NAME[name]


def numpy_dtype(stored: str, attribute: str | None) -> tuple[np.dtype, tuple[int, ...]]:
    """Return (true dtype, inner shape) of an array, as `torch_dtype` does for tensors; always little-endian.

    Raises:
        KeyError: They do not go together, or numpy has no such dtype; the message is the key.
    """
    if attribute is None:
        name = STORED[stored][2]
        if name is None:
            raise KeyError(f"numpy has no dtype for {stored}")
        return np.dtype(name).newbyteorder("<"), ()
    view = _numpy_view(attribute)
    if view is None or view.stored != stored:
        raise KeyError(f"dtype={attribute} is not a view of {stored}")
    return np.dtype(attribute).newbyteorder("<"), view.inner
