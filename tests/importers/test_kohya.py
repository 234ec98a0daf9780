"""Caches of sd-scripts: every array of every model, file name and resolution becomes part of the right sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from tests.cli.command import run
from tests.importers.folders import assert_complete, assert_left_out, format_of, imported, save
from tests.same import assert_same

RNG = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    """Return float32 that was bfloat16, as sd-scripts stores it."""
    return torch.from_numpy(RNG.normal(size=shape)).bfloat16().float().numpy()


def save_latents(
    path: Path,
    shape: tuple[int, ...],
    size: tuple[int, int] = (512, 512),
    end: str = "",
    flipped: bool = False,
    alpha: bool = False,
) -> dict[str, Any]:
    """Add a resolution to a file as sd-scripts does: read all arrays, then write all; return the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    present = dict(np.load(path)) if path.exists() else {}
    new = {"latents": floats(*shape), "original_size": np.array(size), "crop_ltrb": np.array([0, 3, *size])}
    if flipped:
        new["latents_flipped"] = floats(*shape)
    if alpha:
        new["alpha_mask"] = RNG.random((shape[-2] * 8, shape[-1] * 8), np.float32)
    np.savez(path, **(present | {name + end: array for name, array in new.items()}))
    return new


SHAPES = {"sd": (4, 8, 6), "sdxl": (4, 8, 6), "sd3": (16, 8, 6), "flux": (16, 8, 6), "lumina": (16, 8, 6)}
SHAPES |= {"anima": (16, 1, 8, 6), "hi": (64, 8, 6)}


def save_text(folder: Path, stem: str, model: str) -> dict[str, Any]:
    arrays = {
        "t5_out": floats(20, 8),
        "pool2": floats(12),
        "t5_attn_mask": np.arange(20) < 7,
        "input_ids": np.arange(9),
        "apply_t5_attn_mask": np.array(True),
        "caption_dropout_rate": np.array(0.1, np.float32),
    }
    np.savez(folder / f"{stem}_{'te_outputs' if model == 'sdxl' else f'{model}_te'}.npz", **arrays)
    return arrays


