"""bench: four rates, and one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import json_of, run
from tests.reading.batches import write
from tests.shards.tars import build_with_tarfile

QUICK = ("--seconds", 0)  # one batch a run
NAMES = ["copies in memory", "raw reads", "read_batch", "Loader"]


def sample(i: int) -> dict[str, Any]:
    """Tensors of several lengths, one that some samples lack, an array, and containers."""
    sample: dict[str, Any] = {
        "latent": torch.randn(4, 8, 8).bfloat16(),
        "text": [torch.randn(3 + i % 3, 5), {"mask": torch.arange(4) < i}],
        "array": np.arange(i % 2 + 1),
        "caption": f"photo {i}",
        "scalar": torch.tensor(i),
    }
    return sample | ({"rare": torch.ones(2)} if i % 4 == 0 else {})


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return Path(write(tmp_path / "cache", [sample(i) for i in range(25)], lambda i: {"txt": b"x"}, max_samples=9))


@pytest.mark.long
def test_rates(cache: Path) -> None:
    report = json_of("bench", cache, *QUICK, "--batch-size", 4, "--threads", 3)
    with tc.open(cache) as opened:
        nbytes = sum(tensor.nbytes for tensor in opened.schema.values())
    assert (report["num_samples"], report["num_used"], report["batch_size"]) == (25, 25, 4)
    assert report["nbytes_used"] == nbytes
    threads = list(zip(NAMES, [1, 3, 3, 3], strict=True))
    assert [(rate["name"], rate["num_threads"]) for rate in report["rates"]] == threads
    for rate in report["rates"]:
        assert len(rate["rounds"]) == 3
        assert sorted(rate["rounds"])[1] == rate["nbytes_per_s"] > 0
        assert rate["samples_per_s"] > 0
    said = run("bench", cache, *QUICK, "--threads", 1)
    lines = said.stdout.splitlines()
    assert lines[0].startswith("25 of 25 samples, ")
    for name in NAMES:
        (line,) = [line for line in lines if line.startswith(name)]
        assert re.fullmatch(rf"{name} +1 +[0-9.e-]+ +[0-9,]+ +█+", line)
    for text in (report["limit"], lines[-1]):
        assert re.fullmatch(r"The limit here is (reading itself|the work for each sample|putting samples).*\.", text)
    assert said.stderr == ""


def test_a_part_of_a_large_cache(cache: Path) -> None:
    whole = json_of("bench", cache, *QUICK, "--threads", 1)["nbytes_used"]
    report = json_of("bench", cache, *QUICK, "--threads", 1, "--max-nbytes", whole // 5)
    assert report["num_used"] in (4, 5)
    assert whole / 8 < report["nbytes_used"] < whole / 3
    assert json_of("bench", cache, *QUICK, "--threads", 1, "--max-nbytes", 1)["num_used"] == 1


def test_tensors_that_differ_are_left_out(tmp_path: Path) -> None:
    """Tensors of several dtypes, and those that shorter lists lack."""
    texts = [[torch.ones(2) for _ in range(1 + i % 3)] for i in range(5)]
    samples = [{"x": torch.ones(8), "texts": each, "text": np.array("a" * len(each))} for each in texts]
    done = run("bench", write(tmp_path, samples), *QUICK, "--json")
    assert "or the lengths of their lists differ between samples: 'text', 'texts.1', 'texts.2'" in done.stderr
    assert json.loads(done.stdout)["nbytes_used"] == 5 * 40


def test_tensors_that_only_samples_left_out_have(tmp_path: Path) -> None:
    """A part of a cache may lack a tensor, and a batch may have no bytes."""
    samples = [
        {"x": torch.ones(8 * (i % 2)), "dtype": torch.ones(1, dtype=(torch.half, torch.int64)[i % 2])} for i in range(6)
    ]
    samples[5]["rare"] = torch.ones(2)
    folder = write(tmp_path, samples)
    report = json_of("bench", folder, *QUICK, "--batch-size", 1, "--threads", 1)
    assert report["num_used"] == 6
    assert all(rate["nbytes_per_s"] > 0 for rate in report["rates"])
    samples[0]["x"] = torch.ones(8)
    write(tmp_path, samples, overwrite=True)
    assert json_of("bench", folder, *QUICK, "--threads", 1, "--max-nbytes", 1)["num_used"] == 1


def test_refusals(cache: Path, tmp_path: Path) -> None:
    """Samples that cannot form batches, no tensors, several caches, and wrong options."""
    mixed = write(tmp_path / "mixed", [{"x": torch.ones(4, dtype=dtype)} for dtype in (torch.int64, torch.float32)])
    assert "tensor 'x'" in run("bench", mixed, *QUICK, status=1).stderr
    write(tmp_path / "0.tar", [{"text": "no tensor"}], lambda i: {"text.tensorcache": {"y": torch.ones(99)}})
    assert "'text'" in run("bench", tmp_path / "0.tar", *QUICK, status=2).stderr
    assert "no samples with tensors" in run("bench", tmp_path / "0.tar", *QUICK, "--cache", "", status=2).stderr
    samples = [{"x": torch.zeros(1000 * i)} for i in range(4)]
    part = run("bench", write(tmp_path / "part", samples), *QUICK, "--max-nbytes", 1, status=2)
    assert "no samples with tensors among 1 of 4" in part.stderr
    assert json_of("bench", tmp_path / "0.tar", *QUICK, "--cache", "text")["nbytes_used"] == 99 * 4
    run("bench", tmp_path / "nowhere", status=2)
    (tmp_path / "photos.tar").write_bytes(build_with_tarfile([("a.jpg", b"abc")]))
    assert "only other members" in run("bench", tmp_path / "photos.tar", *QUICK, status=2).stderr
    for option in (("--batch-size", 0), ("--seconds", -1), ("--threads", 0)):
        run("bench", cache, *option, status=2)
    run("bench", cache, *QUICK, "--seconds", "nan")
