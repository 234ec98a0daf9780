"""Members of the format, written and read from FORMAT.md alone: this module imports nothing of the package.

Left out: classes in allow= (2.7).
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
import uuid
from collections import OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
import xxhash

digest_of = xxhash.xxh3_64_intdigest
MAGIC = b"tensorcache"


class Refused(Exception):
    """The bytes, or the value, break a rule of the format."""


def check(is_right: Any, rule: str) -> None:
    if not is_right:
        raise Refused(rule)


# 3.2: stored dtype, its width, torch's name, numpy's name
_ROWS = """BOOL 1 bool bool|U8 1 uint8 uint8|I8 1 int8 int8|U16 2 uint16 uint16|I16 2 int16 int16|U32 4 uint32 uint32
|I32 4 int32 int32|U64 8 uint64 uint64|I64 8 int64 int64|F16 2 float16 float16|F32 4 float32 float32|F64 8 float64 float64
|C64 8 complex64 complex64|BF16 2 bfloat16 -|F8_E4M3 1 float8_e4m3fn -|F8_E5M2 1 float8_e5m2 -
|F8_E4M3FNUZ 1 float8_e4m3fnuz -|F8_E5M2FNUZ 1 float8_e5m2fnuz -"""
ROWS = [row.split() for row in _ROWS.split("|")]
WIDTH = {row[0]: int(row[1]) for row in ROWS}
NATIVE = {"tensor": {row[2]: row[0] for row in ROWS}, "ndarray": {row[3]: row[0] for row in ROWS if row[3] != "-"}}
VIEWS = {"complex32": ("F16", (2,)), "float8_e8m0fnu": ("U8", ()), "float4_e2m1fn_x2": ("U8", ())}
_UNIT = r"(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)"


def view_of(kind: str, attribute: str) -> tuple[str, tuple[int, ...]] | None:
    """Return the stored dtype and the last dimensions of a true dtype with an attribute."""
    if attribute == "complex128":
        return "F64", (2,)
    if kind == "tensor":
        return VIEWS.get(attribute)
    if re.fullmatch(rf"(datetime|timedelta)64\[{_UNIT}\]", attribute, re.ASCII):
        return "I64", ()
    text = re.fullmatch(r"([SU])([1-9][0-9]{0,8})", attribute)
    return ("U8" if text[1] == "S" else "U32", (int(text[2]),)) if text else None


def describe(value: Any) -> tuple[str, str, tuple[int, ...], str | None, bytes]:
    """Return kind, stored dtype, stored shape, attribute and bytes of a tensor or array."""
    if isinstance(value, torch.Tensor):
        kind, name = "tensor", str(value.dtype).removeprefix("torch.")
        raw = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        kind, dtype = "ndarray", value.dtype.newbyteorder("<")
        name = f"{dtype.kind}{dtype.itemsize // (4 if dtype.kind == 'U' else 1)}" if dtype.kind in "SU" else dtype.name
        raw = np.ascontiguousarray(value, dtype).tobytes()
    if name in NATIVE[kind]:
        return kind, NATIVE[kind][name], tuple(value.shape), None, raw
    found = view_of(kind, name)
    check(found, f"3.2: {name}")
    return kind, found[0], (*value.shape, *found[1]), name, raw  # type: ignore[index]


# --- 2.4, 2.8: writing ---------------------------------------------------------------------------------------------


def write_sized(opcodes: bytes, raw: bytes) -> bytes:
    which = 0 if len(raw) < 1 << 8 else 1 if len(raw) < 1 << 32 else 2
    return opcodes[which : which + 1] + struct.pack(("<B", "<I", "<Q")[which], len(raw)) + raw


def write_atom(value: Any) -> bytes:
    if value is None:
        return b"N"
    if value is True or value is False:
        return b"\x88" if value else b"\x89"
    if type(value) is float:
        return b"G" + struct.pack(">d", value)
    if type(value) is str:
        return write_sized(b"\x8cX\x8d", value.encode("utf-8", "surrogatepass"))
    if type(value) is bytes:
        return write_sized(b"CB\x8e", value)
    for opcode, form, begin, end in ((b"K", "<B", 0, 8), (b"M", "<H", 0, 16), (b"J", "<i", -1 << 31, 31)):
        if begin <= value < 1 << end:
            return opcode + struct.pack(form, value)
    nbytes = next(n for n in range(5, 1 << 40) if -1 << 8 * n - 1 <= value < 1 << 8 * n - 1)
    raw = value.to_bytes(nbytes, "little", signed=True)
    return (b"\x8a" + struct.pack("<B", nbytes) if nbytes < 256 else b"\x8b" + struct.pack("<I", nbytes)) + raw


ATOMS = {type(None), bool, int, float, str, bytes}
SHORT_TUPLES = [b")", b"\x85", b"\x86", b"\x87"]
FACTORIES = {cls.__name__: cls for cls in (list, dict, set, int, float, str, tuple, bool)}


def clock(value: Any) -> bytes:
    return bytes([value.hour, value.minute, value.second]) + value.microsecond.to_bytes(3, "big")


def with_fold(raw: bytes, at: int, value: Any) -> bytes:
    return raw[:at] + bytes([raw[at] | value.fold << 7]) + raw[at + 1 :]


def zone(value: Any) -> tuple[Any, ...]:
    check(value.tzinfo is None or type(value.tzinfo) is timezone, "2.5")
    return () if value.tzinfo is None else (value.tzinfo,)


def day(value: Any) -> bytes:
    return value.year.to_bytes(2, "big") + bytes([value.month, value.day])


def few_bits(*numbers: int) -> tuple[int, ...]:
    check(all(number.bit_length() <= 4096 for number in numbers), "2.5: bits")
    return numbers


def np_count(value: Any) -> tuple[int, str]:
    unit, count = np.datetime_data(value.dtype)
    check(unit != "generic", "3.2")
    return int(value.astype(np.int64)), unit if count == 1 else f"{count}{unit}"


CALLS: dict[type, tuple[str, str, Any]] = {
    complex: ("builtins", "complex", lambda v: (v.real, v.imag)),
    slice: ("builtins", "slice", lambda v: (v.start, v.stop, v.step)),
    range: ("builtins", "range", lambda v: few_bits(v.start, v.stop, v.step)),
    OrderedDict: ("collections", "OrderedDict", lambda v: ()),
    deque: ("collections", "deque", lambda v: () if v.maxlen is None else ((), v.maxlen)),
    date: ("datetime", "date", lambda v: (day(v),)),
    time: ("datetime", "time", lambda v: (with_fold(clock(v), 0, v), *zone(v))),
    datetime: ("datetime", "datetime", lambda v: (with_fold(day(v) + clock(v), 2, v), *zone(v))),
    timedelta: ("datetime", "timedelta", lambda v: (v.days, v.seconds, v.microseconds)),
    timezone: ("datetime", "timezone", lambda v: v.__getinitargs__()),
    Decimal: ("decimal", "Decimal", lambda v: (Context(capitals=1).to_sci_string(v),)),
    Fraction: ("fractions", "Fraction", lambda v: few_bits(v.numerator, v.denominator)),
    uuid.UUID: ("uuid", "UUID", lambda v: (str(v),)),
    PurePosixPath: ("pathlib", "PurePosixPath", lambda v: (str(v),)),
    PureWindowsPath: ("pathlib", "PureWindowsPath", lambda v: (str(v),)),
    torch.Size: ("torch", "Size", lambda v: (tuple(v),)),
    torch.device: ("torch", "device", lambda v: (v.type,) if v.index is None else (v.type, v.index)),
    np.datetime64: ("numpy", "datetime64", np_count),
    np.timedelta64: ("numpy", "timedelta64", np_count),
}
NUMBERS = {"bool_": bool, "str_": str, "bytes_": bytes}
NUMBERS |= {f"{sign}int{bits}": int for sign in ("", "u") for bits in (8, 16, 32, 64)}
NUMBERS |= {"float16": float, "float32": float, "float64": float, "complex64": complex, "complex128": complex}
CALLS |= {getattr(np, name): ("numpy", name, lambda v: (v.item(),)) for name in NUMBERS}


class Slot:
    """Where a MEMOIZE goes if the object is fetched."""


def escape(key: str) -> str:
    odd = "[%.?:\0-\x1f\x7f-\x9f\ud800-\udfff]"
    return re.sub(odd, lambda m: "".join(f"%{b:02X}" for b in m[0].encode("utf-8", "surrogatepass")), key) or "%"


def parts_of_key(value: Any, depth: int = 1) -> int:
    """Return the number of parts of a key (2.6), or of a part at this level in it."""
    check(depth <= 200, "2.6: depth")
    long = (
        len(str(value) if isinstance(value, PurePath) else value) // 1000
        if isinstance(value, (*TEXTS, PurePath))
        else 0
    )
    if type(value) in TEXTS:
        return long + (depth > 1)
    if isinstance(value, (tuple, frozenset)):
        return 1 + sum(parts_of_key(part, depth + 1) for part in value)
    check(not isinstance(value, int) or value.bit_length() <= 512, "2.6: bits")
    check(not isinstance(value, Decimal) or sys.getsizeof(value) <= 512, "2.6: digits")
    numbers = (value.start, value.stop, value.step) if isinstance(value, (range, slice)) else ()
    own = 1 if type(value) in (int, float, complex, bool, type(None)) or isinstance(value, torch.Tensor) else 10
    return own + long + sum(parts_of_key(number, depth + 1) for number in numbers)


TEXTS = (str, bytes)


class Writer:
    def __init__(self, sort_keys: dict[int, tuple[bytes, bytes]] | None = None) -> None:
        self.sort_keys = {} if sort_keys is None else sort_keys  # by the id of an element of a set
        self.tensors: dict[str, tuple[str, str, tuple[int, ...], str | None, bytes]] = {}
        self.out: list[Any] = []  # bytes, a Slot, or a Slot that is fetched, in a tuple
        self.known: dict[Any, Slot] = {}
        self.alive: list[Any] = []
        self.cost = self.num_deques = self.num_parts = 0

    def body(self) -> bytes:
        fetched = {part[0] for part in self.out if type(part) is tuple}
        number = {slot: n for n, slot in enumerate(part for part in self.out if part in fetched)}
        data = b"".join(
            part
            if type(part) is bytes
            else (b"h" + bytes([n]) if (n := number[part[0]]) < 256 else b"j" + struct.pack("<I", n))
            if type(part) is tuple
            else b"\x94" * (part in fetched)
            for part in self.out
        )
        check(self.cost <= 1_000_000 + 10 * (len(data) + 1) and self.num_deques <= 1000, "2.6")
        return data + b"."

    def count_keys(self, keys: list[Any]) -> None:
        self.num_parts += sum(map(parts_of_key, keys))
        check(self.num_parts <= 10_000, "2.6: parts of keys")

    def get(self, name: Any) -> bool:
        """Fetch what is known by a name, if it is."""
        if name in self.known:
            self.out.append((self.known[name],))
        return name in self.known

    def keep(self, name: Any) -> None:
        self.known[name] = Slot()
        self.out.append(self.known[name])

    def atom(self, value: Any) -> None:
        by_value = type(value) in (str, bytes) and len(value) > 1
        if not by_value or not self.get((type(value), value)):
            self.out.append(write_atom(value))
            if by_value:
                self.keep((type(value), value))

    def name(self, module: str, name: str) -> None:
        if not self.get(("global", module, name)):
            self.atom(module)
            self.atom(name)
            self.out.append(b"\x93")
            self.keep(("global", module, name))

    def call(self, module: str, name: str, arguments: tuple[Any, ...], path: str, depth: int) -> None:
        self.name(module, name)
        self.cost += len(arguments)
        for value in arguments:
            size = len(value) if type(value) in (str, bytes, tuple) else 0
            self.cost += value.bit_length() // 8 if type(value) is int else size
            self.put(value, path, [0], depth)
        self.out += [SHORT_TUPLES[len(arguments)], b"R"]

    def many(self, end: bytes, values: list[tuple[Any, str, Any]], depth: int) -> None:
        if values:
            self.out.append(b"(")
            for value, path, inside in values:
                self.put(value, path, inside, depth + 1)
            self.out.append(end)

    def put(self, value: Any, path: str = "", inside: list[int] | None = None, depth: int = 1) -> None:
        cls, name = type(value), ("is", id(value))
        if cls in ATOMS:
            return self.atom(value)
        if self.get(name):
            return None
        self.alive.append(value)
        is_dict = cls in (dict, OrderedDict, defaultdict)
        containers = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict, torch.Size)
        check(depth <= 200 or cls not in containers, "2.6: depth")

        def below(part: str) -> str:
            return path if inside else f"{path}.{part}" if path else part

        items = [(v, below(str(i)), inside) for i, v in enumerate(value)] if cls in (list, tuple, deque) else []
        if cls in (list, dict, set):
            self.out.append({list: b"]", dict: b"}", set: b"\x8f"}[cls])
            self.keep(name)
        elif cls is defaultdict:
            self.name("collections", "defaultdict")
            factory = value.default_factory
            check(factory is None or factory in FACTORIES.values(), "2.5: factory")
            if factory is not None:
                self.name("builtins", factory.__name__)
            self.out += [SHORT_TUPLES[factory is not None], b"R"]
            self.keep(name)
        elif cls in CALLS:
            self.num_deques += cls is deque
            self.call(*CALLS[cls][:2], CALLS[cls][2](value), path, depth)
            self.keep(name)
        if cls in (list, deque):
            self.many(b"e", items, depth)
        elif cls is tuple:
            self.out += [b"("] * (len(value) > 3)
            for item in items:
                self.put(*item, depth + 1)  # type: ignore[arg-type]
            if name in self.known:
                self.out.append(b"0" * len(value) if len(value) <= 3 else b"1")
                self.get(name)
            else:
                self.out.append(SHORT_TUPLES[len(value)] if len(value) <= 3 else b"t")
                if value:
                    self.keep(name)
        elif is_dict:
            self.count_keys(list(value))
            pairs: list[tuple[Any, str, Any]] = []
            for i, (key, item) in enumerate(value.items()):
                is_number = type(key) is int and abs(key) < 1 << 64
                where = below(escape(key) if type(key) is str else str(key) if is_number else f"@{i}")
                pairs += [(key, where, [0]), (item, where, inside)]
            self.many(b"u", pairs, depth)
        elif cls in (set, frozenset):
            count = [0]
            elements = [(v, path, count) for v in sorted(value, key=lambda v: self.sort_key(v, path, depth + 1))]
            self.count_keys(list(value))
            if cls is set:
                self.many(b"\x90", elements, depth)
            else:
                self.many(b"\x91", elements, depth)
                self.out += [] if value else [b"(", b"\x91"]
                self.keep(name)
        elif cls is bytearray:
            self.out.append(b"\x96" + struct.pack("<Q", len(value)) + value)
            self.keep(name)
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            self.put_tensor(value, path, inside, name)
        elif cls is torch.dtype:
            self.name("torch", str(value).removeprefix("torch."))
        elif value is ...:
            self.name("builtins", "Ellipsis")
        elif isinstance(value, np.dtype):
            self.call("numpy", "dtype", (value.str,), path, depth)
        else:
            check(cls in CALLS or cls is defaultdict, f"2.5: {cls}")
        return None

    def put_tensor(self, value: Any, path: str, inside: list[int] | None, name: Any) -> None:
        stored = kind, _, shape, attribute, _ = describe(value)
        check(len(shape) <= 64 and math.prod(filter(None, shape)) < 1 << 59, "3.1")
        if inside or not path:
            count = inside or [0]
            path = f"{path}.@{count[0]}" if path else f"@{count[0]}"
            count[0] += 1
        path = where = "%5F_metadata__" if path == "__metadata__" else path
        number = 2
        while where in self.tensors:
            where, number = f"{path}~{number}", number + 1
        self.tensors[where] = stored
        self.name("builtins", "format")
        self.atom(f"{kind}:{where}" + (f"?dtype={attribute}" if attribute else ""))
        self.out += [b"\x85", b"R"]
        self.keep(name)

    def sort_key(self, value: Any, path: str, depth: int) -> tuple[bytes, bytes]:
        """Return the bytes that an element has alone, and the dtypes and shapes of its tensors."""
        if type(value) in ATOMS:
            return write_atom(value), b""
        if id(value) not in self.sort_keys:
            alone = Writer(self.sort_keys)
            alone.put(value, path, [0], depth)
            content = alone.body() + b"".join(tensor[-1] for tensor in alone.tensors.values())
            forms = "".join(f"{stored}{list(shape)}" for _, stored, shape, *_ in alone.tensors.values())
            self.sort_keys[id(value)] = content, forms.encode()
        return self.sort_keys[id(value)]


def build_safetensors(tensors: list[tuple[str, str, tuple[int, ...], bytes]]) -> bytes:
    """Return a `.safetensors` file (3.1) from names, stored dtypes, shapes and bytes."""
    text, begin = f'{{"__metadata__":{{"tensorcache":"1 {0:016x}"}}', 0
    tensors = sorted(tensors, key=lambda tensor: -WIDTH[tensor[1]])
    for name, dtype, shape, raw in tensors:
        name, dims = name.replace("\\", "\\\\").replace('"', '\\"'), ",".join(map(str, shape))
        end = begin + len(raw)
        text += f',"{name}":{{"dtype":"{dtype}","shape":[{dims}],"data_offsets":[{begin},{end}]}}'
        begin = end
    header = (text + "}").encode()
    header += b" " * (-(len(header) + 8) % 64)
    member = struct.pack("<Q", len(header)) + header + b"".join(raw for *_, raw in tensors)
    digits = b"%016x" % digest_of(member[58:])
    return member[:42] + digits + member[58:]


def encode(sample: Any) -> tuple[bytes, bytes]:
    """Return the skeleton and the tensors of a sample."""
    writer = Writer()
    writer.put(sample)
    body = writer.body()
    tensors = build_safetensors([(name, t[1], t[2], t[4]) for name, t in writer.tensors.items()])
    content = MAGIC + struct.pack("<HQQQ", 1, len(tensors), int(tensors[42:58], 16), digest_of(body))
    return b"\x80\x05C\x25" + content + b"0" + body, tensors


# --- 3.1: reading ---------------------------------------------------------------------------------------------------


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check(len({name for name, _ in pairs}) == len(pairs), "3.1: a key occurs twice")
    return dict(pairs)


def constant(name: str) -> None:
    raise Refused(f"4.2: {name}")


def size(digits: str) -> int:
    check(not digits.startswith("-"), "3.1: sign")
    return int(digits)


def is_size(value: Any) -> bool:
    return type(value) is int and value < 1 << 63


def parse_safetensors(member: bytes, nbytes: int | None = None) -> tuple[dict[str, Any], int, int | None]:
    """Return (stored dtype, shape, begin, end) of each tensor by name, in their order, where they begin, and the digest."""
    nbytes = len(member) if nbytes is None else nbytes
    check(nbytes >= 8, "3.1: length")
    begin = 8 + int.from_bytes(member[:8], "little")
    check(begin <= nbytes and begin <= 100_000_008 and member[8:9] == b"{", "3.1: header")
    text = member[8:begin].decode()
    head = json.loads(text, object_pairs_hook=unique, parse_int=size)
    metadata = head.pop("__metadata__", {})
    check(type(metadata) is dict and all(type(value) is str for value in metadata.values()), "3.1: metadata")
    "".join(metadata).encode()
    digits = re.match('{"__metadata__":{"tensorcache":"1 ([0-9a-f]{16})"', text)
    check(digits or "tensorcache" not in metadata, "3.1: beginning")
    entries = []
    for name, entry in head.items():
        name.encode()
        check(type(entry) is dict and set(entry) == {"dtype", "shape", "data_offsets"}, "3.1: entry")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        check(type(dtype) is str and dtype in WIDTH and type(shape) is type(offsets) is list, "3.1: entry")
        check(all(map(is_size, shape + offsets)) and len(offsets) == 2 and len(shape) <= 64, "3.1: sizes")
        check(math.prod(filter(None, shape)) < 1 << 59, "3.1: shape")
        check(offsets[1] - offsets[0] == math.prod(shape) * WIDTH[dtype], "3.1: span")
        entries.append((name, (dtype, tuple(shape), begin + offsets[0], begin + offsets[1])))
    entries.sort(key=lambda item: item[1][2:])
    at = begin
    for _, (_, _, first, last) in entries:
        check(first == at, "3.1: hole or overlap")
        at = last
    check(at == nbytes, "3.1: end")
    return dict(entries), begin, int(digits[1], 16) if digits else None


def resolve(text: str, tensors: dict[str, Any]) -> tuple[str, Any, tuple[int, ...], int, int]:
    """Return kind, true dtype, shape and bytes of a reference (2.2, 3.2)."""
    kind, _, rest = text.partition(":")
    name, mark, attributes = rest.partition("?")
    check(kind in ("tensor", "ndarray") and name in tensors, "2.2")
    stored, shape, begin, end = tensors[name]
    true = next((name for name, dtype in NATIVE[kind].items() if dtype == stored), "")
    if mark:
        check(re.fullmatch("dtype=[^&]*", attributes), "2.2: attribute")
        true = attributes[6:]
        found, inner = view_of(kind, true) or ("", ())
        cut = len(shape) - len(inner)
        check(found == stored and cut >= 0 and shape[cut:] == inner, "3.2")
        shape = shape[:cut]
    if kind == "tensor":
        check(isinstance(getattr(torch, true, None), torch.dtype), "3.2")
        return kind, getattr(torch, true), shape, begin, end
    check(true, "3.2")
    return kind, np.dtype(true).newbyteorder("<"), shape, begin, end


def load(text: str, tensors: dict[str, Any], member: bytes) -> Any:
    """Return the tensor or array of a reference."""
    kind, dtype, shape, begin, end = resolve(text, tensors)
    raw = np.frombuffer(bytearray(member[begin:end]), np.uint8) if end > begin else np.empty(0, np.uint8)
    check("bool" not in str(dtype) or not len(raw) or raw.max() < 2, "3.2: bools")
    if kind == "tensor":
        flat = torch.from_numpy(raw) if len(raw) else torch.empty(0, dtype=torch.uint8)
        return flat.view(dtype).view(shape)
    check(dtype.kind != "U" or not len(raw) or raw.view("<u4").max() < 0x110000, "3.2: U")
    return (raw.view(dtype) if len(raw) else np.empty(0, dtype)).reshape(shape)


# --- 2.4, 2.5: reading ----------------------------------------------------------------------------------------------


class Callable_:
    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module.replace("pathlib._local", "pathlib"), name


LISTED = {row[:2] for row in CALLS.values()}
LISTED |= {("builtins", name) for name in ("format", "bytearray", *FACTORIES)}
LISTED |= {("collections", "defaultdict"), ("numpy", "dtype")}
LISTED |= {("pathlib._local", name) for name in ("PurePosixPath", "PureWindowsPath")}
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
INT, TEXT, BYTES, NONE = {int}, {str}, {bytes}, type(None)
# types of the arguments; a list has further ones that may be left out
ARGUMENTS: dict[str, list[Any]] = {
    "complex": [{float}, {float}],
    "slice": [{int, NONE}] * 3,
    "range": [INT] * 3,
    "OrderedDict": [],
    "date": [BYTES],
    "time": [BYTES, [{timezone}]],
    "datetime": [BYTES, [{timezone}]],
    "timedelta": [INT] * 3,
    "timezone": [{timedelta}, [TEXT]],
    "Decimal": [TEXT],
    "Fraction": [INT] * 2,
    "UUID": [TEXT],
    "bytearray": [[BYTES]],
    "dtype": [TEXT],
    "Size": [{tuple}],
    "device": [TEXT, [INT]],
    "datetime64": [INT, TEXT],
    "timedelta64": [INT, TEXT],
    **{name: [{cls}] for name, cls in NUMBERS.items()},
}
_DTYPE = rf"[<>|=]?(\?|b|B|b1|[iu][1248]|f[248]|c8|c16|[SU][0-9]{{1,9}}|[Mm]8\[{_UNIT}\])"


def read_clock(raw: bytes) -> tuple[int, int, int, int]:
    return raw[0], raw[1], raw[2], int.from_bytes(raw[3:], "big")


def call(function: Callable_, args: tuple[Any, ...]) -> Any:
    """Return what a call gives (2.5)."""
    name = function.name
    if name in ("PurePosixPath", "PureWindowsPath"):
        check(len(args) < 256 and all(type(arg) is str for arg in args), "2.5: path")
        return (PurePosixPath if name == "PurePosixPath" else PureWindowsPath)(*args)
    if name == "deque":
        check(not args or (len(args) == 2 and args[0] == () and type(args[0]) is tuple and type(args[1]) is int), "2.5")
        return deque(*args)
    if name == "defaultdict":
        check(not args or (len(args) == 1 and type(args[0]) is Callable_ and args[0].name in FACTORIES), "2.5")
        check(not args or args[0].module == "builtins", "2.5")
        return defaultdict(*(FACTORIES[arg.name] for arg in args))
    check(name in ARGUMENTS, f"2.5: {name} is called")
    allowed = ARGUMENTS[name]
    needed = [types for types in allowed if type(types) is set]
    check(len(needed) <= len(args) <= len(allowed), f"2.5: arguments of {name}")
    check(all(type(a) in (t if type(t) is set else t[0]) for a, t in zip(args, allowed, strict=False)), "2.5: types")
    if name == "range":
        return range(*few_bits(*args))
    if name == "Fraction":
        return Fraction(*few_bits(*args))
    if name == "timedelta":
        check(0 <= args[1] < 86_400 and 0 <= args[2] < 10**6, "2.5: timedelta")
    if name in ("date", "time", "datetime"):
        raw, *zones = args
        check(len(raw) == {"date": 4, "time": 6, "datetime": 10}[name], "2.5: bytes")
        at = {"date": 4, "time": 0, "datetime": 2}[name]
        fold, raw = raw[at : at + 1] > b"\x7f", bytes(b & 127 if i == at else b for i, b in enumerate(raw))
        days = (int.from_bytes(raw[:2], "big"), *raw[2:4]) if name != "time" else ()
        fields = (*days, *read_clock(raw[-6:]), *zones) if name != "date" else days
        made = {"date": date, "time": time, "datetime": datetime}[name](*fields)
        return made.replace(fold=1) if fold else made
    if name == "Size":
        check(all(type(value) is int and -1 << 63 <= value < 1 << 63 for value in args[0]), "2.5: Size")
    if name == "device":
        check(re.fullmatch("[a-z]{2,20}", args[0]) and all(0 <= index < 128 for index in args[1:]), "2.5: device")
    if name == "dtype":
        check(re.fullmatch(_DTYPE, args[0], re.ASCII), "2.5: dtype")
    if name in ("datetime64", "timedelta64"):
        check(re.fullmatch(_UNIT, args[1], re.ASCII), "2.5: unit")
    cls = next((cls for cls, row in CALLS.items() if row[:2] == (function.module, name)), None)
    if cls is None:
        return bytearray(*args) if name == "bytearray" else np.dtype(args[0])
    with np.errstate(over="raise", invalid="ignore"):
        made = cls(*args)
    check(NUMBERS.get(name) is not int or int(made) == args[0], "2.5: out of range")
    return made


LENGTHS = {0x8C: 1, 0x58: 4, 0x8D: 8, 0x43: 1, 0x42: 4, 0x8E: 8, 0x96: 8, 0x8A: 1, 0x8B: 4}
FIXED = {0x4B: "<B", 0x4D: "<H", 0x4A: "<i", 0x47: ">d"}


def children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    return list(value) if isinstance(value, (list, tuple, set, frozenset, deque)) else []


def check_depth(value: Any, depth: int, seen: dict[int, Any]) -> None:
    todo = [(value, depth)]
    while todo:
        value, depth = todo.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            check(depth <= 200 or not isinstance(value, (list, tuple, dict, set, frozenset, deque)), "2.6: depth")
            todo += [(part, depth + 1) for part in reversed(children(value))]


def run(body: bytes, reference: Any) -> Any:
    """Return the object of a body (2.4)."""
    at, stack, marks, memo = 0, [], [], []  # type: ignore[var-annotated]
    pending = cost = num_deques = num_parts = 0  # `pending`: callables that were fetched and not yet called

    def push(value: Any) -> None:
        nonlocal pending
        is_arguments = type(value) is tuple and len(value) == 1 and type(value[0]) is Callable_
        pending += type(value) is Callable_ or is_arguments
        stack.append(value)

    def take() -> Any:
        check(stack, "2.4: stack")
        return stack.pop()

    def bytes_of(nbytes: int) -> bytes:
        nonlocal at
        check(nbytes <= len(body) - at, "2.4: length")
        at += nbytes
        return body[at - nbytes : at]

    def count_keys(keys: list[Any]) -> None:
        nonlocal num_parts
        num_parts += sum(map(parts_of_key, keys))
        check(num_parts <= 10_000, "2.6: parts of keys")

    def since_mark() -> list[Any]:
        nonlocal stack
        check(marks, "2.4: MARK")
        items, stack = stack, marks.pop()
        return items

    while True:
        op = bytes_of(1)[0]
        if op in LENGTHS:
            raw = bytes_of(int.from_bytes(bytes_of(LENGTHS[op]), "little"))
            if op in (0x8C, 0x58, 0x8D):
                stack.append(raw.decode("utf-8", "surrogatepass"))
            elif op in (0x8A, 0x8B):
                stack.append(int.from_bytes(raw, "little", signed=True))
            else:
                stack.append(bytearray(raw) if op == 0x96 else raw)
        elif op in FIXED:
            stack.append(struct.unpack(FIXED[op], bytes_of(struct.calcsize(FIXED[op])))[0])
        elif op in b"N\x88\x89])}\x8f":
            empty = {0x4E: None, 0x88: True, 0x89: False, 0x5D: [], 0x29: (), 0x7D: {}, 0x8F: set()}
            stack.append(empty[op])
        elif op in b"\x85\x86\x87t":
            items = since_mark() if op == 0x74 else [take() for _ in range(op - 0x84)][::-1]
            stack.append(tuple(items))
        elif op in b"ea\x90":
            items = [take()] if op == 0x61 else since_mark()
            check(stack and type(stack[-1]) in ((set,) if op == 0x90 else (list, deque)), "2.4: target")
            if op == 0x90:
                count_keys(items)
            (stack[-1].update if op == 0x90 else stack[-1].extend)(items)
        elif op in b"us":
            items = [take(), take()][::-1] if op == 0x73 else since_mark()
            check(stack and type(stack[-1]) in (dict, OrderedDict, defaultdict) and not len(items) % 2, "2.4: target")
            count_keys(items[::2])
            for key, value in zip(items[::2], items[1::2], strict=True):
                stack[-1][key] = value
        elif op == 0x91:
            elements = since_mark()
            count_keys(elements)
            stack.append(frozenset(elements))
        elif op == 0x28:
            marks.append(stack)
            stack = []
        elif op in b"01":
            take() if op == 0x30 else since_mark()
        elif op == 0x94:
            check(stack, "2.4: memo")
            memo.append(stack[-1])
        elif op in b"hj":
            number = int.from_bytes(bytes_of(1 if op == 0x68 else 4), "little")
            check(number < len(memo), "2.4: memo")
            push(memo[number])
        elif op == 0x93:
            name, module = take(), take()
            check(type(name) is type(module) is str, "2.4: global")
            if (module, name) == ("builtins", "Ellipsis"):
                stack.append(...)
            elif module == "torch" and name in DTYPES:
                stack.append(DTYPES[name])
            else:
                check((module, name) in LISTED, f"2.4: {module}.{name}")
                push(Callable_(module, name))
        elif op == 0x52:
            args, function = take(), take()
            check(type(function) is Callable_ and type(args) is tuple, "2.4: REDUCE")
            pending -= 1 + (len(args) == 1 and type(args[0]) is Callable_)
            if (function.module, function.name) == ("builtins", "format"):
                check(len(args) == 1 and type(args[0]) is str, "2.2")
                stack.append(reference(args[0]))
            else:
                sizes = [len(a) if type(a) in (str, bytes, tuple) else 0 for a in args]
                cost += len(args) + sum(sizes) + sum(a.bit_length() // 8 for a in args if type(a) is int)
                num_deques += function.name == "deque"
                check(cost <= 1_000_000 + 10 * len(body) and num_deques <= 1000, "2.6")
                stack.append(call(function, args))
        elif op == 0x95:
            check(int.from_bytes(bytes_of(8), "little") <= len(body) - at, "2.4: FRAME")
        else:
            check(op == 0x2E, "2.4: opcode")
            check(at == len(body) and len(stack) == 1 and not marks and not pending, "2.4: end")
            check_depth(stack[0], 1, {})
            return stack[0]


def parse_preamble(skeleton: bytes, nbytes: int, digest: int | None) -> tuple[int, tuple[int, ...] | None]:
    """Return where the body begins, and length, tensors' digest and own digest in the preamble (2.1, 3.3)."""
    fields = struct.unpack_from("<HQQQ", skeleton, 15) if len(skeleton) > 42 else None
    if skeleton[:15] == b"\x80\x05C\x25" + MAGIC and fields:
        check(fields[0] == 1 and skeleton[41:42] == b"0", "2.1")
        check(digest is None or fields[1:3] == (nbytes, digest), "3.3")
        return 42, fields[1:]
    check(skeleton[4:15] != MAGIC and skeleton[:2] in (b"\x80\x04", b"\x80\x05"), "2.1")
    lost = struct.pack("<HQQ", 1, nbytes, digest or 0)
    check(digest is None or skeleton[15:33] != lost, "2.1: damaged")
    return 2, None


def decode(skeleton: bytes, member: bytes, *, verify: bool = False) -> Any:
    """Return the sample of two members, loaded; raise Refused."""
    try:
        tensors, _, digest = parse_safetensors(member)
        begin, fields = parse_preamble(skeleton, len(member), digest)
        if verify:
            check(digest is not None and fields is not None, "3.3: verify")
            check(digest_of(member[58:]) == digest and digest_of(skeleton[42:]) == fields[2], "3.3: verify")  # type: ignore[index]
        met: dict[str, Any] = {}

        def reference(text: str) -> Any:
            if text not in met:
                met[text] = load(text, tensors, member)
            return met[text]

        sample = run(skeleton[begin:], reference)
        names = [text.partition(":")[2].partition("?")[0] for text in met]
        check(sorted(names) == sorted(tensors), "2.2: each tensor once")
        return sample
    except Refused:
        raise
    except Exception as exc:  # Python's own constructors refuse, JSON, hashes
        raise Refused(repr(exc)) from exc
