"""Importers read a range of a file, and the plain values of a torch file from its first bytes; nothing runs."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.same import assert_same
from wds_tensorcache.integrations.importers.safe_files import parse_torch
from wds_tensorcache.integrations.importers.source_folder import SourceFolder
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


def test_a_range_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    folder = SourceFolder(str(tmp_path))
    assert folder.read_range("a.bin", 10, 20) == bytes(range(10, 20))
    assert folder.read_range("a.bin", 100, 100) == b""
    with pytest.raises(tc.FormatError, match=r"a.bin: the file has 100 bytes, but \[90, 101\) is needed"):
        folder.read_range("a.bin", 90, 101)


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


def test_bytes_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for raw in (saved(ITEM), gzip.compress(saved(ITEM))):
        assert_same(ITEM["latents"], parse_torch(raw, False)["latents"])
    with pytest.raises(tc.UnsafeSkeletonError, match="--trust"):
        parse_torch(saved(Gadget()), False)
    assert not Path("hacked").exists()
    parse_torch(saved(Gadget()), True)
    assert Path("hacked").exists()
    with pytest.raises(tc.FormatError, match="cannot be decoded"):
        parse_torch(b"hello", True)


def test_old_torch_files_need_trust_and_pickles_do_not() -> None:
    item = {"latents": ITEM["latents"], "caption": ITEM["caption"]}
    old = io.BytesIO()
    torch.save(item, old, _use_new_zipfile_serialization=False)
    with pytest.raises(tc.FormatError, match="--trust"):
        parse_torch(old.getvalue(), False)
    assert_same(item, parse_torch(old.getvalue(), True))
    assert_same(item, parse_torch(pickle.dumps(item), False))
