"""Caches of LTX-Video-Trainer and LTX-2, written as their scripts write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.importers.folders import assert_samples, format_of, imported, save
from tests.same import assert_same


def latents(i: int) -> dict[str, Any]:
    return {"latents": torch.randn(128, 1 + i, 4, 6).bfloat16(), "num_frames": 1 + i, "fps": 24.5 + i}


def conditions(i: int) -> dict[str, Any]:
    return {"prompt_embeds": torch.randn(3 + i, 64).bfloat16(), "prompt_attention_mask": torch.arange(3 + i) > i}


def test_parallel_folders(tmp_path: Path) -> None:
    """Audio is missing for a clip without sound; a temporary file of a killed run is not a sample."""
    root = tmp_path / "data" / ".precomputed"
    expected: dict[str, Any] = {}
    for i, stem in enumerate(["clips/a", "clips/b.v2", "c"]):
        expected[f"data/{stem}"] = sample = {
            "latents": save(latents(i), root / "latents" / f"{stem}.pt"),
            "conditions": save(conditions(i), root / "conditions" / f"{stem}.pt"),
            "reference_latents": save(latents(i), root / "reference_latents" / f"{stem}.pt"),
            "mask": save({"mask": torch.rand(4, 6)}, root / "mask" / f"{stem}.pt"),
        }
        if i:
            audio = {"latents": torch.randn(8, 5, 16), "num_time_steps": 5, "frequency_bins": 16, "duration": 1.5}
            sample["audio_latents"] = save(audio, root / "audio_latents" / f"{stem}.pt")
    (root / "latents" / "d.pt.tmp.1234").write_bytes(b"half")
    found, report = imported(tmp_path, tmp_path / "out")
    assert (report.format, report.ok) == ("ltx", True)
    assert_samples(expected, found)
    assert report.fingerprint["folders"] == ["audio_latents", "conditions", "latents", "mask", "reference_latents"]


def test_several_data_sets_and_old_names(tmp_path: Path) -> None:
    expected = {}
    # of a folder of clips that is called latents, and with old names
    files = [("latents/x", "latents/x"), ("y", "y"), ("latent_1", "condition_1")]
    for name in ("one/.precomputed", "two"):
        for latent, condition in files:
            expected[f"{name.partition('/')[0]}/{latent}"] = {
                "latents": save(latents(1), tmp_path / "in" / name / "latents" / f"{latent}.pt"),
                "conditions": save(conditions(1), tmp_path / "in" / name / "conditions" / f"{condition}.pt"),
            }
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.ok) == ("ltx", True)
    assert_samples(expected, found)


def test_latents_alone(tmp_path: Path) -> None:
    expected = save(latents(1), tmp_path / ".precomputed" / "latents" / "a.pt")
    for number, source in enumerate((tmp_path, tmp_path / ".precomputed")):
        found, report = imported(source, tmp_path / f"{number}")
        assert report.format == "ltx"
        assert_same({"a": {"latents": expected}}, found)
    save(latents(1), tmp_path / "other" / "latents" / "a.pt")  # such folders exist in other formats
    assert format_of(tmp_path / "other") != "ltx"


def test_incomplete_samples_are_named(tmp_path: Path) -> None:
    for name in ("latents/a", "conditions/a", "latents/b", "audio_latents/b", "conditions/c"):
        save(latents(0), tmp_path / ".precomputed" / f"{name}.pt")
    with pytest.raises(tc.FormatError, match="has no file in"):
        tc.import_cache(tmp_path, tmp_path / "stopped")
    found, report = imported(tmp_path, tmp_path / "out", on_error="skip")
    assert list(found) == ["a"]
    assert {each.name: each.what for each in report.skipped} == {
        ".precomputed/latents/b.pt": "has no file in .precomputed/conditions/",
        ".precomputed/audio_latents/b.pt": "has no file in .precomputed/conditions/",
        ".precomputed/conditions/c.pt": "has no file in .precomputed/latents/",
    }
