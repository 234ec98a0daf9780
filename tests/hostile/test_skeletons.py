"""Skeletons that attack their reader: one test per row of FORMAT.md's first table of attacks."""

from __future__ import annotations

import collections
import dataclasses
import pickle
import struct
import time
import tracemalloc
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.strategies import samples

NO_TENSORS = tc.encode_sample(0)[1]
ONE_TENSOR = tc.encode_sample({"x": torch.ones(2)})[1]
PROTO = b"\x80\x04"


def text(value: str) -> bytes:
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def call(module: str, name: str, arguments: bytes) -> bytes:
    """Return opcodes that call `module.name` with the tuple that `arguments` pushes."""
    return text(module) + text(name) + b"\x93" + arguments + b"R"


def decode(body: bytes, tensors: bytes = NO_TENSORS, **options: Any) -> Any:
    return tc.decode_sample(PROTO + body + b".", tensors, **options)


def refused(body: bytes, match: str | None = None, kind: type[Exception] = tc.FormatError, **options: Any) -> None:
    started = time.perf_counter()
    with pytest.raises(kind, match=match):
        decode(body, **options)
    assert time.perf_counter() - started < 5  # the attack would take minutes, or never end


# public lists of what hostile pickles call; each is fetched and called, with and without arguments
GADGETS = """
os.system os.popen os.execv posix.system nt.system subprocess.Popen subprocess.run subprocess.check_output
builtins.eval builtins.exec builtins.compile builtins.open builtins.getattr builtins.setattr
builtins.__import__ builtins.type builtins.object builtins.print builtins.map builtins.apply builtins.input
builtins.breakpoint builtins.vars __builtin__.eval importlib.import_module runpy._run_code sys.exit
shutil.rmtree socket.create_connection operator.attrgetter operator.itemgetter operator.methodcaller
functools.partial functools.reduce itertools.starmap torch.load torch.hub.load torch.serialization.load
torch._utils._rebuild_tensor_v2 torch.Tensor torch.storage._load_from_bytes torch.jit.load
torch.utils.collect_env.run numpy.load numpy.testing._private.utils.runstring
numpy.core.multiarray._reconstruct numpy.memmap numpy.fromfile numpy._core.multiarray.scalar pickle.loads
_pickle.loads pickle.Unpickler codecs.decode copyreg._reconstructor webbrowser.open pty.spawn
code.InteractiveInterpreter timeit.timeit cProfile.run pdb.Pdb asyncio.subprocess.create_subprocess_shell
pathlib.Path pathlib.PosixPath builtins.range.__reduce__ collections.OrderedDict.fromkeys zoneinfo.ZoneInfo
wds_tensorcache.codec.lazy.LazyTensor wds_tensorcache.decode_sample builtins.str builtins.list builtins.dict
builtins.bytes builtins.format.__self__ builtins.memoryview weakref.ref types.FunctionType ctypes.CDLL
logging.config.listen uuid.SafeUUID
""".split()


@pytest.mark.parametrize("gadget", GADGETS)
@pytest.mark.parametrize("arguments", [b")", text("echo executed") + b"\x85"], ids=["empty", "text"])
def test_no_gadget_is_called(gadget: str, arguments: bytes) -> None:
    module, _, name = gadget.rpartition(".")
    refused(call(module, name, arguments))
    refused(text(module) + text(name) + b"\x93")  # nor is it a value


@pytest.mark.parametrize(
    "opcode",
    [
        b"cos\nsystem\n",
        b"(S'x'\nios\nsystem\n",
        b"(cos\nsystem\no",
        b"P1\n",
        b"NQ",
        b"\x82\x01",
        b"\x83\x01\x00",
        b"\x84\x01\x00\x00\x00",
    ]
    + [
        b"]}b",
        b"N)\x81",
        b"N)}\x92",
        b"N2",
        b"]q\x00",
        b"]r\x00\x00\x00\x00",
        b"]p0\n",
        b"I1\n",
        b"F1\n",
        b"L1L\n",
        b"V1\n",
        b"\x97",
        b"\x98",
    ],
    ids=repr,
)
def test_opcodes_outside_the_subset(opcode: bytes) -> None:
    refused(opcode, "opcode [A-Z_0-9]+ at byte", tc.UnsafeSkeletonError)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_old_protocols(protocol: int) -> None:
    with pytest.raises(tc.FormatError, match="protocol 4 or 5"):
        tc.decode_sample(pickle.dumps({"a": 1}, protocol), NO_TENSORS)


