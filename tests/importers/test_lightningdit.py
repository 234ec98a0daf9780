"""LightningDiT's latents, saved as its `extract_features.py` saves them: each row becomes a sample, read by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from tests.importers.folders import assert_left_out, assert_samples, imported, saved
from tests.same import assert_same

NAME = "latents_rank{:02d}_shard{:03d}.safetensors"


def rows_of(count: int) -> dict[str, torch.Tensor]:
    latents, flipped = torch.randn(2, count, 32, 4, 4)
    return {"latents": latents.clone(), "latents_flip": flipped.clone(), "labels": torch.randint(0, 1000, (count,))}


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    latents = tensors["latents"]
    metadata = {"total_size": f"{latents.shape[0]}", "dtype": f"{latents.dtype}", "device": f"{latents.device}"}
    safetensors.torch.save_file(tensors, path, metadata=metadata)


def sample_of(tensors: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    return {
        "latents": tensors["latents"][row],
        "latents_flip": tensors["latents_flip"][row],
        "label": tensors["labels"][row],
    }


def test_each_row_is_a_sample(tmp_path: Path) -> None:
    folder, expected = tmp_path / "in", {}
    for rank, shard, count in ((0, 0, 7), (0, 1, 3), (1, 0, 7), (1, 1, 1)):
        tensors = rows_of(count)
        save(folder / NAME.format(rank, shard), tensors)
        for row in range(count):
            expected[f"latents_rank{rank:02d}_shard{shard:03d}/{row:05d}"] = sample_of(tensors, row)
    stats = {"mean": torch.randn(1, 32, 1, 1), "std": torch.rand(1, 32, 1, 1)}
    torch.save(stats, folder / "latents_stats.pt")
    found, report = imported(folder, tmp_path / "out")
    assert (report.format, report.ok, report.unused) == ("lightningdit", True, [])
    assert_samples(expected, found)
    fingerprint: dict[str, Any] = tc.open(tmp_path / "out").fingerprint
    for key, value in stats.items():  # as JSON, and yet exact
        assert_same(value, torch.tensor(fingerprint[f"latents_{key}"]).view(1, 32, 1, 1))


def test_other_dtypes_and_no_flips(tmp_path: Path) -> None:
    labels, seen = torch.tensor([3, 5]), torch.tensor([True, False])
    tensors = {"latents": torch.randn(2, 4, 3, 3).bfloat16(), "labels": labels, "seen": seen}
    save(tmp_path / "in" / NAME.format(0, 0), tensors)
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    expected = {"latents": tensors["latents"][1], "seen": torch.tensor(False), "label": torch.tensor(5)}
    assert_same(expected, found["latents_rank00_shard000/00001"])


def raw(tensors: dict[str, torch.Tensor]) -> bytes:
    return bytes(safetensors.torch.save(tensors))


ROWS = rows_of(3)
NO_BYTES = torch.ones(10**12, 0)
BAD = {
    "no labels": (raw({"latents": ROWS["latents"]}), "no tensors 'latents' and 'labels'"),
    "label too": (raw({**ROWS, "label": torch.tensor([1, 2, 3])}), "both a tensor 'label'"),
    "empty rows": (raw({"latents": NO_BYTES, "labels": NO_BYTES}), r"labels are \[1000000000000, 0\]"),
    "one label": (raw({**ROWS, "labels": torch.tensor(3)}), "different numbers of rows"),
    "no std": (saved({"mean": torch.ones(2)}), "expected a dict with 'mean' and 'std'"),
    "a list of statistics": (saved([1]), "expected a dict with 'mean' and 'std'"),
    "a number as std": (saved({"mean": torch.ones(2), "std": 3}), "is not a tensor of finite numbers"),
    "NaN": (saved({"mean": torch.ones(2), "std": torch.tensor(float("nan"))}), "is not a tensor of finite numbers"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    save(tmp_path / "in" / NAME.format(0, 0), ROWS)
    bad = "latents_stats.pt" if content.startswith(b"PK") else NAME.format(0, 1)
    (tmp_path / "in" / bad).write_bytes(content)
    assert_left_out(tmp_path / "in", bad, message, [f"latents_rank00_shard000/{row:05d}" for row in range(3)])


def test_a_bool_of_two_is_found_when_its_row_is_read(tmp_path: Path) -> None:
    flags = torch.tensor([True, True])
    content = bytearray(raw({"latents": torch.ones(2, 4, 3, 3), "labels": torch.tensor([3, 5]), "x": flags}))
    content[-1] = 2
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / NAME.format(0, 0)).write_bytes(content)
    good = ["latents_rank00_shard000/00000"]
    assert_left_out(tmp_path / "in", "latents_rank00_shard000.safetensors", "bool", good)
