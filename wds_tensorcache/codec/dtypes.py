"""Stored forms of torch's and numpy's dtypes (the table in FORMAT.md 3.2).

The *true* dtype is the dtype of the tensor or array in the sample. The *stored* dtype is the dtype of its entry in the
`.safetensors` file. Every supported release of stock safetensors can load the stored dtypes, except `F8_E4M3FNUZ` and
`F8_E5M2FNUZ`, which need release 0.8. If the true dtype is not among the stored dtypes, the tensor's bytes are stored unchanged
under a stored dtype. The skeleton's reference to the tensor then names the true dtype in its attribute `dtype`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import torch

# safetensors name -> (bytes per element, torch name, numpy name); older torch releases lack some of these dtypes
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
    """The stored form of one true dtype."""

    stored: str  # stored dtype, a key of `STORED`
    inner: tuple[int, ...] = ()  # shape of one true element in stored elements; appended to the shape in the file
    attribute: str | None = None  # the reference's attribute `dtype`; None if the stored dtype is the true dtype
    itemsize: int = field(init=False)  # bytes per element of the *stored* dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "itemsize", STORED[self.stored][0])


# Torch dtypes that safetensors lacks, or that it can save but not load.
_TORCH_VIEWS = {
    "complex32": TrueDtype("F16", (2,), "complex32"),
    "complex128": TrueDtype("F64", (2,), "complex128"),
    "float8_e8m0fnu": TrueDtype("U8", (), "float8_e8m0fnu"),
    "float4_e2m1fn_x2": TrueDtype("U8", (), "float4_e2m1fn_x2"),
}
_TORCH_BY_NAME = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# Absent, because the format cannot store them: quantized dtypes, bits, and integers narrower than a byte.
TORCH_TRUE = {
    _TORCH_BY_NAME[name]: true
    for name, true in (*((row[1], TrueDtype(stored)) for stored, row in STORED.items()), *_TORCH_VIEWS.items())
    if name in _TORCH_BY_NAME
}
_NUMPY_NATIVE = {np.dtype(row[2]): TrueDtype(stored) for stored, row in STORED.items() if row[2] is not None}

# FORMAT.md requires a unit: numpy's datetime64 and timedelta64 without one do not match.
TIME_UNIT = r"(?:[1-9]\d{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)"
_TIME = re.compile(rf"(?:datetime|timedelta)64\[{TIME_UNIT}\]", re.ASCII)
_TEXT = re.compile(r"([SU])([1-9]\d{0,8})", re.ASCII)


def stored_form(dtype: torch.dtype | np.dtype) -> TrueDtype:
    """Return the stored form of a dtype of torch, or of numpy in either byte order. Raise ValueError if it has none."""
    if isinstance(dtype, torch.dtype):
        true = TORCH_TRUE.get(dtype)
    else:
        little = dtype.newbyteorder("<")
        true = _NUMPY_NATIVE.get(little)
        if true is None:
            length = dtype.itemsize // (4 if dtype.kind == "U" else 1)
            true = _numpy_view(f"{dtype.kind}{length}" if dtype.kind in "SU" else little.name)
    if true is None:
        raise ValueError(f"the format cannot store {dtype}")
    return true


def _numpy_view(attribute: str) -> TrueDtype | None:
    if attribute == "complex128":
        return TrueDtype("F64", (2,), attribute)
    if _TIME.fullmatch(attribute):
        return TrueDtype("I64", (), attribute)
    text = _TEXT.fullmatch(attribute)
    if text:
        return TrueDtype("U8" if text[1] == "S" else "U32", (int(text[2]),), attribute)
    return None


def true_dtype(kind: str, stored: str, attribute: str | None) -> tuple[torch.dtype | np.dtype, tuple[int, ...]]:
    """Return the true dtype of a stored tensor, and its `TrueDtype.inner`.

    `kind` is "tensor" for a torch dtype, "ndarray" for a little-endian numpy dtype. `attribute` is the attribute `dtype` of the
    tensor's reference.

    Raises:
        ValueError, TypeError: `attribute` is not stored as `stored`, or the installed torch or numpy lacks the dtype.
    """
    is_torch = kind == "tensor"
    _, torch_name, numpy_name = STORED[stored]
    name, inner = torch_name if is_torch else numpy_name, tuple[int, ...]()
    if attribute is not None:
        view = _TORCH_VIEWS.get(attribute) if is_torch else _numpy_view(attribute)
        if view is None or view.stored != stored:
            raise ValueError(f"the reference has dtype={attribute}, which is not stored as {stored}")
        name, inner = attribute, view.inner
    if name is None:
        raise ValueError(f"numpy has no dtype for {stored}, so this cannot be an array")
    if not is_torch:
        return np.dtype(name).newbyteorder("<"), inner
    if name not in _TORCH_BY_NAME:
        raise ValueError(f"torch {torch.__version__} has no dtype {name}; a newer release may have it")
    return _TORCH_BY_NAME[name], inner


def dtype_name(dtype: object) -> str:
    """Return the name of a torch or numpy dtype, for example `bfloat16`."""
    return str(dtype).removeprefix("torch.")
