"""FORMAT.md is true: its dump is the shard it says, and its tables are the code's."""

from __future__ import annotations

import io
import pickletools
import re
from pathlib import Path

import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.same import assert_same
from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.codec.skeleton import opcodes
from wds_tensorcache.codec.skeleton.types import ALLOW_ONLY, LISTED

TEXT = (Path(tc.__file__).parent / "codec" / "FORMAT.md").read_text()
SAMPLE = {"latent": torch.tensor([1.0, -2.0], dtype=torch.bfloat16), "size": (2, 1)}


def dumped_shard() -> bytes:
    shard = bytearray(10240)
    for offset, digits in re.findall(r"^([0-9a-f]{6})  ((?:[0-9a-f]{2} )+)", TEXT, re.MULTILINE):
        raw = bytes.fromhex(digits)
        shard[int(offset, 16) : int(offset, 16) + len(raw)] = raw
    return bytes(shard)


def test_the_dump_decodes() -> None:
    stream = io.BytesIO(dumped_shard())
    files = wds.tariterators.tar_file_expander([{"url": "FORMAT.md", "stream": stream}])
    (sample,) = tc.decode(verify=True)(wds.tariterators.group_by_keys(files))
    assert sample["__key__"] == "000"
    assert_same(SAMPLE, sample["tensorcache"])


def test_the_dump_is_what_is_written() -> None:
    stream = io.BytesIO()
    with wds.TarWriter(stream, encoder=tc.encoder(), mtime=0) as sink:
        sink.write({"__key__": "000", "tensorcache": SAMPLE})
    assert stream.getvalue() == dumped_shard()


def test_tables() -> None:
    dtypes = TEXT[TEXT.index("### 3.2") : TEXT.index("### 3.3")]
    for stored, (_, torch_name, _) in STORED.items():
        kind = re.sub(r"(?<=[a-z])\d+$", "", torch_name)
        assert re.search(rf"`{stored}`|`{stored[0]}8` …", dtypes), stored
        assert kind in dtypes or torch_name.removeprefix("float8_") in dtypes, torch_name
    listed = TEXT[TEXT.index("### 2.5") : TEXT.index("### 2.6")]
    for row in LISTED.values():
        assert f"{row.module}.{row.name}" in listed or row.module == "numpy", row


def test_the_opcodes_are_those_of_the_table() -> None:
    always, allow = re.findall(r"^\| (?:always|with `allow=` only) \| (.*) \|$", TEXT, re.MULTILINE)
    values = {name: value for name, value in vars(opcodes).items() if name.isupper() and isinstance(value, int)}
    assert {*always.replace("·", "").split(), *allow.split(), "PROTO"} == values.keys()
    assert {values[name] for name in allow.split()} == ALLOW_ONLY.keys()
    assert values == {known.name: ord(known.code) for known in pickletools.opcodes if known.name in values}
