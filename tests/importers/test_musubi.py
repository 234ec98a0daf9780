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
from tests.same import assert_same

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
I64, I32 = torch.int64, torch.int32
NAMES = {"f2d": "flux_2_dev", "qi": "qwen_image", "hv": "hunyuan_video", "fp": "framepack", "ho1": "hidream_o1_image"}

# The keys of the files, with dtypes and shapes, and the names that they must get: those in the batches of musubi-tuner.
LATENTS: dict[str, list[tuple[str, str, torch.dtype, tuple[int, ...]]]] = {
    "hv": [("latents_5x8x6_bfloat16", "latents", BF16, (16, 5, 8, 6))],
    "wan": [
        ("latents_5x8x6_bfloat16", "latents", BF16, (16, 5, 8, 6)),
        ("clip_bfloat16", "clip", FP16, (7, 8)),  # has the dtype of the latents in its key
        ("latents_image_5x8x6_bfloat16", "latents_image", BF16, (20, 5, 8, 6)),
        ("latents_control_5x8x6_bfloat16", "latents_control", BF16, (16, 5, 8, 6)),
        ("f_indices_int32", "f_indices", I32, (3,)),
    ],
    "fp": [
        ("latents_9x8x6_float32", "latents", FP32, (16, 9, 8, 6)),
        ("image_embeddings_float32", "image_embeddings", FP32, (9, 8)),
        ("latent_indices_int64", "latent_indices", I64, (9,)),
        ("clean_latent_indices_int64", "clean_latent_indices", I64, (2,)),
        ("latents_clean_9x8x6_float32", "latents_clean", FP32, (16, 2, 8, 6)),
        ("clean_latent_2x_indices_int64", "clean_latent_2x_indices", I64, (2,)),
        ("latents_clean_2x_9x8x6_float32", "latents_clean_2x", FP32, (16, 2, 8, 6)),
        ("clean_latent_4x_indices_int64", "clean_latent_4x_indices", I64, (16,)),
        ("latents_clean_4x_9x8x6_float32", "latents_clean_4x", FP32, (16, 16, 8, 6)),
    ],
    "fk": [
        ("latents_1x8x6_bfloat16", "latents", BF16, (16, 8, 6)),
        ("latents_control_1x4x4_bfloat16", "latents_control", BF16, (16, 4, 4)),
    ],
    "f2k9b": [
        ("latents_8x6_bfloat16", "latents", BF16, (128, 8, 6)),
        ("latents_control_0_4x4_bfloat16", "latents_control_0", BF16, (128, 4, 4)),
        ("latents_control_1_2x6_bfloat16", "latents_control_1", BF16, (128, 2, 6)),
    ],
    "qil": [
        ("latents_3x8x6_bfloat16", "latents", BF16, (16, 3, 8, 6)),
        ("latents_control_0_1x8x6_bfloat16", "latents_control_0", BF16, (16, 1, 8, 6)),
    ],
    "k5": [
        ("latents_5x8x6_float16", "latents", FP16, (16, 5, 8, 6)),
        ("latents_image_5x8x6_float16", "latents_image", FP16, (16, 5, 8, 6)),
        ("vae_scaling_factor", "vae_scaling_factor", FP32, ()),
    ],
    "hv15": [
        ("latents_5x8x6_float16", "latents", FP16, (32, 5, 8, 6)),
        ("latents_image_1x8x6_float32", "latents_image", FP32, (32, 1, 8, 6)),
        ("siglip_float16", "siglip", FP16, (7, 8)),
    ],
    "zi": [("latents_1x8x6_float8_e4m3fn", "latents", FP8, (16, 8, 6))],
    "ho1": [
        ("latents_1x8x6_bfloat16", "latents", BF16, (8, 6, 48)),
        ("latents_control_0_2x6_bfloat16", "latents_control_0", BF16, (2, 6, 48)),
    ],
    "i4": [("latents_1x8x6_bfloat16", "latents", BF16, (128, 8, 6))],
    "kr2": [("latents_1x8x6_bfloat16", "latents", BF16, (16, 1, 8, 6))],
}
TEXTS: dict[str, list[tuple[str, str, torch.dtype, tuple[int, ...]]]] = {
    "hv": [
        ("llm_float16", "llm", FP16, (256, 8)),
        ("llm_mask", "llm_mask", torch.bool, (256,)),
        ("clipL_float16", "clipL", FP16, (8,)),
    ],
    "wan": [("varlen_t5_bfloat16", "t5", BF16, (11, 8))],
    "fp": [
        ("llama_vec_bfloat16", "llama_vec", BF16, (9, 8)),
        ("llama_attention_mask", "llama_attention_mask", I64, (9,)),
        ("clip_l_pooler_float32", "clip_l_pooler", FP32, (8,)),
    ],
    "fk": [("t5_vec_float8_e4m3fn", "t5_vec", FP8, (9, 8)), ("clip_l_pooler_bfloat16", "clip_l_pooler", BF16, (8,))],
    "f2k9b": [("ctx_vec_bfloat16", "ctx_vec", BF16, (9, 24))],
    "qil": [("varlen_vl_embed_bfloat16", "vl_embed", BF16, (13, 8))],
    "k5": [
        ("text_embeds_bfloat16", "text_embeds", BF16, (9, 8)),
        ("pooled_embed_bfloat16", "pooled_embed", BF16, (8,)),
        ("attention_mask", "attention_mask", torch.bool, (9,)),
    ],
    "hv15": [
        ("varlen_vl_embed_float16", "vl_embed", FP16, (9, 8)),
        ("varlen_byt5_embed_float16", "byt5_embed", FP16, (0, 8)),
    ],
    "zi": [("varlen_llm_embed_bfloat16", "llm_embed", BF16, (9, 8))],
    "ho1": [
        ("varlen_input_ids_int64", "input_ids", I64, (9,)),
        ("varlen_input_embeds_bfloat16", "input_embeds", BF16, (9, 8)),
        ("varlen_position_ids_int64", "position_ids", I64, (3, 9)),
        ("varlen_token_types_int64", "token_types", I64, (9,)),
        ("varlen_pixel_values_bfloat16", "pixel_values", BF16, (4, 8)),
        ("varlen_image_grid_thw_int64", "image_grid_thw", I64, (1, 3)),
    ],
    "i4": [("varlen_i4_llm_features_bfloat16", "i4_llm_features", BF16, (9, 8))],
    "kr2": [("varlen_krea2_vl_embed_bfloat16", "krea2_vl_embed", BF16, (9, 3, 8))],
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
    assert found.keys() == expected.keys()
    assert_samples(expected, found)
    assert_complete(all_tensors(folder), found.values())
    assert report.ok
    common = {"architecture": NAMES.get(arch, arch), "format_version": "1.0.1"}
    assert report.fingerprint["format"] == "musubi"
    assert report.fingerprint["architecture"] == NAMES.get(arch, arch)
    assert report.fingerprint["metadata"] == {"latents": common, "text": common}


def test_batches_of_variable_length(tmp_path: Path) -> None:
    for i in range(4):
        save_image(tmp_path / "in", str(i), "wan")
        text = {"varlen_t5_bfloat16": torch.randn(3 + i, 8).bfloat16()}
        save(tmp_path / "in" / f"{i}_wan_te.safetensors", text, "wan", caption1=str(i))
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert {sample["text"]["t5"].shape[0] for sample in found.values()} == {3, 4, 5, 6}
    loader = tc.Loader(tc.open(tmp_path / "out"), 4, bucket_by="latents", collate={"text.t5": "pad"})
    (batch,) = loader
    assert batch["latents"].shape == (4, 16, 5, 8, 6)
    assert batch["text"]["t5"].shape == (4, 6, 8)
    assert report.fingerprint["keys"] == [
        "clip_dtype",
        "f_indices_dtype",
        "latents_FxHxW_dtype",
        "latents_control_FxHxW_dtype",
        "latents_image_FxHxW_dtype",
        "varlen_t5_dtype",
    ]


def test_parts_of_videos_share_a_text(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    parts = ["clip_00000-025", "clip_00025-025", "clip_100000-1025", "clip_00000-025-0003"]
    for part in parts:
        save_image(folder, part, "fp", (1280, 720), frame_count=part.split("-")[1])
    text = save_text(folder, "clip", "fp", "a walk")
    found, _ = imported(folder, tmp_path / "out")
    assert found.keys() == set(parts)
    for sample in found.values():
        assert_samples(text, sample["text"])
        assert sample["caption"] == "a walk"
    facts = [(found[part]["first_frame"], found[part]["frame_count"], found[part].get("section")) for part in parts]
    assert facts == [(0, 25, None), (25, 25, None), (100_000, 1025, None), (0, 25, 3)]
    assert_complete(all_tensors(folder), found.values(), copies=True)


def test_an_image_named_like_a_part_of_a_video(tmp_path: Path) -> None:
    save_image(tmp_path / "in", "shot_00000-025", "qil")
    mine = save_text(tmp_path / "in", "shot_00000-025", "qil", "of the image")
    save_text(tmp_path / "in", "shot", "qil", "of another image")
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_samples(mine, found["shot_00000-025"]["text"])
    assert "first_frame" not in found["shot_00000-025"]
    assert found["shot"].keys() == {"text", "caption"}
    assert_complete(all_tensors(tmp_path / "in"), found.values())


def test_a_tensor_in_several_dtypes(tmp_path: Path) -> None:
    """Older versions kept the copy of another precision when a text was cached again."""
    folder = tmp_path / "in"
    save_image(folder, "a", "fk")
    texts = {
        f"t5_vec_{name}": torch.randn(4, 8).to(dtype) for name, dtype in [("float8_e4m3fn", FP8), ("bfloat16", BF16)]
    }
    save(folder / "a_fk_te.safetensors", texts, "fk", caption1="x")
    found, _ = imported(folder, tmp_path / "out")
    assert_same(texts["t5_vec_bfloat16"], found["a"]["text"]["t5_vec"])
    assert_same(texts["t5_vec_float8_e4m3fn"], found["a"]["text"]["t5_vec_float8_e4m3fn"])
    assert_complete(all_tensors(folder), found.values())


def test_metadata(tmp_path: Path) -> None:
    """Entries that all files share are provenance; the other ones are in the samples."""
    folder = tmp_path / "in"
    for i in range(3):
        save_image(folder, str(i), "wan", vae_fingerprint="abc", media_fingerprints=f"stat:{i}:1")
        save_text(folder, str(i), "wan", task="t2v")
    found, report = imported(folder, tmp_path / "out")
    common = {"architecture": "wan", "format_version": "1.0.1"}
    assert report.fingerprint["metadata"] == {
        "latents": common | {"vae_fingerprint": "abc"},
        "text": common | {"task": "t2v"},
    }
    assert [found[str(i)]["metadata"] for i in range(3)] == [
        {"latents": {"media_fingerprints": f"stat:{i}:1"}} for i in range(3)
    ]
    assert all(sample["original_size"] == (512, 768) for sample in found.values())  # also if it is common


def test_recognition(tmp_path: Path) -> None:
    for i in range(20):
        save_image(tmp_path / "musubi", str(i), "qil")
        save_text(tmp_path / "text", str(i), "wan")
        save_new(tmp_path / "kohya" / f"{i}_0512x0512_flux.safetensors", (512, 512), torch.randn(4, 8, 8))
        save_new_text(tmp_path / "kohya" / f"{i}_flux_256_m_te.safetensors", "hello")
        save_new_text(tmp_path / "kohya text" / f"{i}_flux_256_m_te.safetensors", "hello")
        save_latents(tmp_path / "npz" / f"{i}_0512x0512_flux.npz", (4, 8, 8))
        (tmp_path / "plain").mkdir(exist_ok=True)
        safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "plain" / f"{i}.safetensors")
        safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "plain" / f"x{i}_0512x0512_wan.safetensors")
        safetensors.torch.save_file({"x": torch.ones(2)}, tmp_path / "plain" / f"x{i}_wan_te.safetensors")
    assert format_of(tmp_path / "musubi") == "musubi"
    assert format_of(tmp_path / "text") == "musubi"
    assert format_of(tmp_path / "kohya") == "kohya-safetensors"
    assert format_of(tmp_path / "kohya text") == "kohya-safetensors"
    assert format_of(tmp_path / "npz") == "kohya"
    assert format_of(tmp_path / "plain") == "files"


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


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"clip_bfloat16": torch.ones(2)}, {}, "has no tensor 'latents_"),
        (
            {f"latents_1x{i}x{i}_float32": torch.ones(2) for i in (8, 16)},
            {},
            "has latents of more than one resolution",
        ),
        ({"latents_1x8x8_float32": torch.ones(2)}, {"width": "1e3", "height": "2"}, "expected 2 integers"),
        ({"latents_1x8x8_float32": torch.ones(2)}, {"frame_count": "1,2"}, "expected 1 integers"),
    ],
)
def test_wrong_contents(
    tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], message: str
) -> None:
    save(tmp_path / "in" / "a_0512x0512_wan.safetensors", tensors, "wan", **metadata)
    save_image(tmp_path / "in", "b", "wan")
    assert_left_out(tmp_path / "in", "a_0512x0512_wan.safetensors", message, "b")


