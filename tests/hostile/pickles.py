"""Pickles put together opcode by opcode."""

from __future__ import annotations

import time
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


def call(module: str, name: str, arguments: bytes) -> bytes:
    """Return opcodes that call `module.name` with the tuple that `arguments` pushes."""
    return text(module) + text(name) + b"\x93" + arguments + b"R"


def decode(body: bytes, tensors: bytes = NO_TENSORS, **options: Any) -> Any:
    return tc.decode_sample(PROTO + body + b".", tensors, **options)


def refused(body: bytes, match: str | None = None, kind: type[Exception] = tc.FormatError, **options: Any) -> None:
    started = time.process_time()
    with pytest.raises(kind, match=match):
        decode(body, **options)
    assert time.process_time() - started < 5  # the attack would take minutes, or never end
