"""ComfyUI's training sets, saved as its node saves them: samples come back bit for bit, and no object is ever made unasked."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from tests.importers.folders import Gadget, assert_left_out, imported
from tests.same import assert_same


def make_set(count: int) -> tuple[list[Any], list[Any]]:
    """Return latents and conditioning as the node Make Training Dataset does, with the oddities that models add."""
    latents, conditioning = [], []
    for number in range(count):
        tokens = 77 * (1 + number % 2)
        latents.append({"samples": torch.randn(1, 4, 8, 8 + number % 3)})
        more: dict[str, Any] = {
            "pooled_output": torch.randn(1, 6),
            "guidance": 3.5,
            "attention_mask": torch.ones(1, tokens).bool(),
        }
        if number % 4 == 1:
            latents[-1] |= {"noise_mask": torch.rand(1, 1, 64, 64), "batch_index": [0]}
            more |= {"pooled_output": None, "hooks": None, "area": (8, 8, 0, number)}
            more["reference_latents"] = [torch.randn(1, 4, 4, 4).bfloat16()]
        conditioning.append([[torch.randn(1, tokens, 5), more]])
    conditioning[0].append([torch.randn(1, 77, 5).half(), {}])  # scheduled prompts have several parts
    return latents, conditioning


def save_set(folder: Path, latents: list[Any], conditioning: list[Any], shard_size: int = 1000) -> None:
    """Write what the node Save Training Dataset writes."""
    folder.mkdir(parents=True, exist_ok=True)
    begins = range(0, len(latents), shard_size)
    for number, begin in enumerate(begins):
        end = begin + shard_size
        with open(folder / f"shard_{number:04d}.pkl", "wb") as file:
            torch.save({"latents": latents[begin:end], "conditioning": conditioning[begin:end]}, file)
    metadata = {"num_samples": len(latents), "num_shards": len(begins), "shard_size": shard_size}
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2))


def test_several_sets_and_odd_tensors(tmp_path: Path) -> None:
    """Tensors may be views of one storage, transposed, expanded, empty or one object; the bytes are those of the values."""
    base = torch.randn(6, 4, 8, 8)
    shared = torch.randn(1, 3, 5)
    latents = [{"samples": base[number : number + 1]} for number in range(5)]
    conditioning: list[Any] = [[[shared, {"again": shared}]] for _ in range(5)]
    conditioning[1][0][0] = torch.randn(5, 3).t()[None]
    conditioning[2][0][0] = torch.randn(1, 1, 5).expand(1, 4, 5)
    conditioning[3][0][0] = torch.zeros(1, 0, 5)
    conditioning[4][0][0] = torch.tensor(True)
    for name in ("a", "sub/b"):
        save_set(tmp_path / "in" / name, latents, conditioning)
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, report.ok, report.unused) == ("comfyui", True, [])
    assert len(found) == 10
    for number in range(5):
        expected = {"latents": latents[number], "conditioning": conditioning[number]}
        assert_same(expected, found[f"sub/b/shard_0000/{number:06d}"])


@pytest.mark.parametrize("num_samples", [4, "5"])
def test_metadata_lists_the_samples(tmp_path: Path, num_samples: Any) -> None:
    """A set that was saved over a larger one has old shards; a copy may lack shards."""
    save_set(tmp_path / "in", *make_set(5), shard_size=2)
    (tmp_path / "in" / "metadata.json").write_text(json.dumps({"num_samples": num_samples}))
    good = [f"shard_{number // 2:04d}/{number % 2:06d}" for number in range(5)]
    assert_left_out(tmp_path / "in", "metadata.json", r"metadata.json: lists", good)


class Hooks:
    """Like ComfyUI's `HookGroup`, an object that only a pickle can store."""

    def __init__(self) -> None:
        self.hooks = [1, 2]


def test_objects_need_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    latents, conditioning = make_set(3)
    save_set(Path("in"), latents, conditioning)
    conditioning[0][0][1]["hooks"] = Gadget()
    conditioning[1][0][1]["hooks"] = Hooks()  # can be read, but no cache stores it
    save_set(Path("in2"), latents, conditioning)
    os.rename("in2/shard_0000.pkl", "in/shard_0001.pkl")
    os.remove("in/metadata.json")
    with pytest.raises(tc.FormatError, match=r"shard_0001.pkl.*system.*--trust"):
        tc.import_cache("in", "stopped")
    found, report = imported(Path("in"), Path("out"), on_error="skip")
    assert len(found) == 3
    assert [each.name for each in report.skipped] == ["shard_0001.pkl"]
    assert not Path("hacked").exists()
    found, report = imported(Path("in"), Path("trusted"), trust=True, on_error="skip")
    assert Path("hacked").exists()
    assert len(found) == 5
    assert [each.name for each in report.skipped] == ["shard_0001/000001"]
    assert "Hooks" in report.skipped[0].what
    assert_same(conditioning[2], found["shard_0001/000002"]["conditioning"])


LATENTS, CONDITIONING = make_set(2)
BAD: dict[str, tuple[Any, str]] = {
    "no conditioning": ({"latents": LATENTS}, "a dict of two lists"),
    "no lists": ({"latents": LATENTS[0], "conditioning": CONDITIONING}, "a dict of two lists"),
    "fewer": ({"latents": LATENTS, "conditioning": CONDITIONING[:1]}, "2 latents, but 1 conditionings"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_bad_shards(tmp_path: Path, content: Any, message: str) -> None:
    save_set(tmp_path / "in", LATENTS, CONDITIONING)
    torch.save(content, tmp_path / "in" / "shard_0007.pkl")
    assert_left_out(tmp_path / "in", "shard_0007.pkl", message, ["shard_0000/000000", "shard_0000/000001"])


def test_old_pickles(tmp_path: Path) -> None:
    """Before the node was merged, it wrote plain pickles."""
    content = {"latents": LATENTS, "conditioning": CONDITIONING}
    save_set(tmp_path / "in", LATENTS, CONDITIONING)
    (tmp_path / "in" / "metadata.json").unlink()
    (tmp_path / "in" / "shard_0001.pkl").write_bytes(pickle.dumps(content))
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert report.ok
    assert_same({"latents": LATENTS[1], "conditioning": CONDITIONING[1]}, found["shard_0001/000001"])


@pytest.mark.parametrize("name", ["shard_0001.pkl", "shard_0001.skeleton.pkl"])
def test_the_draft_layout(tmp_path: Path, name: str) -> None:
    """It is refused, no pickle of it is read, and no format makes a sample of a whole shard."""
    folder = tmp_path / "in"
    save_set(folder, LATENTS, CONDITIONING)
    (folder / "metadata.json").unlink()
    safetensors.torch.save_file({"latents.0.samples": torch.ones(2)}, folder / "shard_0001.safetensors")
    (folder / name).write_bytes(pickle.dumps({"latents": ["a placeholder"], "more": Hooks()}))
    with pytest.raises(tc.FormatError, match=rf"{name}: has its tensors in a .safetensors file") as caught:
        tc.import_cache(folder, tmp_path / "stopped", trust=True)
    assert "trust" not in str(caught.value)
    found, report = imported(folder, tmp_path / "skipped", on_error="skip", trust=True)
    assert (len(found), [each.name for each in report.skipped]) == (2, [name])
    (folder / "shard_0000.pkl").unlink()
    for on_error in ("stop", "skip"):
        with pytest.raises(tc.FormatError, match=rf"{name}.*\.safetensors") as caught:
            tc.import_cache(folder, tmp_path / "out", trust=True, on_error=on_error)
        assert "trust" not in str(caught.value)
    assert not (tmp_path / "out").exists()
