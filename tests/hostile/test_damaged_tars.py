"""Attacks of hostile shards on the tools that check, repair and index shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.shards.damage import flip, members, sample, write
from tests.shards.footers import U8, forge, replace
from tests.shards.tars import build, raw_header


def test_an_index_that_swaps_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "a", 4, dali_index=False, manifest=False)
    forge(path, replace(keys__text=np.frombuffer(b"000002001003", U8)))
    places = members(path)
    for name in ("001.skel.pyd", "001.safetensors"):
        flip(path, places[name][0] - 300)
    tc.repair(path, tmp_path / "out")
    with tc.open(tmp_path / "out") as cache:
        assert [(key, value["prompt"]) for key, value in zip(cache.keys(), cache, strict=True)] == [
            (key, f"photo {int(key)}") for key in ("000", "002", "003")
        ]


def test_zeros_in_place_of_a_header(tmp_path: Path) -> None:
    path = write(tmp_path, 4, dali_index=False, manifest=False, footer=False)
    begin = members(path)["001.skel.pyd"][0] - 512
    content = path.read_bytes()
    path.write_bytes(content[:begin] + bytes(512) + content[begin + 512 :])
    before = path.read_bytes()
    with pytest.raises(tc.FormatError, match=r"tc\.repair"):
        tc.write_index(path)
    assert path.read_bytes() == before


def test_a_foreign_member_called_like_an_error(tmp_path: Path) -> None:
    inner = build([("000.json", b"1"), ("900.json", b"2")])
    foreign = raw_header(b"compressed.bin", b"S", b"%011o" % len(inner)) + inner
    cache = [("000.skel.pyd", tc.encode_sample(sample(0))[0]), ("000.safetensors", tc.encode_sample(sample(0))[1])]
    (tmp_path / "x.tar").write_bytes(build([("a.json", b"1")])[:-1024] + foreign + build(cache))
    assert tc.verify(tmp_path / "x.tar").num_samples == 2
    tc.repair(tmp_path / "x.tar", tmp_path / "out")
    assert list(members(tmp_path / "out" / "x.tar")) == ["a.json", "000.skel.pyd", "000.safetensors"]
