"""bench: rates with their ceilings, checked reads, a chart, and one sentence."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import json_of, run
from wds_tensorcache.cli.bench_command import BATCH, COPY, LOADER, RAW, describe_limit

QUICK = ("--seconds", 0)  # one batch a run


def sample(i: int) -> dict[str, Any]:
    """Tensors of several lengths, one that some samples lack, an array, and containers."""
    made: dict[str, Any] = {
        "latent": torch.randn(4, 8, 8).bfloat16(),
        "text": [torch.randn(3 + i % 3, 5), {"mask": torch.arange(4) < i}],
        "array": np.arange(i % 2 + 1),
        "caption": f"photo {i}",
        "scalar": torch.tensor(i),
    }
    return made | ({"rare": torch.ones(2)} if i % 4 == 0 else {})


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    with tc.ShardWriter(tmp_path / "cache", max_samples=9, fsync=False) as sink:
        for i in range(25):
            sink.write(f"k{i:03d}", sample(i), txt=b"x")
    return tmp_path / "cache"


def test_rates(cache: Path) -> None:
    report = json_of("bench", cache, *QUICK, "--batch-size", 4, "--threads", 3)
    with tc.open(cache) as opened:
        nbytes = sum(each.nbytes for each in opened.schema.values())
    assert (report["num_samples"], report["num_used"], report["batch_size"]) == (25, 25, 4)
    assert report["nbytes_used"] == nbytes
    names = [(rate["name"], rate["num_threads"]) for rate in report["rates"]]
    assert names == [(COPY, 1), (RAW, 3), (BATCH, 3), (LOADER, 3)]
    for rate in report["rates"]:
        assert len(rate["rounds"]) == 3
        assert sorted(rate["rounds"])[1] == rate["nbytes_per_s"] > 0
        assert rate["samples_per_s"] > 0
    assert report["limit"].startswith("The limit here is ")


def test_what_people_read(cache: Path) -> None:
    said = run("bench", cache, *QUICK, "--threads", 1)
    lines = said.stdout.splitlines()
    assert lines[0].startswith("25 of 25 samples, ")
    for name in (COPY, RAW, BATCH, LOADER):
        (line,) = [line for line in lines if line.startswith(name)]
        assert re.fullmatch(rf"{name} +1 +[0-9.e-]+ +[0-9,]+ +█+", line)
    assert lines[-1].startswith("The limit here is ")
    assert lines[-1].endswith(".")
    assert said.stderr == ""


def test_a_part_of_a_large_cache(cache: Path) -> None:
    whole = json_of("bench", cache, *QUICK, "--threads", 1)["nbytes_used"]
    report = json_of("bench", cache, *QUICK, "--threads", 1, "--max-nbytes", whole // 5)
    assert report["num_used"] in (4, 5)
    assert whole / 8 < report["nbytes_used"] < whole / 3
    assert json_of("bench", cache, *QUICK, "--threads", 1, "--max-nbytes", 1)["num_used"] == 1


def test_samples_that_cannot_form_batches(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        for i in range(4):
            sink.write(f"k{i}", {"x": torch.ones(4, dtype=torch.int64 if i % 3 == 0 else torch.float32)})
    assert "tensor 'x'" in run("bench", tmp_path / "cache", *QUICK, status=1).stderr


def test_one_of_several_caches(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "0.tar", fsync=False) as sink:
        for i in range(3):
            sink.write(f"{i}", {"x": torch.ones(10)}, **{"text.tensorcache": {"y": torch.ones(99)}})
    run("bench", tmp_path / "0.tar", *QUICK, status=2)
    assert json_of("bench", tmp_path / "0.tar", *QUICK, "--cache", "text")["nbytes_used"] == 3 * 99 * 4


def test_damage_is_found(cache: Path) -> None:
    """All bytes are compared with the digests, so no rate is that of wrong bytes."""
    shard = cache / "000001.tar"
    with tc.open(cache) as opened:
        wanted = opened["k012"]["latent"].load().view(torch.uint8).numpy().tobytes()
    raw = bytearray(shard.read_bytes())
    raw[raw.index(wanted) + 77] ^= 1
    shard.write_bytes(raw)
    said = run("bench", cache, *QUICK, status=1)
    assert said.stdout == ""
    assert "000001.tar: sample 'k012'" in said.stderr


def test_a_cache_without_tensors(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "0.tar", fsync=False) as sink:
        sink.write("a", {"text": "no tensor"})
    assert "no samples with tensors" in run("bench", tmp_path / "0.tar", *QUICK, status=2).stderr


def test_wrong_usage(cache: Path, tmp_path: Path) -> None:
    run("bench", tmp_path / "nowhere", status=2)
    for option in (("--batch-size", 0), ("--seconds", -1), ("--threads", 0), ("--plot", "x.txt"), ("--plot", "x")):
        run("bench", cache, *option, status=2)


@pytest.mark.skipif(find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_no_matplotlib(cache: Path, tmp_path: Path) -> None:
    """The command that installs it, before anything is measured."""
    said = run("bench", cache, "--seconds", 100, "--plot", tmp_path / "x.png", status=2)
    assert "pip install matplotlib" in said.stderr


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plot(cache: Path, tmp_path: Path, suffix: str, begin: bytes) -> None:
    run("bench", cache, *QUICK, "--plot", tmp_path / f"x.{suffix}")
    assert (tmp_path / f"x.{suffix}").read_bytes().startswith(begin)


@pytest.mark.parametrize(
    ("raw", "batch", "loader", "nbytes", "words"),
    [
        (5e9, 5e9, 4e9, 1_000_000, ["reading itself", "reaches 80%", "reach 50%"]),
        (5e9, 5e9, 4e9, 1_000, ["reading itself"]),
        (1e9, 1e8, 1e8, 1_000, ["the work for each sample, 10.0 us for 1,000 bytes"]),
        (5e9, 1e9, 1e9, 1_000_000, ["putting samples together", "20%"]),
    ],
)
def test_limits(raw: float, batch: float, loader: float, nbytes: int, words: list[str]) -> None:
    text = describe_limit({COPY: 10e9, RAW: raw, BATCH: batch, LOADER: loader}, nbytes)
    assert all(word in text for word in words), text
    assert text.endswith(".")