def save_audio(folder: Path, stem: str, length: int, arch: str = "ltx2") -> dict[str, torch.Tensor]:
    """Write the sound of a video as forks for LTX-2 do; return its tensors by the names that they must get."""
    latents, lengths = torch.randn(8, length, 16).bfloat16(), torch.tensor(length - 1, dtype=I32)
    tensors = {f"audio_latents_{length}x16x8_bfloat16": latents, "audio_lengths_int32": lengths}
    save(folder / f"{stem}_{arch}_audio.safetensors", tensors, "ltx2_v1")
    return {"audio_latents": latents, "audio_lengths": lengths}


def test_sounds_of_videos(tmp_path: Path) -> None:
    """A sound belongs to the latents of the same part and size, and its name does not depend on its length."""
    folder, expected = tmp_path / "in", {}
    for i, stem in enumerate(["a", "b_audio", "c_00000-025", "c_00025-025"]):
        latents = random_tensor(BF16, (128, 2, 3, 4))
        size = (512, 512 + i)
        name = f"{stem}_0512x{512 + i:04d}"
        save(
            folder / f"{name}_ltx2.safetensors",
            {"latents_2x3x4_bfloat16": latents},
            "ltx2_v1",
            width="512",
            height=f"{512 + i}",
        )
        expected[stem] = {"latents": latents, **save_audio(folder, name, 10 + i), "original_size": size}
    expected["alone"] = save_audio(folder, "alone_0001x0001", 20)
    expected["unsized_x"] = save_audio(folder, "unsized_x", 30)
    for stem in ("a", "b_audio", "c", "alone", "unsized_x"):
        states = {"video_prompt_embeds_bfloat16": random_tensor(BF16, (4, 8)), "prompt_attention_mask": torch.ones(4)}
        save(folder / f"{stem}_ltx2_te.safetensors", states, "ltx2_v1", caption1=stem)
        text = {"video_prompt_embeds": states["video_prompt_embeds_bfloat16"], "prompt_attention_mask": torch.ones(4)}
        for name in (name for name in expected if name.startswith(stem)):
            expected[name] |= {"text": text, "caption": stem}
    for sample in expected.values():
        sample.setdefault("original_size", None)
    found, report = imported(folder, tmp_path / "out")
    assert (report.format, report.ok) == ("musubi", True)
    assert_samples(expected, {name: {"original_size": None, **sample} for name, sample in found.items()})
    assert report.fingerprint["keys"][:2] == ["audio_latents_FxHxW_dtype", "audio_lengths_dtype"]


