"""The plain values of a file of `torch.save` are read from its first bytes, without its tensors; nothing runs."""

from __future__ import annotations

import gzip
import io
import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.same import assert_same
from wds_tensorcache.integrations.pickles.pth import peek_pth


class Gadget:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


ITEM = {
    "latents": torch.randn(16, 8, 8).bfloat16(),
    "weights": torch.nn.Parameter(torch.ones(2)),
    "more": OrderedDict(mask=None, sizes=(3, torch.zeros(0))),
    "image_spec": [None, "/photos/ä.jpg"],
    "caption": ["x" * 300, ""],
}


def test_peeking_reads_everything_but_tensors() -> None:
    raw = saved(ITEM)
    expected = {**ITEM, "latents": None, "weights": None, "more": OrderedDict(mask=None, sizes=(3, None))}
    assert_same(expected, peek_pth(raw))
    assert_same(expected, peek_pth(raw[:2500]))  # before the bytes of the first tensor
    with pytest.raises(tc.FormatError):
        peek_pth(raw[:500])


def test_peeking_at_bad_bytes_never_runs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tc.UnsafeSkeletonError, match="system"):
        peek_pth(saved({"x": Gadget()}))
    raw = saved(ITEM)
    for bad in (b"", b"PK\x03\x04", b"hello, world" * 9, gzip.compress(raw)):
        with pytest.raises(tc.FormatError):
            peek_pth(bad)
    rng = random.Random(0)
    for _ in range(500):
        mutated = bytearray(raw[:2500])
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(1500)] = rng.randrange(256)
        try:
            peek_pth(bytes(mutated))
        except tc.FormatError:
            pass
    assert not Path("hacked").exists()
