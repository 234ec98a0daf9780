"""Attacks that get through an unpickler with a plain list of allowed names: there they are seen to work, here they do not."""

from __future__ import annotations

import dataclasses
import io
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.hostile.pickles import PROTO, call, decode, refused, text

SHARED = b"]\x94" + b"".join(b"0]\x94(h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(26))


@dataclasses.dataclass(slots=True)
class Ref:
    """A lazy tensor as one would write it: allowed, since it only keeps where its bytes are."""

    path: str = ""

    def load(self) -> bytes:
        return Path(self.path).read_bytes()


class Settings:
    """A class that the caller allows."""

    is_safe = True


class AllowList(pickle.Unpickler):
    """The common recommendation: `find_class` with a list of harmless names."""

    names = frozenset(
        {
            *(("builtins", name) for name in ("list", "range", "dict", "set")),
            *(("collections", name) for name in ("deque", "defaultdict", "OrderedDict")),
            ("fractions", "Fraction"),
            ("functools", "partial"),
            ("numpy", "dtype"),
            (np.ones(1)[0].__reduce__()[0].__module__, "scalar"),
            (__name__, "Ref"),
            (__name__, "Settings"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def by_allow_list(body: bytes) -> Any:
    return AllowList(io.BytesIO(PROTO + body + b".")).load()


def state_of(cls: str, name: str, value: bytes) -> bytes:
    """Return opcodes that set an attribute of an object, or of the class itself, which is on the stack."""
    return b"N}" + text(name) + value + b"s\x86b"


def test_the_list_is_what_it_claims_to_be() -> None:
    with pytest.raises(pickle.UnpicklingError):
        by_allow_list(call("os", "system", text("true") + b"\x85"))
    assert by_allow_list(call("collections", "deque", b"](K\x01e\x85"))[0] == 1


def test_a_lazy_tensor_reads_any_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    body = call(__name__, "Ref", b")") + state_of("Ref", "path", text(str(tmp_path / "secret")))
    assert by_allow_list(body).load() == b"secret"
    refused(body, "Ref")
    tensor = call("builtins", "format", text("tensor:x") + b"\x85") + state_of(
        "LazyTensor", "_source", text("/etc/passwd")
    )
    _, tensors = tc.encode_sample({"x": np.ones(2)})
    with pytest.raises(tc.UnsafeSkeletonError):
        tc.decode_sample(PROTO + tensor + b".", tensors)


def test_a_class_is_patched_for_the_whole_process() -> None:
    body = text(__name__) + text("Settings") + b"\x93" + state_of("Settings", "is_safe", b"\x89")
    try:
        by_allow_list(body)
        assert not Settings.is_safe
    finally:
        Settings.is_safe = True
    refused(body, "Settings")
    refused(body, "BUILD", tc.UnsafeSkeletonError, allow=[Settings])
    assert Settings.is_safe


def test_a_partial_as_a_factory_ends_the_process() -> None:
    partial = b"\x8c\x09functools\x8c\x07partial\x93\x94\x8c\x08builtins\x8c\x04list\x93\x85R\x94(h\x01)}Ntb"
    body = partial + b"0" + call("collections", "defaultdict", b"h\x01\x85")
    code = f"from {__name__} import by_allow_list; by_allow_list({body!r})['x']"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode != 0
    refused(body, "partial")


@pytest.mark.parametrize(
    ("body", "does"),
    [
        (call("fractions", "Fraction", text("1e2000000") + b"\x85"), lambda made: made.numerator.bit_length() > 6_000_000),
        (call("builtins", "list", call("builtins", "range", b"J\x80\x96\x98\x00\x85") + b"\x85"), lambda made: len(made) == 10**7),
        (call("collections", "deque", call("builtins", "range", b"J\x80\x96\x98\x00\x85") + b"\x85"), lambda made: len(made) == 10**7),
        (
            call(np.ones(1)[0].__reduce__()[0].__module__, "scalar", call("numpy", "dtype", text("V500000000") + b"\x85") + b"\x85"),
            lambda made: made.nbytes == 500_000_000,
        ),
    ],
    ids=["Fraction", "list", "deque", "scalar"],
)  # fmt: skip
def test_some_bytes_become_very_many(body: bytes, does: Callable[[Any], bool]) -> None:
    assert len(body) < 100
    assert does(by_allow_list(body))
    refused(body)


def test_eight_bytes_take_256_megabytes() -> None:
    body = b"N" + b"r" + struct.pack("<I", 0x00FFFFFF)  # LONG_BINPUT
    tracemalloc.start()
    try:
        by_allow_list(body)
        assert tracemalloc.get_traced_memory()[1] > 256_000_000
        tracemalloc.reset_peak()
        refused(body, "LONG_BINPUT")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_lists_that_share_their_parts_keep_a_walk_busy() -> None:
    assert len(SHARED) <= 246

    def count(value: list[Any], limit: int) -> int:
        """Visit every part as a walk does that remembers nothing, up to a limit."""
        visited = 1
        for part in value:
            if visited >= limit:
                break
            visited += count(part, limit - visited)
        return visited

    assert count(by_allow_list(SHARED), 1_000_000) == 1_000_000  # of 2**26
    value = decode(SHARED)
    assert tc.decode_sample(*tc.encode_sample(tc.realize(value)))[0][0] is not None