def test_sounds_without_a_size(tmp_path: Path) -> None:
    """A fork for ACE-Step names files of latents without a size, and stores 0 as width and height."""
    folder, expected = tmp_path / "in", {}
    for i, stem in enumerate(["song", "my_song", "b_te"]):
        latents, context = torch.randn(750 + i, 64).bfloat16(), torch.randn(750 + i, 128).bfloat16()
        mask, states = torch.ones(750 + i), torch.randn(9, 8).bfloat16()
        tensors = {
            f"latents_{750 + i}x64_bfloat16": latents,
            "attention_mask": mask,
            f"latents_context_{750 + i}x128_bfloat16": context,
        }
        save(folder / f"{stem}_as.safetensors", tensors, "acestep", width="0", height="0")
        texts = {"encoder_hidden_states_bfloat16": states, "encoder_attention_mask": torch.ones(9)}
        save(folder / f"{stem}_as_te.safetensors", texts, "acestep", caption1=stem)
        text = {"encoder_hidden_states": states, "encoder_attention_mask": torch.ones(9)}
        expected[stem] = {"latents": latents, "latents_context": context, "attention_mask": mask}
        expected[stem] |= {"text": text, "caption": stem}
    found, report = imported(folder, tmp_path / "out")
    assert (report.format, report.ok) == ("musubi", True)
    assert_samples(expected, found)