LEAKS = {
    "alone": text("builtins") + text("format") + b"\x93",
    "in a list": b"]" + text("builtins") + text("format") + b"\x93a",
    "in a tuple": text("decimal") + text("Decimal") + b"\x93\x85",
    "memoised": b"(" + text("builtins") + text("format") + b"\x93\x94h\x00e",
    "behind a call": text("builtins")
    + text("complex")
    + b"\x93\x94"
    + b"G"
    + bytes(8)
    + b"G"
    + bytes(8)
    + b"\x86R0h\x00",
    "as a factory twice": (
        text("builtins")
        + text("list")
        + b"\x93\x85\x940"  # the factory's argument tuple, kept
        + text("collections")
        + text("defaultdict")
        + b"\x93h\x00R"
        + text("collections")
        + text("defaultdict")
        + b"\x93h\x00R\x86"
        + text("decimal")
        + text("Decimal")
        + b"\x93\x86"
    ),
    "as a key": b"}" + text("builtins") + text("format") + b"\x93Ns",
    "as a factory, then used": b"]" + text("builtins") + text("list") + b"\x93\x94a",
    "argument": call("builtins", "format", text("builtins") + text("format") + b"\x93\x85"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_callables_are_not_values(name: str) -> None:
    refused(LEAKS[name])


def test_reference_arguments() -> None:
    for arguments in (b")", b"N\x85", text("tensor:x") + text("d") + b"\x86", b"K\x01\x85", b"C\x01x\x85"):
        refused(call("builtins", "format", arguments), "a reference takes one string", tensors=ONE_TENSOR)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("tensor:y", "'y', which the safetensors member does not have"),
        ("tensor:", "does not have"),
        ("file:x", "neither a tensor nor an ndarray"),
        ("x", "neither"),
        ("tensor:x?strides=1", "unknown attribute 'strides=1'"),
        ("tensor:x?dtype=complex128", "not a view of F32"),
        ("tensor:x?dtype=float32", "not a view of F32"),
        ("ndarray:x?dtype=O", "not a view of F32"),
        ("ndarray:x?dtype=datetime64[ns]", "not a view of F32"),
        ("tensor:x?dtype=complex32&dtype=complex32", "unknown attribute"),
    ],
)
def test_references(reference: str, message: str) -> None:
    refused(call("builtins", "format", text(reference) + b"\x85"), message.replace("[", r"\["), tensors=ONE_TENSOR)


def test_tensors_that_no_skeleton_names() -> None:
    refused(b"N", r"tensors that the skeleton does not name: \['x'\]", tensors=ONE_TENSOR)


def test_one_tensor_referred_to_in_two_ways() -> None:
    both = (
        b"("
        + call("builtins", "format", text("tensor:x") + b"\x85")
        + call("builtins", "format", text("ndarray:x") + b"\x85")
        + b"t"
    )
    refused(both, "in two ways", tensors=ONE_TENSOR)


