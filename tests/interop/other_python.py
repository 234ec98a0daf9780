"""Runs in another interpreter: `stock FOLDER` with nothing but Python, `package FOLDER` with this package's dependencies.

FOLDER holds `NAME.skel.pyd` and `NAME.safetensors`. Prints JSON by name: what each skeleton or sample is, and for
`package`, the members that this interpreter makes of the same samples.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
import uuid
from collections import OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

Members = dict[str, tuple[bytes, bytes]]


def plain_sample() -> dict[str, Any]:
    """Return a sample with all types of the format that need no package."""
    shared = ["shared", (1, "é")]
    loop: list[Any] = [shared, {"again": shared}]
    loop.append(loop)
    zone = timezone(timedelta(hours=5, minutes=30), "here")
    return {
        "constants": [None, True, False, ...],
        "ints": [0, 255, 256, 65536, -1, 1 << 31, -(1 << 63), 1 << 600, -(1 << 3000)],
        "floats": [0.0, -0.0, 1.5, float("inf"), float("nan"), 5e-324, 1e22, 1.5 - 2j],
        "text": ["", "é€𝄞", "\ud800", "\U0001fae9", "x" * 300, "tensor:x", b"", bytes(300), bytearray(b"abc")],
        "sets": [set(), {"a", "b", 1, None}, frozenset({(1, "a"), "x", frozenset({2})})],
        "containers": [(), (1, 2, 3, 4), OrderedDict(z=1, a=2), defaultdict(list, x=[1]), deque([1, 2], 5)],
        "times": [date(2024, 2, 29), time(1, 2, 3, 4, zone), datetime(1, 1, 1, tzinfo=timezone.utc), timedelta(-1, 5)],
        "fold": datetime(2024, 1, 2, fold=1),
        "numbers": [Decimal("1.10"), Decimal("sNaN12"), Fraction(-3, 7), slice(1, None, 2), range(1, 10, 3)],
        "names": [uuid.UUID(int=5), PurePosixPath("a/b"), PurePosixPath("."), PureWindowsPath("c:/x")],
        "keys": {1: "int", None: "none", (1, "a"): "tuple", "": "empty", "a.b": "dot"},
        "loop": loop,
    }


def tensor_samples() -> dict[str, Any]:
    """Return samples for interpreters with torch and numpy, which do not depend on their releases."""
    import numpy as np
    import torch

    scalars = [np.float32(1.5), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.str_("x"), np.bytes_(b"y")]
    times = [np.datetime64(5, "25s"), np.timedelta64(-1, "ns"), np.longlong(7), np.complex64(1 - 2j)]
    names = "bool uint8 int8 float8_e4m3fn float8_e5m2 uint16 int16 float16 bfloat16 uint32 int32 float32 uint64 int64"
    tensors = {name: torch.arange(2).to(getattr(torch, name)) for name in names.split()}
    tensors["complex128"] = torch.complex(*torch.arange(8, dtype=torch.float64).view(2, 4)[:, ::2])
    arrays = {kind: np.arange(3).astype(kind) for kind in "? <f2 >i4 <f8 >u2 M8[us] <c16 U3 S2".split()}
    odd = [torch.empty(0, 3), torch.tensor(1.5), torch.ones(1, 3).expand(2, 3), torch.arange(6).view(2, 3).T]
    values = [torch.Size([2, 0]), torch.bfloat16, torch.device("cuda", 1), np.dtype(">f4"), np.dtype("M8[ns]")]
    shared = torch.arange(4)
    mixed = {"tensors": tensors, "arrays": arrays, "odd": odd, "values": values, "scalars": scalars + times}
    keys = {"a": {"b.c": shared}, 0: shared, "0": torch.zeros(1), (1, 2): [torch.ones(1)], "set": {torch.ones(2)}}
    return {"plain": plain_sample(), "mixed": mixed, "keys": keys, "tensor": shared}


def describe(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return JSON that is equal for equal values on every Python version, and shows which objects are shared."""
    seen = {} if seen is None else seen
    kind = type(value).__name__
    if isinstance(value, (list, dict, set, deque, bytearray)):
        if id(value) in seen:
            return f"object {seen[id(value)]}"
        seen[id(value)] = len(seen)
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return [kind, ascii(factory), [[describe(key, seen), describe(item, seen)] for key, item in value.items()]]
    if isinstance(value, (list, tuple, deque)):
        return [kind, getattr(value, "maxlen", None), [describe(item, seen) for item in value]]
    if isinstance(value, (set, frozenset)):  # whose order depends on the seed of this process's hashes
        return [kind, sorted(json.dumps(describe(item)) for item in value)]
    if kind == "Tensor":
        return [kind, str(value.dtype), list(value.shape), hashlib.sha256(_tensor_bytes(value)).hexdigest()]
    if kind == "ndarray":
        little = value.astype(value.dtype.newbyteorder("<"))  # as it is stored
        return [kind, str(little.dtype), list(value.shape), hashlib.sha256(little.tobytes()).hexdigest()]
    if hasattr(value, "dtype"):  # a scalar, whose repr depends on numpy's release and which has two names for int64
        return ["scalar", value.dtype.str, str(value)]
    return ["dtype" if "dtype" in kind.lower() else kind, ascii(value)]  # numpy 2 has a class for every dtype


def _tensor_bytes(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def read_folder(folder: Path) -> Members:
    skeletons = sorted(folder.glob("*.skel.pyd"))
    return {
        path.name.partition(".")[0]: (path.read_bytes(), Path(str(path)[:-8] + "safetensors").read_bytes())
        for path in skeletons
    }


def run_stock(members: Members) -> dict[str, Any]:
    c, python = pickle.loads, pickle._loads  # type: ignore[attr-defined]
    return {name: [describe(load(skeleton)) for load in (c, python)] for name, (skeleton, _) in members.items()}


def run_package(members: Members) -> dict[str, Any]:
    import wds_tensorcache as tc

    made = {name: [member.hex() for member in tc.encode_sample(value)] for name, value in tensor_samples().items()}
    read = {name: describe(tc.decode_sample(*pair, lazy=False, verify=True)) for name, pair in members.items()}
    return {"made": made, "read": read}


if __name__ == "__main__":
    run = {"stock": run_stock, "package": run_package}[sys.argv[1]]
    print(json.dumps(run(read_folder(Path(sys.argv[2])))))
