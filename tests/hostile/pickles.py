"""Pickles put together opcode by opcode."""

from __future__ import annotations

import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import wds_tensorcache as tc

NO_TENSORS = tc.encode_sample(0)[1]
ONE_TENSOR = tc.encode_sample({"x": torch.ones(2)})[1]
PROTO = b"\x80\x04"


def text(value: str) -> bytes:
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


def integer(value: int) -> bytes:
    raw = value.to_bytes((value + (value < 0)).bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"\x8b" + struct.pack("<I", len(raw)) + raw


def fetch(module: str, name: str) -> bytes:
    """Return opcodes that fetch `module.name`."""
    return text(module) + text(name) + b"\x93"


def call(module: str, name: str, arguments: bytes) -> bytes:
    """Return opcodes that call `module.name` with the tuple that `arguments` pushes."""
    return fetch(module, name) + arguments + b"R"


def reference(value: str) -> bytes:
    """Return opcodes of a reference to a tensor."""
    return call("builtins", "format", text(value) + b"\x85")


def decode(body: bytes, tensors: bytes = NO_TENSORS, **options: Any) -> Any:
    return tc.decode_sample(PROTO + body + b".", tensors, **options)


@contextmanager
def little_memory(peak_nbytes: float) -> Iterator[None]:
    """Assert that the block allocates at most so many bytes, and takes less than 20 seconds of the processor."""
    tracemalloc.start()
    started = time.process_time()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < peak_nbytes
    assert time.process_time() - started < 20  # an attack would take minutes, or never end


def num_calls(run: Callable[[], Any], name: str | None = None) -> int:
    """Return how many functions `run` calls, of Python and of C, or how many of Python that have a name."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call") if name is None else event == "call" and frame.f_code.co_name == name

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def refused(body: bytes, match: str | None = None, kind: type[Exception] = tc.FormatError, **options: Any) -> None:
    started = time.process_time()
    with pytest.raises(kind, match=match):
        decode(body, **options)
    assert time.process_time() - started < 20