def tensors(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def all_arrays(folder: Path) -> list[Any]:
    return [array for path in folder.rglob("*.npz") for array in dict(np.load(path)).values()]


@pytest.mark.parametrize("model", SHAPES)
def test_all_models(tmp_path: Path, model: str) -> None:
    """Old and new keys, with and without flips and masks; names of images with spaces, dots, underscores and letters."""
    folder, expected = tmp_path / "in", {}
    for i, stem in enumerate(["a", "b_c", "sub dir/日本.v2", "x_0512x0512", "y_te"]):
        path, end = folder / f"{stem}_0512x0768_{model}.npz", ("", "_8x6")[i % 2]
        sample = tensors(save_latents(path, SHAPES[model], (512, 768), end, i % 3 == 1, i >= 2))
        if model != "sd":
            sample["text"] = tensors(save_text(folder, stem, model))
        (folder / f"{stem}{'.txt' if i % 2 else '.caption'}").write_text(f"\ufeffcaption {i}\nline\n", encoding="utf-8")
        expected[stem] = sample | {"caption": f"caption {i}\nline"}
    found, report = imported(folder, tmp_path / "out")
    assert found.keys() == expected.keys()
    order = ["latents", "latents_flipped", "original_size", "crop_ltrb", "alpha_mask", "text", "caption"]
    for stem, sample in expected.items():
        assert_same({name: sample[name] for name in order if name in sample}, found[stem])
    assert report.ok
    assert report.fingerprint == {
        "format": "kohya",
        "source": str(folder),
        "architecture": model,
        "keys": ["latents", "latents_HxW"],
    }


@pytest.mark.parametrize(("model", "name"), [("sdxl", "sdxl"), (None, "sd_or_sdxl"), ("sd", "sd")])
def test_old_file_names(tmp_path: Path, model: str | None, name: str) -> None:
    """`photo.npz` in place of `photo_0512x0512_sdxl.npz`, whose model other files tell; a new key in a file of old name."""
    folder = tmp_path / "in"
    one = save_latents(folder / "photo.npz", (4, 8, 8), flipped=True)
    two = save_latents(folder / "photo 2.npz", (4, 8, 6), end="_8x6")
    if model == "sdxl":
        save_text(folder, "photo", "sdxl")
    if model == "sd":
        save_latents(folder / "new_0512x0512_sd.npz", (4, 8, 8))
    found, report = imported(folder, tmp_path / "out")
    assert report.fingerprint["architecture"] == name
    assert report.notes == []
    assert ("text" in found["photo"]) == (model == "sdxl")
    assert_same(tensors(two), found["photo 2"])
    assert_same(torch.from_numpy(one["latents_flipped"]), found["photo"]["latents_flipped"])
    assert_complete(all_arrays(folder), found.values())


def test_each_resolution_is_a_sample(tmp_path: Path) -> None:
    """Resolutions in use and dead ones cannot be told apart: none is lost, and batches and buckets work."""
    folder = tmp_path / "in"
    path = folder / "a_1024x1024_flux.npz"
    expected = {"_64x64": save_latents(path, (16, 64, 64), end="_64x64", alpha=True)}
    expected["_8x32"] = save_latents(path, (16, 8, 32), end="_8x32", flipped=True)
    expected["_128x128"] = save_latents(path, (16, 128, 128), end="_128x128")
    expected["_64x64"] |= save_latents(path, (16, 64, 64), end="_64x64")  # again, in the same place of the file
    save_latents(folder / "b_1024x1024_flux.npz", (16, 64, 64), end="_64x64")
    text = save_text(folder, "a", "flux")
    save_text(folder, "b", "flux")
    found, report = imported(folder, tmp_path / "out")
    assert found.keys() == {"a_64x64", "a_8x32", "a_128x128", "b"}
    (note,) = report.notes
    assert note.startswith(
        "1 of 2 files of latents have several resolutions, for example a_1024x1024_flux.npz: 64x64, 8x32,"
    )
    assert note in run("import", folder, tmp_path / "again").stderr
    for end, entries in expected.items():
        assert found[f"a{end}"].keys() == {*entries, "text"}
        assert_same(tensors(entries), {name: found[f"a{end}"][name] for name in entries})
        assert_same(tensors(text), found[f"a{end}"]["text"])
    assert_complete(all_arrays(folder), found.values(), copies=True)
    cache = tc.open(tmp_path / "out").select(["latents", "text.t5_out"])
    shapes = {batch["latents"].shape[1:] for batch in tc.Loader(cache, 2, bucket_by="latents", collate="pad")}
    assert shapes == {(16, 64, 64), (16, 8, 32), (16, 128, 128)}


@pytest.mark.parametrize(
    ("files", "names", "note"),
    [
        (["a_0512x0512_sdxl", "a_0512x0512_sdxl _8x6"], ["a", "a_8x6"], "one without a size, 8x6;"),
        (
            ["a_0512x0512_flux _16x16", "a_0512x0512_flux _8x8", "a_8x8_0512x0512_flux _8x8"],
            ["a_0512x0512_flux_8x8", "a_16x16", "a_8x8_0512x0512_flux_8x8"],
            "1 of 2 files",
        ),
        (
            ["a", "a_0512x0512_sdxl", "a_1024x0768_sdxl _8x8", "a_1024x0768_sdxl _9x9"],
            ["a", "a_0512x0512", "a_1024x0768_8x8", "a_1024x0768_9x9"],
            "1 of 3 files",
        ),
        (
            ["a_0512x0512_flux", "a_0640x0512_flux"],
            ["a_0512x0512", "a_0640x0512"],
            "1 image with several files of latents",
        ),
    ],
    ids=[
        "old and new keys in one file",
        "an image named like a resolution",
        "an image that was resized",
        "a stale file",
    ],
)
def test_names_of_samples(tmp_path: Path, files: list[str], names: list[str], note: str) -> None:
    """The old name of a file and the new one, several resolutions in a file: each is a sample with the text of the image."""
    for file in files:
        name, _, end = file.partition(" ")
        save_latents(tmp_path / "in" / f"{name}.npz", (4, 8, 8), end=end)
    model = "flux" if "flux" in file else "sdxl"
    save_text(tmp_path / "in", "a", model)
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert sorted(found) == names
    assert note in report.notes[0]
    assert all("text" in sample for name, sample in found.items() if not name.startswith("a_8x8_"))
    assert_complete(all_arrays(tmp_path / "in"), found.values(), copies=True)


def test_arrays_of_other_programs_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "in" / "a_0512x0512_sd3.npz"
    save_latents(path, (16, 8, 8), end="_8x8")
    arrays = dict(np.load(path)) | {"score": np.array(0.5), "latents_flipped_4x4": floats(2), "alpha_mask": floats(3)}
    np.savez(path, **arrays)
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert found["a"]["other"].keys() == {"score", "latents_flipped_4x4", "alpha_mask"}
    assert_complete(arrays.values(), found.values())


def test_several_models_in_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    texts = {}
    for model in ("sdxl", "flux"):
        save_latents(folder / "sub" / f"a_0512x0512_{model}.npz", SHAPES[model])
        texts[model] = tensors(save_text(folder / "sub", "a", model))
    (folder / "sub" / "a.txt").write_text("hello")
    found, report = imported(folder, tmp_path / "out")
    assert found.keys() == {"flux/sub/a", "sdxl/sub/a"}
    assert_same(texts["flux"], found["flux/sub/a"]["text"])
    assert {sample["caption"] for sample in found.values()} == {"hello"}
    assert_complete(all_arrays(folder), found.values())
    assert report.fingerprint["architecture"] == ["flux", "sdxl"]


def test_text_alone_and_latents_alone(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    save_latents(folder / "a_0512x0512_sd3.npz", (16, 8, 8))
    save_text(folder, "b", "sd3")
    (folder / "b.txt").write_text("tags, of b")
    (folder / "b.caption").write_text("a sentence on b")
    (folder / "c.txt").write_text("no cache has this")
    found, report = imported(folder, tmp_path / "out")
    assert found["a"].keys() == {"latents", "original_size", "crop_ltrb"}
    assert found["b"].keys() == {"text", "caption", "tags"}
    assert (found["b"]["caption"], found["b"]["tags"]) == ("a sentence on b", "tags, of b")
    assert report.unused == ["c.txt"]
    assert_complete(all_arrays(folder), found.values())


@pytest.mark.parametrize("with_text", [True, False])
def test_exported_files_are_not_taken_for_the_trainers(tmp_path: Path, with_text: bool) -> None:
    for stem in "ab":
        save_latents(tmp_path / "in" / f"{stem}_0512x0512_sdxl.npz", (4, 8, 8))
        if with_text:
            save_text(tmp_path / "in", stem, "sdxl")
        else:
            (tmp_path / "in" / f"{stem}.txt").write_text("a cat")
    tc.import_cache(tmp_path / "in", tmp_path / "cache")
    run("export", tmp_path / "cache", tmp_path / "exported", "--as", "npz")
    report = tc.import_cache(tmp_path / "exported", tmp_path / "again")
    assert (report.format, report.unused) == ("files", [])


def test_recognition(tmp_path: Path) -> None:
    for i in range(9):
        save_latents(tmp_path / "old" / f"{i}.npz", (4, 8, 8))
        (tmp_path / "plain").mkdir(exist_ok=True)
        np.savez(tmp_path / "plain" / f"{i}.npz", latents=floats(4), crop_ltrb=floats(4))
        np.savez(tmp_path / "plain" / f"x_0512x0512_{i}.npz", x=floats(4))
    save_latents(tmp_path / "plain" / "a_0512x0512_sd3.npz", (4, 8, 8))  # one file among many of another origin
    assert format_of(tmp_path / "old") == "kohya"
    assert format_of(tmp_path / "plain") == "files"
    (tmp_path / "old" / "0.npz").write_bytes(b"bad")
    assert format_of(tmp_path / "old") == "files"  # the first file is always one of those looked into
    save_text(tmp_path / "old", "0", "sdxl")
    found, report = imported(tmp_path / "old", tmp_path / "out", format="kohya", on_error="skip")
    assert report.num_skipped == 1
    assert "0.npz" in report.skipped[0].what
    assert len(found) == 8


def test_bad_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for i in range(3):
        save_latents(folder / f"{i}_0512x0512_flux.npz", (16, 8, 8))
    (folder / "0.txt").write_bytes("日本".encode("cp932"))
    assert_left_out(folder, "0.txt", r"0\.txt: is not UTF-8", "12")
    (folder / "0.txt").unlink()
    np.savez(folder / "a_0512x0512_flux.npz", original_size=np.array([1, 2]))
    assert_left_out(folder, "a_0512x0512_flux.npz", "has no array 'latents'", "012")
    np.savez(folder / "depth.npz", depth=np.ones(4))
    assert_left_out(folder, "depth.npz", "is not a file of sd-scripts", "012")


# The `.safetensors` files of the branch new_cache


def save_new(
    path: Path,
    size: tuple[int, int],
    *latents: torch.Tensor,
    flipped: bool = False,
    alpha: bool = False,
    **metadata: str,
) -> dict[str, torch.Tensor]:
    facts = {"architecture": "sdxl", "width": str(size[0]), "height": str(size[1]), "format_version": "1.0.0"}
    entries = {}
    for tensor in latents:
        end = "{}x{}".format(*tensor.shape[1:3])
        entries[f"latents_{end}_{str(tensor.dtype)[6:]}"] = tensor
        facts[f"crop_ltrb_{end}"] = f"0,{tensor.shape[1]},0,10"
        if flipped:
            entries[f"latents_flipped_{end}_{str(tensor.dtype)[6:]}"] = tensor.float().flip(-1).to(tensor.dtype)
        if alpha:
            entries[f"alpha_mask_{end}"] = torch.rand(tensor.shape[1] * 8, tensor.shape[2] * 8)
    save(entries, path, facts | metadata)
    return entries


def save_new_text(path: Path, *captions: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    entries = {}
    for number in range(len(captions)):
        end = f"_{number}_{str(dtype)[6:]}"
        entries |= {f"hidden_state1{end}": torch.randn(7, 4).to(dtype), f"pool2{end}": torch.randn(4).to(dtype)}
        entries[f"t5_attn_mask_{number}"] = torch.arange(7)
    facts = {f"caption{number + 1}": text for number, text in enumerate(captions)}
    save(entries, path, {"architecture": "sdxl", "format_version": "1.0.0"} | facts)
    return entries


def all_tensors(folder: Path) -> list[torch.Tensor]:
    return [tensor for path in folder.rglob("*.safetensors") for tensor in safetensors.torch.load_file(path).values()]


def test_safetensors(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
    for i, dtype in enumerate(dtypes):
        latents = torch.randn(4, 8, 6).to(dtype)
        save_new(folder / "sub" / f"{i}_0512x0768_sdxl.safetensors", (512, 768), latents, flipped=i < 2, alpha=i == 2)
        save_new_text(folder / "sub" / f"{i}_sdxl_225_te.safetensors", f"caption {i}")
    found, report = imported(folder, tmp_path / "out")
    assert [found[f"sub/{i}"]["latents"].dtype for i in range(5)] == dtypes
    assert found["sub/0"].keys() == {"latents", "latents_flipped", "original_size", "crop_ltrb", "text", "caption"}
    assert found["sub/2"]["alpha_mask"].shape == (64, 48)
    assert (found["sub/3"]["original_size"], found["sub/3"]["crop_ltrb"]) == ((512, 768), (0, 8, 0, 10))
    assert found["sub/4"]["text"].keys() == {"hidden_state1", "pool2", "t5_attn_mask"}
    assert found["sub/4"]["caption"] == "caption 4"
    assert_complete(all_tensors(folder), found.values())
    assert report.fingerprint["format"] == "kohya-safetensors"
    assert report.fingerprint["architecture"] == "sdxl"
    assert report.fingerprint["metadata"]["text"] == {"architecture": "sdxl", "format_version": "1.0.0"}
    of_texts = ["hidden_state1_N_dtype", "pool2_N_dtype", "t5_attn_mask_N"]
    of_latents = ["alpha_mask_HxW", "latents_HxW_dtype", "latents_flipped_HxW_dtype"]
    assert report.fingerprint["keys"] == sorted(of_latents + of_texts)


def test_safetensors_of_several_resolutions_dtypes_and_captions(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    small, large = torch.randn(4, 8, 8), torch.randn(4, 16, 16)
    save_new(folder / "a_0512x0512_sdxl.safetensors", (512, 512), small.half(), small.bfloat16(), large, note="mine")
    save_new(folder / "b_0512x0512_sdxl.safetensors", (512, 512), small + 1)
    states = save_new_text(folder / "a_sdxl_225_te.safetensors", "first", "second", "third")
    save_new_text(folder / "b_sdxl_225_te.safetensors", "only")
    found, report = imported(folder, tmp_path / "out")
    assert found.keys() == {"a_8x8", "a_16x16", "b"}
    assert "1 of 2 files of latents have several resolutions" in report.notes[0]
    assert_same(small.bfloat16(), found["a_8x8"]["latents"])
    assert_same(small.half(), found["a_8x8"]["latents_8x8_float16"])
    assert_same(large, found["a_16x16"]["latents"])
    assert found["a_16x16"]["captions"] == ["first", "second", "third"]
    assert_same(states["pool2_1_bfloat16"], found["a_16x16"]["texts"][1]["pool2"])
    assert (len(found["b"]["texts"]), found["b"]["captions"]) == (1, ["only"])
    assert found["a_8x8"]["metadata"] == {"latents": {"note": "mine"}}
    assert "metadata" not in found["b"]
    assert_complete(all_tensors(folder), found.values(), copies=True)
    assert "note" not in str(report.fingerprint)


def test_safetensors_with_a_new_caption_that_changes_the_structure(tmp_path: Path) -> None:
    """A resumed import would store `text` in some samples, and `texts` in others."""
    save_new_text(tmp_path / "in" / "a_sdxl_225_te.safetensors", "only")
    tc.import_cache(tmp_path / "in", tmp_path / "out")
    save_new_text(tmp_path / "in" / "b_sdxl_225_te.safetensors", "first", "second")
    with pytest.raises(tc.StaleCacheError, match="structure"):
        tc.import_cache(tmp_path / "in", tmp_path / "out", resume=True)


def test_safetensors_of_several_lengths(tmp_path: Path) -> None:
    save_new_text(tmp_path / "in" / "a_flux_256_te.safetensors", "hello")
    save_new_text(tmp_path / "in" / "a_flux_512_m_te.safetensors", "hello", dtype=torch.float32)
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert found["a"].keys() == {"text_256", "text_512_m", "caption"}
    assert report.fingerprint["tokens"] == ["256", "512_m"]
    assert_complete(all_tensors(tmp_path / "in"), found.values())
    save_new_text(tmp_path / "in" / "a_flux_512_m_te.safetensors", "hello, new")
    with pytest.raises(tc.FormatError, match="has another caption"):
        tc.import_cache(tmp_path / "in", tmp_path / "other")


def test_safetensors_with_wrong_metadata(tmp_path: Path) -> None:
    for name, crop in (("a", "0,1,2," + "9" * 5000), ("b", "0,1,2,3")):
        path = tmp_path / "in" / f"{name}_0512x0512_sdxl.safetensors"
        save_new(path, (512, 512), torch.randn(4, 8, 8), crop_ltrb_8x8=crop)
    assert_left_out(tmp_path / "in", "a_0512x0512_sdxl.safetensors", "expected 4 integers", "b")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["pool2_0_float32", "pool2_2_float32"], "expected numbers from 0 on"),
        # the trainer takes the keys in the file for the names of the outputs
        (["pool2_0_float32", "pool2_0_float32_1_float32"], "prompts 0 and 1 have different tensors"),
    ],
)
def test_safetensors_with_wrong_prompts(tmp_path: Path, keys: list[str], message: str) -> None:
    metadata = {"architecture": "sdxl", "format_version": "1.0.0"}
    save({key: torch.ones(2) for key in keys}, tmp_path / "in" / "a_sdxl_77_te.safetensors", metadata)
    save_new_text(tmp_path / "in" / "b_sdxl_77_te.safetensors", "good")
    assert_left_out(tmp_path / "in", "a_sdxl_77_te.safetensors", message, "b")