BAD_ARGUMENTS = {
    "a Fraction of a text": ("fractions", "Fraction", text("1e2000000") + b"\x85"),
    "a Fraction that takes minutes": (
        "fractions",
        "Fraction",
        b"\x8b" + struct.pack("<I", 9000) + b"\x7f" * 9000 + b"K\x03\x86",
    ),
    "a deque of a range": (
        "collections",
        "deque",
        call("builtins", "range", b"K\x00J\xff\xff\xff\x7fK\x01\x87") + b"\x85",
    ),
    "a bytearray of a size": ("builtins", "bytearray", b"J\xff\xff\xff\x7f\x85"),
    "bytes of a size": ("builtins", "bytes", b"J\xff\xff\xff\x7f\x85"),
    "a Size of a range": ("torch", "Size", call("builtins", "range", b"K\x00J\xff\xff\xff\x7fK\x01\x87") + b"\x85"),
    "a record dtype": ("numpy", "dtype", text("V500000000") + b"\x85"),
    "a dtype of fields": ("numpy", "dtype", text("f4,O") + b"\x85"),
    "an OrderedDict of something": ("collections", "OrderedDict", b"]\x85"),
    "a factory that is a value": ("collections", "defaultdict", b"N\x85\x85"),
    "a factory with arguments": ("builtins", "list", b"(K\x01t\x85"),
    "a date out of range": ("datetime", "date", b"C\x04\xff\xff\xff\xff\x85"),
    "an hour out of range": ("datetime", "datetime", b"C\x0a\x07\xe8\x01\x01\xff\x00\x00\x00\x00\x00\x85"),
    "a zone that is none": ("datetime", "time", b"C\x06" + bytes(6) + b"N\x85\x86"),
    "a device that is none": ("torch", "device", text("x" * 30) + b"\x85"),
    "a scalar that overflows": ("numpy", "int8", b"M\xff\xff\x85"),
    "a float that overflows": ("numpy", "float32", b"G\x7f\xe0" + bytes(6) + b"\x85"),
    "a scalar of a list": ("numpy", "float64", b"]\x85"),
    "a complex of texts": ("builtins", "complex", text("1") + text("2") + b"\x86"),
    "a Decimal of a list": ("decimal", "Decimal", b"]\x85"),
    "a slice of lists": ("builtins", "slice", b"]]]\x87"),
    "a UUID of anything": ("uuid", "UUID", text("zz") + b"\x85"),
    "a path of parts that are none": ("pathlib", "PurePosixPath", b"N\x85"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_of_listed_types(name: str) -> None:
    tracemalloc.start()
    refused(call(*BAD_ARGUMENTS[name]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


ANNOUNCED = {
    "BINUNICODE": b"X\xff\xff\xff\x7f",
    "BINUNICODE8": b"\x8d" + b"\xff" * 8,
    "BINBYTES8": b"\x8e" + b"\xff" * 7 + b"\x00",
    "BYTEARRAY8": b"\x96\x00\x00\x00\x00\x01\x00\x00\x00",
    "LONG4": b"\x8b\xff\xff\xff\x7f",
    "LONG1": b"\x8a\xff",
    "SHORT_BINBYTES": b"C\xff",
    "SHORT_BINUNICODE": b"\x8c\xff",
    "FRAME": b"\x95" + b"\xff" * 8 + b"N",
    "LONG_BINGET": b"j\xff\xff\xff\x7f",
}


@pytest.mark.parametrize("name", ANNOUNCED)
def test_sizes_that_are_only_announced(name: str) -> None:
    tracemalloc.start()
    refused(ANNOUNCED[name])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"0",
        b"1",
        b"t",
        b"e",
        b"a",
        b"N\x86",
        b"\x94",
        b"h\x00",
        b"R",
        b"NR",
        b"NNa",
        b"NNNs",
        b"(NNu",
        b"](NNu",
        b"}(Nu",
        b"(",
        b"NN",
        b"(N",
    ]
    + [
        b"NNR",
        b"N)R",
        b"\x91",
        b"(\x90",
        b"](N\x90",
        b"(]\x91",
        b"}]Ns",
        b"G\x00",
        b"J\x00",
        b"M",
        b"K",
        b"\x8c\x02\xff\xfe",
    ],
    ids=repr,
)
def test_malformed_stacks_and_opcodes(body: bytes) -> None:
    refused(body)


def test_bytes_behind_the_end() -> None:
    with pytest.raises(tc.FormatError, match="4 bytes behind the end"):
        tc.decode_sample(PROTO + b"N.evil", NO_TENSORS)
    for cut in range(len(PROTO) + 1):
        with pytest.raises(tc.FormatError):
            tc.decode_sample((PROTO + b"N")[:cut], NO_TENSORS)


def test_nesting() -> None:
    for depth in (201, 100_000):
        refused(b"N" + b"\x85" * depth, "200 deep")
        refused(b"]" * depth + b"a" * (depth - 1), "200 deep")
        links = b"".join(b"0]\x94j" + struct.pack("<I", i) + b"a" for i in range(depth))  # each holds the one before
        refused(b"]\x94" + links, "200 deep")
    assert decode(b"N" + b"\x85" * 200) is not None


def test_keys_that_overflow_or_exhaust_hash() -> None:
    refused(b"}" + b"N" + b"\x85" * 1_000_000 + b"Ns", "too deep")
    shared = b"N\x85" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(100))  # hash() would visit 2**100 parts
    refused(b"}" + shared + b"Ns", "too often")
    refused(b"\x8f(" + shared + b"\x90", "too often")
    refused(b"(" + shared + b"\x91", "too often")


def test_lists_that_share_their_parts_are_walked_once() -> None:
    body = b"]\x94" + b"".join(b"0]\x94(h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(60))
    started = time.perf_counter()
    tc.realize(decode(body))
    tc.encode_sample(decode(body))
    assert time.perf_counter() - started < 5


def test_a_lazy_tensor_takes_no_state() -> None:
    tensor = call("builtins", "format", text("tensor:x") + b"\x85")
    state = b"}" + text("_source") + b"Ns"
    refused(tensor + state + b"b", "BUILD", tc.UnsafeSkeletonError, tensors=ONE_TENSOR)
    refused(tensor + state + b"b", "BUILD", tc.UnsafeSkeletonError, tensors=ONE_TENSOR, allow=[Trusted])


class Trusted:
    safe = True


class Member(Enum):
    ONE = 1


def test_build_never_touches_a_class_or_an_enum() -> None:
    cls = text(Trusted.__module__) + text("Trusted") + b"\x93"
    state = b"}" + text("safe") + b"\x89s"
    refused(cls + state + b"b", "BUILD", tc.UnsafeSkeletonError, allow=[Trusted])
    member = call(Member.__module__, "Member", b"K\x01\x85")
    refused(member + b"}" + text("_value_") + b"K\x02sb", "BUILD", tc.UnsafeSkeletonError, allow=[Member])
    refused(b"]" + state + b"b", "BUILD on a list", tc.UnsafeSkeletonError, allow=[Trusted])
    refused(cls + b")\x81N" + state + b"\x86b\x86", allow=[Trusted])  # more on the stack than one object
    assert Trusted.safe
    assert Member.ONE.value == 1
    slots = cls + b")\x81" + b"N}" + text("__class__") + b"Ns\x86b"
    refused(slots, "sets __class__", tc.UnsafeSkeletonError, allow=[Trusted])
    assert decode(cls + b")\x81" + state + b"b", allow=[Trusted]).safe is False


def test_allow_does_not_open_anything_else() -> None:
    for gadget in GADGETS:
        module, _, name = gadget.rpartition(".")
        refused(call(module, name, b")"), allow=[Trusted])
    refused(text("os") + text("system") + b"\x93)\x81", allow=[Trusted])
    refused(text("builtins") + text("list") + b"\x93)\x81", "NEWOBJ", tc.UnsafeSkeletonError, allow=[Trusted])


def test_a_newer_version_is_refused_by_its_number() -> None:
    skeleton, tensors = tc.encode_sample({"x": torch.ones(2)})
    newer = skeleton[:15] + struct.pack("<H", 2) + skeleton[17:]
    with pytest.raises(tc.FormatError, match="format version 2; this release reads version 1"):
        tc.decode_sample(newer, tensors)
    longer = skeleton[:3] + bytes([skeleton[3] + 8]) + newer[4:41] + bytes(8) + skeleton[41:]
    with pytest.raises(tc.FormatError, match="format version 2"):
        tc.decode_sample(longer, tensors)
    with pytest.raises(tc.FormatError, match="format version 2"):
        tc.decode_sample(skeleton, tensors.replace(b'"tensorcache":"1 ', b'"tensorcache":"2 '))


@given(samples(), st.data())
def test_any_byte_may_change(sample: Any, data: st.DataObject) -> None:
    skeleton, tensors = tc.encode_sample(sample)
    whole = bytearray(skeleton + tensors)
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    damaged = bytes(whole[: len(skeleton)]), bytes(whole[len(skeleton) :])
    with pytest.raises(tc.FormatError):
        tc.decode_sample(*damaged, verify=True)
    try:
        tc.realize(tc.decode_sample(*damaged))
    except tc.TensorCacheError:
        pass  # the other allowed outcome; anything else fails the test


@given(st.binary(max_size=60), st.sampled_from([b"", PROTO, b"\x80\x05"]))
def test_any_bytes(body: bytes, prefix: bytes) -> None:
    for skeleton, tensors in (
        (prefix + body, NO_TENSORS),
        (PROTO + b"N.", body),
        (PROTO + b"N.", struct.pack("<Q", len(body)) + body),
    ):
        try:
            tc.realize(tc.decode_sample(skeleton, tensors))
        except tc.TensorCacheError:
            pass  # as above


OPCODES = [bytes([code]) for code in b"(.0123NR]})abehjst\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94\x81\x92"]
PIECES = [
    *OPCODES,
    b"K\x07",
    b"h\x00",
    b"h\x01",
    text("a"),
    text("builtins"),
    text("format"),
    text("list"),
    text("tensor:x"),
]
PIECES += [
    text("collections"),
    text("defaultdict"),
    text("deque"),
    text("torch"),
    text("Size"),
    text("float32"),
    b"G" + bytes(8),
]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join), st.booleans())
def test_any_opcodes(body: bytes, allow: bool) -> None:
    try:
        value = decode(body, ONE_TENSOR, allow=[Trusted] if allow else [])
    except tc.TensorCacheError:
        return
    assert "Builder" not in repr(value)


