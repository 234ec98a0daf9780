"""Caches of musubi-tuner: every tensor of every architecture becomes part of the right sample, under its name in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from tests.importers.folders import assert_complete, assert_left_out, assert_samples, format_of, imported
from tests.importers.test_kohya import all_tensors, save_latents, save_new, save_new_text

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
I64, I32 = torch.int64, torch.int32
NAMES = {"fp": "framepack"}

# The keys of the files, with dtypes and shapes, and the names that they must get: those in the batches of musubi-tuner.
LATENTS: dict[str, list[tuple[str, str, torch.dtype, tuple[int, ...]]]] = {
    "wan": [
        ("latents_5x8x6_bfloat16", "latents", BF16, (16, 5, 8, 6)),
        ("clip_bfloat16", "clip", FP16, (7, 8)),  # has the dtype of the latents in its key
        ("latents_image_5x8x6_bfloat16", "latents_image", BF16, (20, 5, 8, 6)),
        ("latents_control_5x8x6_bfloat16", "latents_control", BF16, (16, 5, 8, 6)),
        ("f_indices_int32", "f_indices", I32, (3,)),
    ],
    "fp": [
        ("latents_9x8x6_float32", "latents", FP32, (16, 9, 8, 6)),
        ("latents_clean_9x8x6_float32", "latents_clean", FP32, (16, 2, 8, 6)),
        ("clean_latent_2x_indices_int64", "clean_latent_2x_indices", I64, (2,)),
        ("latents_clean_2x_9x8x6_float32", "latents_clean_2x", FP32, (16, 2, 8, 6)),
    ],
    "f2k9b": [
        ("latents_8x6_bfloat16", "latents", BF16, (128, 8, 6)),
        ("latents_control_0_4x4_bfloat16", "latents_control_0", BF16, (128, 4, 4)),
        ("latents_control_1_2x6_bfloat16", "latents_control_1", BF16, (128, 2, 6)),
    ],
    "k5": [
        ("latents_5x8x6_float16", "latents", FP16, (16, 5, 8, 6)),
        ("latents_image_5x8x6_float16", "latents_image", FP16, (16, 5, 8, 6)),
        ("vae_scaling_factor", "vae_scaling_factor", FP32, ()),
    ],
    "zi": [("latents_1x8x6_float8_e4m3fn", "latents", FP8, (16, 8, 6))],
}
TEXTS: dict[str, list[tuple[str, str, torch.dtype, tuple[int, ...]]]] = {
    "wan": [("varlen_t5_bfloat16", "t5", BF16, (11, 8))],
    "fp": [
        ("llama_vec_bfloat16", "llama_vec", BF16, (9, 8)),
        ("llama_attention_mask", "llama_attention_mask", I64, (9,)),
        ("clip_l_pooler_float32", "clip_l_pooler", FP32, (8,)),
    ],
    "f2k9b": [("ctx_vec_bfloat16", "ctx_vec", BF16, (9, 24))],
    "k5": [
        ("text_embeds_bfloat16", "text_embeds", BF16, (9, 8)),
        ("pooled_embed_bfloat16", "pooled_embed", BF16, (8,)),
        ("attention_mask", "attention_mask", torch.bool, (9,)),
    ],
    "zi": [("varlen_llm_embed_bfloat16", "llm_embed", BF16, (9, 8))],
}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(-99, 99, shape, dtype=dtype)


def save(path: Path, tensors: dict[str, torch.Tensor], arch: str, **metadata: str) -> dict[str, torch.Tensor]:
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"architecture": NAMES.get(arch, arch), "format_version": "1.0.1"} | metadata
    safetensors.torch.save_file(tensors, path, metadata=facts)
    return tensors


def save_image(
    folder: Path, stem: str, arch: str, size: tuple[int, int] = (512, 768), **more: str
) -> dict[str, torch.Tensor]:
    """Write the file of latents; return its tensors by the names that they must get."""
    made = {key: random_tensor(dtype, shape) for key, _, dtype, shape in LATENTS[arch]}
    path = folder / f"{stem}_{size[0]:04d}x{size[1]:04d}_{arch}.safetensors"
    save(path, made, arch, width=str(size[0]), height=str(size[1]), **more)
    return {name: made[key] for key, name, _, _ in LATENTS[arch]}


def save_text(folder: Path, stem: str, arch: str, caption: str = "hello", **more: str) -> dict[str, torch.Tensor]:
    made = {key: random_tensor(dtype, shape) for key, _, dtype, shape in TEXTS[arch]}
    save(folder / f"{stem}_{arch}_te.safetensors", made, arch, caption1=caption, **more)
    return {name: made[key] for key, name, _, _ in TEXTS[arch]}


@pytest.mark.parametrize("arch", LATENTS)
def test_all_architectures(tmp_path: Path, arch: str) -> None:
    folder, expected = tmp_path / "in", {}
    for i, stem in enumerate(["a", "b_c", "sub dir/日本.v2", "x_0512x0512", "y_te", "z_00000-025"]):
        sample: dict[str, Any] = dict(save_image(folder, stem, arch, (512, 64 + i)))
        sample |= {"original_size": (512, 64 + i), "text": save_text(folder, stem, arch, f"Caption\n{i} \U0001f600")}
        expected[stem] = sample | {"caption": f"Caption\n{i} \U0001f600"}
    found, report = imported(folder, tmp_path / "out")
    assert_samples(expected, found)
    assert report.ok
    common = {"architecture": NAMES.get(arch, arch), "format_version": "1.0.1"}
    assert (report.format, report.fingerprint["architecture"]) == ("musubi", NAMES.get(arch, arch))
    assert report.fingerprint["metadata"] == {"latents": common, "text": common}


def test_parts_of_videos_share_a_text(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    parts = ["clip_00000-025", "clip_00025-025", "clip_100000-1025", "clip_00000-025-0003"]
    for part in parts:
        save_image(folder, part, "fp", (1280, 720), frame_count=part.split("-")[1])
    text = save_text(folder, "clip", "fp", "a walk")
    found, report = imported(folder, tmp_path / "out")
    assert found.keys() == set(parts)
    for sample in found.values():
        assert_samples(text, sample["text"])
        assert sample["caption"] == "a walk"
    facts = [(found[part]["first_frame"], found[part]["frame_count"], found[part].get("section")) for part in parts]
    of_latents = [f"latents{name}_FxHxW_dtype" for name in ("", "_clean", "_clean_2x")]
    of_texts = ["clip_l_pooler_dtype", "llama_attention_mask", "llama_vec_dtype"]
    assert report.fingerprint["keys"] == sorted(["clean_latent_2x_indices_dtype", *of_latents, *of_texts])
    assert facts == [(0, 25, None), (25, 25, None), (100_000, 1025, None), (0, 25, 3)]
    assert_complete(all_tensors(folder), found.values(), copies=True)


def test_an_image_named_like_a_part_of_a_video(tmp_path: Path) -> None:
    save_image(tmp_path / "in", "shot_00000-025", "f2k9b")
    text = save_text(tmp_path / "in", "shot_00000-025", "f2k9b", "of the image")
    save_text(tmp_path / "in", "shot", "f2k9b", "of another image")
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_samples(text, found["shot_00000-025"]["text"])
    assert "first_frame" not in found["shot_00000-025"]
    assert found["shot"].keys() == {"text", "caption"}
    assert_complete(all_tensors(tmp_path / "in"), found.values())


def test_recognition(tmp_path: Path) -> None:
    for i in range(9):
        save_image(tmp_path / "musubi", str(i), "f2k9b")
        save_text(tmp_path / "text", str(i), "wan")
        save_new(tmp_path / "kohya" / f"{i}_0512x0512_flux.safetensors", (512, 512), torch.randn(4, 8, 8))
        save_new_text(tmp_path / "kohya" / f"{i}_flux_256_m_te.safetensors", "hello")
        save_new_text(tmp_path / "kohya text" / f"{i}_flux_256_m_te.safetensors", "hello")
        save_latents(tmp_path / "npz" / f"{i}_0512x0512_flux.npz", (4, 8, 8))
        (tmp_path / "plain").mkdir(exist_ok=True)
        safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "plain" / f"{i}.safetensors")
        safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "plain" / f"x{i}_0512x0512_wan.safetensors")
        safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "plain" / f"x{i}_wan_te.safetensors")
    formats = {"musubi": "musubi", "text": "musubi", "npz": "kohya", "plain": "files"}
    formats |= {"kohya": "kohya-safetensors", "kohya text": "kohya-safetensors"}
    assert {name: format_of(tmp_path / name) for name in formats} == formats


def test_files_of_both_programs_in_one_folder(tmp_path: Path) -> None:
    """Each format names the files of the other one."""
    folder = tmp_path / "in"
    for i in range(3):
        save_image(folder, f"m{i}", "wan")
        save_text(folder, f"m{i}", "wan")
    save_new(folder / "k_0512x0512_flux.safetensors", (512, 512), torch.randn(4, 8, 8))
    save_new_text(folder / "k_flux_256_te.safetensors", "hello")
    with pytest.raises(ValueError, match=r"kohya-safetensors \(2 files\), musubi \(6 files\)"):
        tc.import_cache(folder, tmp_path / "stopped")
    with pytest.raises(tc.FormatError, match="k_0512x0512_flux.safetensors: is not a file of musubi-tuner"):
        tc.import_cache(folder, tmp_path / "stopped", format="musubi")
    for name, count, bad in (("musubi", 3, 2), ("kohya-safetensors", 1, 6)):
        found, report = imported(folder, tmp_path / name, format=name, on_error="skip")
        assert (len(found), len(report.skipped)) == (count, bad)
        assert report.fingerprint["architecture"] == {"musubi": "wan", "kohya-safetensors": "sdxl"}[name]


def test_wrong_contents(tmp_path: Path) -> None:
    latents = {"latents_1x8x8_float32": torch.ones(2)}
    for tensors, metadata, message in (
        ({"clip_bfloat16": torch.ones(2)}, {}, "has no tensor 'latents_"),
        ({**latents, "latents_1x16x16_float32": torch.ones(2)}, {}, "has latents of more than one resolution"),
        (latents, {"width": "1e3", "height": "2"}, "expected 2 integers"),
        (latents, {"frame_count": "1,2"}, "expected 1 integers"),
    ):
        save(tmp_path / "in" / "a_0512x0512_wan.safetensors", tensors, "wan", **metadata)
        save_image(tmp_path / "in", "b", "wan")
        assert_left_out(tmp_path / "in", "a_0512x0512_wan.safetensors", message, "b")


def save_audio(folder: Path, stem: str, length: int) -> dict[str, torch.Tensor]:
    """Write the sound of a video as forks for LTX-2 do; return its tensors by the names that they must get."""
    latents, lengths = torch.randn(8, length, 16).bfloat16(), torch.tensor(length - 1, dtype=I32)
    tensors = {f"audio_latents_{length}x16x8_bfloat16": latents, "audio_lengths_int32": lengths}
    save(folder / f"{stem}_ltx2_audio.safetensors", tensors, "ltx2_v1")
    return {"audio_latents": latents, "audio_lengths": lengths}


def test_sounds_of_videos(tmp_path: Path) -> None:
    """A sound belongs to the latents of the same part and size, and its name does not depend on its length."""
    folder, expected = tmp_path / "in", {}
    for i, stem in enumerate(["a", "b_audio", "c_00000-025", "c_00025-025"]):
        latents, name = random_tensor(BF16, (128, 2, 3, 4)), f"{stem}_0512x{512 + i:04d}"
        size = {"width": "512", "height": f"{512 + i}"}
        save(folder / f"{name}_ltx2.safetensors", {"latents_2x3x4_bfloat16": latents}, "ltx2_v1", **size)
        sound = save_audio(folder, name, 10 + i)
        expected[stem] = {"latents": latents, **sound, "original_size": (512, 512 + i)}
    expected["alone"] = save_audio(folder, "alone_0001x0001", 20)
    expected["unsized_x"] = save_audio(folder, "unsized_x", 30)
    for stem in ("a", "b_audio", "c", "alone", "unsized_x"):
        states = random_tensor(BF16, (4, 8))
        save(folder / f"{stem}_ltx2_te.safetensors", {"video_prompt_embeds_bfloat16": states}, "ltx2_v1", caption1=stem)
        text = {"video_prompt_embeds": states}
        for name in (name for name in expected if name.startswith(stem)):
            expected[name] |= {"text": text, "caption": stem}
    found, report = imported(folder, tmp_path / "out")
    assert (report.format, report.ok) == ("musubi", True)
    assert_samples(expected, found)
    assert report.fingerprint["keys"][:2] == ["audio_latents_FxHxW_dtype", "audio_lengths_dtype"]


def test_sounds_without_a_size(tmp_path: Path) -> None:
    """A fork for ACE-Step names files of latents without a size, and stores 0 as width and height."""
    folder, expected = tmp_path / "in", {}
    for i, stem in enumerate(["song", "my_song", "b_te"]):
        latents, mask, states = torch.randn(750 + i, 64).bfloat16(), torch.ones(750 + i), torch.randn(9, 8).bfloat16()
        tensors = {f"latents_{750 + i}x64_bfloat16": latents, "attention_mask": mask}
        save(folder / f"{stem}_as.safetensors", tensors, "acestep", width="0", height="0")
        texts = {"encoder_hidden_states_bfloat16": states, "encoder_attention_mask": torch.ones(9)}
        save(folder / f"{stem}_as_te.safetensors", texts, "acestep", caption1=stem)
        text = {"encoder_hidden_states": states, "encoder_attention_mask": torch.ones(9)}
        expected[stem] = {"latents": latents, "attention_mask": mask, "text": text, "caption": stem}
    found, report = imported(folder, tmp_path / "out")
    assert (report.format, report.ok) == ("musubi", True)
    assert_samples(expected, found)
