"""FORMAT.md is true: its dump is the shard it says, and its tables are what is written and read."""

from __future__ import annotations

import io
import pickletools
import re
from collections import OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from uuid import UUID

import numpy as np
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.hostile.pickles import decode
from tests.strategies import TORCH_DTYPES

TEXT = (Path(tc.__file__).parent / "codec" / "FORMAT.md").read_text()
LISTED = [
    *(1j, slice(1), range(3), Decimal(1), Fraction(1, 2), date(2020, 1, 1), time(1), datetime(2020, 1, 1)),
    *(timezone.utc, UUID(int=1), PurePosixPath("a"), PureWindowsPath("a"), OrderedDict(), defaultdict(int), deque()),
    *(timedelta(1), torch.Size([1]), torch.device("cpu"), np.dtype("f4"), ..., np.float32(1), np.datetime64(1, "s")),
]
SAMPLE = {"latent": torch.tensor([1.0, -2.0], dtype=torch.bfloat16), "size": (2, 1)}


def dumped_shard() -> bytes:
    shard = bytearray(10240)
    for offset, digits in re.findall(r"^([0-9a-f]{6})  ((?:[0-9a-f]{2} )+)", TEXT, re.MULTILINE):
        raw = bytes.fromhex(digits)
        shard[int(offset, 16) : int(offset, 16) + len(raw)] = raw
    return bytes(shard)


def test_the_dump_is_what_is_written() -> None:
    stream = io.BytesIO()
    with wds.TarWriter(stream, encoder=tc.encoder(), mtime=0) as sink:
        sink.write({"__key__": "000", "tensorcache": SAMPLE})
    assert stream.getvalue() == dumped_shard()


def test_every_stored_dtype_is_in_the_table() -> None:
    dtypes = TEXT[TEXT.index("### 3.2") : TEXT.index("### 3.3")]
    for dtype in TORCH_DTYPES:
        tensors = tc.encode_sample(torch.zeros(16, dtype=torch.uint8).view(dtype))[1]
        (stored,) = re.findall(rb'"dtype":"(\w+)"', tensors)
        assert re.search(rf"`{stored.decode()}`|`{stored.decode()[0]}8` …", dtypes), dtype
        name = str(dtype).removeprefix("torch.")
        assert re.sub(r"(?<=[a-z])\d+$", "", name) in dtypes or name.removeprefix("float8_") in dtypes, dtype


def test_every_type_that_is_written_is_in_the_table() -> None:
    listed = TEXT[TEXT.index("### 2.5") : TEXT.index("### 2.6")]
    for value in LISTED:
        arguments = [argument for _, argument, _ in pickletools.genops(tc.encode_sample([value])[0])]
        module, name = [text for text in [*arguments, "datetime"] if isinstance(text, str)][:2]
        assert module == "numpy" or f"{module}.{name}" in listed, value


class Trusted:
    pass


def test_the_opcodes_are_those_of_the_table() -> None:
    always, allow = re.findall(r"^\| (?:always|with `allow=` only) \| (.*) \|$", TEXT, re.MULTILINE)
    for opcode in pickletools.opcodes:
        for allowed, names in (([], always), ([Trusted], f"{always} {allow}")):
            is_refused = False
            try:
                decode(opcode.code.encode("latin-1"), allow=allowed)
            except tc.FormatError as exc:
                is_refused = f"opcode {opcode.name} at byte" in str(exc)
            assert is_refused == (opcode.name not in names.replace("·", "").split()), opcode.name