DEQUE = text("collections") + text("deque") + b"\x93\x940"


def test_deques_that_hold_deques() -> None:
    """Freeing them overflows C's stack, also when they are dropped before anything is returned."""
    n = 200_000
    refused(DEQUE + b"h\x00)R" * n + b"a" * (n - 1), "more than 1000 deques")
    refused(DEQUE + b"h\x00)R" * n + b"a" * (n - 1) + b"0N", "more than 1000 deques")
    links = b"".join(b"h\x00)R\x94j" + struct.pack("<I", i + 1) + b"a" for i in range(n))
    refused(DEQUE + b"(h\x00)R\x94" + links + b"t", "more than 1000 deques")
    with pytest.raises(tc.EncodeError, match="1001 deques, and at most 1000"):
        tc.encode_sample([collections.deque() for _ in range(1001)])


def test_errors_do_not_print_lists_that_share_their_parts() -> None:
    shared = b"]\x94" + b"".join(b"0]\x94(h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(60))
    refused(shared + b")R", "calls a list, which is not a listed callable")
    for module, name in [
        ("builtins", "format"),
        ("builtins", "range"),
        ("torch", "device"),
        ("numpy", "dtype"),
        ("numpy", "datetime64"),
    ]:
        refused(call(module, name, shared + b"\x85"))
        refused(call(module, name, shared + b"N\x86"))


@pytest.mark.parametrize(
    ("module", "name", "argument"),
    [
        ("builtins", "bytearray", b"B" + struct.pack("<I", 200_000) + bytes(200_000)),
        ("numpy", "str_", b"X" + struct.pack("<I", 50_000) + b"x" * 50_000),
        ("decimal", "Decimal", b"X" + struct.pack("<I", 50_000) + b"1" * 50_000),
        ("pathlib", "PurePosixPath", b"X" + struct.pack("<I", 50_000) + b"a/" * 25_000),
    ],
)
def test_one_text_copied_by_many_calls(module: str, name: str, argument: bytes) -> None:
    body = argument + b"\x940" + text(module) + text(name) + b"\x93\x940(" + b"h\x01h\x00\x85R" * 28_000 + b"t"
    tracemalloc.start()
    refused(body, "too much to copy")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(body)


def test_units_of_zero() -> None:
    """numpy divides by them, and the process dies."""
    for unit in ("0s", "00ns", "s0"):
        refused(call("numpy", "datetime64", b"K\x01" + text(unit) + b"\x86"))
        refused(call("numpy", "dtype", text(f"M8[{unit}]") + b"\x85"))
    days = tc.encode_sample({"x": np.array(["2020-01-01"], "M8[D]")})
    refused(
        call("builtins", "format", text("ndarray:x?dtype=datetime64[0s]") + b"\x85"),
        "not a view of I64",
        tensors=days[1],
    )


@dataclasses.dataclass(slots=True)
class Slotted:
    value: object


def test_callables_do_not_hide_in_slots() -> None:
    cls = text(Slotted.__module__) + text("Slotted") + b"\x93"
    leak = text("decimal") + text("Decimal") + b"\x93"
    for body in (
        cls + leak + b"\x85R",
        cls + leak + b"\x85\x81",
        cls + b"]" + leak + b"a\x85R",
        cls + b")\x81" + leak + b"\x85b",
    ):
        refused(body, "callable as a value", tc.UnsafeSkeletonError, allow=[Slotted])


def test_int_keys_that_share_a_hash() -> None:
    keys = [i * (2**61 - 1) for i in range(1, 20_001)]
    longs = b"".join(b"\x8a\x0a" + key.to_bytes(10, "little") + b"N" for key in keys)
    refused(b"}(" + longs + b"u", "more than 1000 int keys that have one hash")
    refused(b"\x8f(" + longs + b"\x90", "one hash")
    with pytest.raises(tc.EncodeError, match="more than 1000 int keys that have one hash; use another key"):
        tc.encode_sample(dict.fromkeys(keys[:1001]))
    ordinary = {hash(str(i)) * 7 for i in range(5000)}
    assert tc.decode_sample(*tc.encode_sample(ordinary)) == ordinary
