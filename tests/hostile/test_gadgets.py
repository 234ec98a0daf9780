"""Gadgets that scanners of pickles know, by every opcode and from every place: all are refused, none is called."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.hostile.forged import by_stream, put
from tests.hostile.pickles import NO_TENSORS, call, fetch, text

GADGETS = """
os.system posix.system nt.system subprocess.Popen commands.getoutput importlib.import_module pty.spawn pickle.loads
builtins.eval builtins.exec builtins.getattr builtins.__import__ builtins.open builtins.type builtins.object
builtins.print builtins.map builtins.bytes builtins.memoryview builtins.format.__self__ builtins.range.__reduce__
__builtin__.eval __builtin__.apply __main__.exploit operator.attrgetter operator.methodcaller functools.partial
torch.load torch.hub.load torch.Tensor torch.storage._load_from_bytes torch._utils._rebuild_tensor_v2
torch._inductor.codecache.PyCodeCache.load torch.utils.bottleneck.__main__.run_cprofile
numpy.load numpy.memmap numpy.testing._private.utils.runstring numpy._core.multiarray._reconstruct
collections.namedtuple collections.OrderedDict.fromkeys copyreg._reconstructor copy_reg._reconstructor
pathlib.Path pathlib.PosixPath uuid.SafeUUID uuid._get_command_stdout zoneinfo.ZoneInfo weakref.ref ctypes.CDLL
wds_tensorcache.decode_sample wds_tensorcache.codec.lazy.LazyTensor
""".split()

CALLED: list[object] = []


def sentinel(*args: object, **kwargs: object) -> str:
    """Leave a trace that tests look for."""
    CALLED.append(args)
    return "called"


class Trap:
    def __init__(self, *args: object) -> None:
        CALLED.append(args)

    def __setstate__(self, state: object) -> None:
        CALLED.append(state)


@dataclasses.dataclass
class Allowed:
    value: object = None


HERE = __name__
NAMES = [*GADGETS, f"{HERE}.sentinel", f"{HERE}.Trap"]


@pytest.fixture(autouse=True)
def nothing_is_called() -> Iterator[None]:
    CALLED.clear()
    yield
    assert CALLED == []


def ways(module: str, name: str) -> dict[str, bytes]:
    """Return what calls, or fetches, a global by each opcode that can."""
    lines = f"{module}\n{name}\n".encode()
    old, new = b"c" + lines, fetch(module, name)
    argument = text("echo executed")
    made = {}
    for how, found in (("GLOBAL", old), ("STACK_GLOBAL", new)):
        made |= {
            how: found,
            f"{how} REDUCE": found + argument + b"\x85R",
            f"{how} REDUCE, no arguments": found + b")R",
            f"{how} NEWOBJ": found + argument + b"\x85\x81",
            f"{how} NEWOBJ_EX": found + argument + b"\x85}\x92",
            f"{how} OBJ": b"(" + found + argument + b"o",
            f"{how} BUILD": found + b")R}" + text("x") + argument + b"sb",
            f"{how} in a list": b"](" + found + argument + b"\x85Re",
            f"{how} in a tuple": found + argument + b"\x85R\x85",
            f"{how} in a dict": b"}" + text("a") + found + argument + b"\x85Rs",
            f"{how} as a key": b"}" + found + b"Ns",
            f"{how} called as a key": b"}" + found + argument + b"\x85RNs",
            f"{how} in a set": b"\x8f(" + found + b"\x90",
            f"{how} in a frozenset": b"(" + found + argument + b"\x85R\x91",
            f"{how} as a factory": call("collections", "defaultdict", found + b"\x85"),
            f"{how} as an argument": call("decimal", "Decimal", found + b"\x85"),
            f"{how} as a reference": call("builtins", "format", found + b"\x85"),
            f"{how} called for an argument": call("builtins", "range", found + argument + b"\x85R\x85"),
            f"{how} as a class's argument": call(HERE, "Allowed", found + b"\x85"),
            f"{how} dropped": found + argument + b"\x85R0N",
            f"{how} memoized": b"N\x94" + found + b"\x940h\x01" + argument + b"\x85R\x86",
        }
    made["INST"] = b"(S'echo executed'\ni" + lines
    return made


@pytest.mark.parametrize("gadget", NAMES)
def test_no_gadget_by_no_opcode(gadget: str) -> None:
    module, _, name = gadget.rpartition(".")
    for how, body in ways(module, name).items():
        for begin in (b"", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            for allow in ([], [Allowed]):
                with pytest.raises(tc.FormatError) as caught:
                    tc.decode_sample(begin + body + b".", NO_TENSORS, allow=allow)
                if begin >= b"\x80\x04" and how.endswith(("REDUCE", "GLOBAL", "INST", "OBJ")):
                    assert isinstance(caught.value, tc.UnsafeSkeletonError), how


@pytest.mark.parametrize("suffix", ["pyd", "pkl", "pickle", "pth", "a.pyd", "x.y.pkl", "PKL", "skel.pyd"])
@pytest.mark.parametrize("zipped", [False, True])
def test_other_members(tmp_path: Path, suffix: str, zipped: bool) -> None:
    for how in ("GLOBAL REDUCE", "STACK_GLOBAL REDUCE", "INST"):
        raw = b"\x80\x04" + ways(HERE, "sentinel")[how] + b"."
        member = {f"a.{suffix}.gz": gzip.compress(raw)} if zipped else {f"a.{suffix}": raw}
        with pytest.raises(tc.FormatError, match="x.tar: sample 'a'"):
            by_stream(put(tmp_path / "x.tar", member | {"a.txt": b"text"}))
