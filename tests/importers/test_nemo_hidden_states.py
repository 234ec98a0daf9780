"""NeMo Automodel's caches of hidden states, saved as its `precompute_eagle3` and `precompute_dspark` save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.importers.folders import assert_left_out, assert_samples, imported, save

LENGTH, HIDDEN, VOCABULARY = 6, 4, 10
FACTS = {"dtype": "bf16", "format_version": 2, "selected_token_ids": [3, 1, 7], "target_model": "Qwen/Qwen3-8B"}


def eagle3(count: int) -> dict[str, torch.Tensor]:
    probs = torch.rand(count, LENGTH, VOCABULARY).softmax(-1).bfloat16()
    return {**common(count), "position_mask": torch.rand(count, LENGTH, 1) > 0.5, "target_probs": probs}


def eagle3_topk(count: int) -> dict[str, torch.Tensor]:
    values, indices = torch.rand(count, LENGTH, VOCABULARY).bfloat16().topk(2)
    return {**common(count), "target_probs_values": values, "target_probs_indices": indices.to(torch.int32)}


def dspark(count: int) -> dict[str, torch.Tensor]:
    states = common(count)
    return {
        "input_ids": states["input_ids"],
        "loss_mask": states["loss_mask"],
        "target_hidden_states": states["aux_hidden_states"],
        "target_last_hidden_states": torch.randn(count, LENGTH, HIDDEN).half(),
    }


def common(count: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.randint(0, 1000, (count, LENGTH)),
        "attention_mask": torch.ones(count, LENGTH).long(),
        "loss_mask": torch.randint(0, 2, (count, LENGTH)),
        "aux_hidden_states": torch.randn(count, LENGTH, 3 * HIDDEN).bfloat16(),
    }


def write_cache(folder: Path, count: int, make: Any = eagle3, shard_size: int = 2, **manifest: Any) -> dict[str, Any]:
    """Write a cache; return its samples by the names that they must get."""
    samples = {}
    for shard, begin in enumerate(range(0, count, shard_size)):
        tensors = make(min(shard_size, count - begin))
        save(tensors, folder / f"shard-{shard:06d}.safetensors")
        for row in range(len(tensors["input_ids"])):
            samples[f"shard-{shard:06d}/{row:05d}"] = {name: tensor[row] for name, tensor in tensors.items()}
    save({"weight": torch.randn(VOCABULARY, HIDDEN)}, folder / "target_embeddings.safetensors")
    listed = FACTS | {"num_samples": count, "shard_size": shard_size} | manifest
    (folder / "manifest.json").write_text(json.dumps(listed, indent=2, sort_keys=True))
    return samples


@pytest.mark.parametrize("make", [eagle3, eagle3_topk, dspark])
def test_each_row_is_a_sample(tmp_path: Path, make: Any) -> None:
    expected = write_cache(tmp_path / "in", 5, make, complete=True)
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.ok, report.unused) == ("nemo-hidden-states", True, ["target_embeddings.safetensors"])
    assert_samples(expected, found)
    fingerprint = dict(tc.open(tmp_path / "out").fingerprint or {})
    assert {name: fingerprint[name] for name in FACTS} == FACTS
    assert not fingerprint.keys() & {"num_samples", "shard_size", "complete"}


def test_several_caches(tmp_path: Path) -> None:
    """Of the files without a manifest, none is a sample."""
    expected = {f"{name}/{key}": sample for name in "ab" for key, sample in write_cache(tmp_path / name, 3).items()}
    save(eagle3(2), tmp_path / "shard-000000.safetensors")
    found, report = imported(tmp_path, tmp_path / "out")
    assert_samples(expected, found)
    assert sorted(report.fingerprint["caches"]) == ["a", "b"]
    assert "shard-000000.safetensors" in report.unused


@pytest.mark.parametrize("num_samples", [4, "5"])
def test_another_number_of_samples(tmp_path: Path, num_samples: Any) -> None:
    """A precompute that was interrupted, or a copy that lacks files."""
    expected = write_cache(tmp_path / "in", 5, num_samples=num_samples)
    assert_left_out(tmp_path / "in", "manifest.json", "lists .* samples, but the files have 5", expected)


def test_bad_files(tmp_path: Path) -> None:
    expected = write_cache(tmp_path / "in", 5)
    rows = eagle3(3)
    for tensors, message in (
        ({"x": rows["loss_mask"]}, "has no tensor 'input_ids'"),
        ({**rows, "loss_mask": rows["loss_mask"][:2].clone()}, "different numbers of rows"),
    ):
        save(tensors, tmp_path / "in" / "shard-000007.safetensors")
        assert_left_out(tmp_path / "in", "shard-000007.safetensors", message, expected)
