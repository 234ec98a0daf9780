"""Caches of ai-toolkit, written as its `save_file` calls write them, become samples bit for bit."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.importers.folders import assert_left_out, assert_samples, imported, save
from tests.same import assert_same

SOFTWARE = {"name": "ai-toolkit", "repo": "https://github.com/ostris/ai-toolkit", "version": "0.7.0"}


def hash_of(info: dict[str, Any]) -> str:
    digest = hashlib.md5(json.dumps(info, sort_keys=True).encode("utf-8")).digest()
    return base64.urlsafe_b64encode(digest).decode("ascii").replace("=", "")


def latent_info(filename: str, **more: Any) -> dict[str, Any]:
    info = OrderedDict(filename=filename, scale_to_width=512, scale_to_height=640, crop_x=0, crop_y=64)
    return {**info, "crop_width": 512, "crop_height": 512, "latent_space_version": "flux1", "latent_version": 1, **more}


def save_latent(image: Path, tensors: dict[str, torch.Tensor], **more: Any) -> dict[str, Any]:
    """Save the latents of an image, and return the info that the file's name is a hash of."""
    info = latent_info(image.name, **more)
    metadata = {**info, "software": SOFTWARE}
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    path = image.parent / "_latent_cache" / f"{image.stem}_{hash_of(info)}.safetensors"
    save(tensors, path, {**metadata, "format": "pt"})
    return info


def save_text(
    image: Path, tensors: dict[str, torch.Tensor], caption: str, metadata: Any = None, model: str = "flux"
) -> str:
    """Save the states of a caption that the trainer has normalized; return the hash in the file's name."""
    hashed = hash_of({"caption": caption, "text_embedding_space_version": model, "text_embedding_version": 1})
    save(tensors, image.parent / "_t_e_cache" / f"{image.stem}_{hashed}.safetensors", metadata)
    return hashed


def text_of(length: int = 5) -> dict[str, torch.Tensor]:
    return {"text_embed": torch.randn(1, length, 8).bfloat16(), "pooled_embed": torch.randn(1, 6).bfloat16()}


def test_latents_texts_and_captions(tmp_path: Path) -> None:
    """One file for each flip; the image `a_b` has an underscore in its name."""
    folder, expected = tmp_path / "in", {}
    for name in ("a", "a_b", "set 2/c"):
        image = folder / f"{name}.jpg"
        text = text_of()
        save_text(image, text, f"a photo of {name}")
        image.with_suffix(".txt").write_text(f"a photo of {name}\n")
        image.write_bytes(b"jpeg")
        for flips in ({}, {"flip_x": True}, {"flip_x": True, "flip_y": True}):
            latent = torch.randn(16, 8, 8).bfloat16()
            info = dict(sorted(save_latent(image, {"latent": latent}, **flips).items()))
            sample = {"latent": latent, "info": info, "text": text, "caption": f"a photo of {name}"}
            expected[f"{name}{''.join(f'_{flip}' for flip in flips)}"] = sample
    found, report = imported(folder, tmp_path / "out")
    assert (report.format, report.ok) == ("ai-toolkit", True)
    assert report.fingerprint["latent_space_version"] == "flux1"
    assert_samples(expected, found)
    assert sorted(report.unused) == ["a.jpg", "a_b.jpg", "set 2/c.jpg"]


def test_numbered_tensors_become_lists(tmp_path: Path) -> None:
    """`text_embed_10` comes after `text_embed_2`, unlike in the trainer's own loader; a list of one stays a list."""
    embeds = [torch.full((1, 3, 4), float(number)) for number in range(12)]
    masks = [torch.ones(1, number + 1, dtype=torch.int64) for number in range(11)]
    many = {f"text_embed_{number}": tensor for number, tensor in enumerate(embeds)}
    many |= {f"attention_mask_{number}": tensor for number, tensor in enumerate(masks)}
    save_text(tmp_path / "in" / "a.jpg", many, "")
    save_text(tmp_path / "in" / "b.jpg", {"text_embed_0": embeds[7], "attention_mask": masks[2]}, "")
    newer = {"text_embed_3": torch.randn(4, 8), "tags": torch.arange(4)}
    metadata = {"class_name": "AdvancedPromptEmbeds", "frozen_dtype_keys": "tags,more"}
    save_text(tmp_path / "in" / "newer.jpg", newer, "", metadata)
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    text = found["a"]["text"]
    assert text.keys() == {"text_embed", "attention_mask"}
    assert_same(embeds, text["text_embed"])
    assert_same(masks, text["attention_mask"])
    assert_same([embeds[7]], found["b"]["text"]["text_embed"])
    assert_same(masks[2], found["b"]["text"]["attention_mask"])
    assert_samples({"newer": {"text": newer, "text_info": metadata}}, {"newer": found["newer"]})


def test_numbered_files_of_one_text(tmp_path: Path) -> None:
    texts = {HASH: text_of(2), f"{HASH}_1": text_of(3)}
    for end, text in texts.items():
        save(text, tmp_path / "in" / "_t_e_cache" / f"a_{end}.safetensors", None)
    samples, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_samples({"a": {"other_texts": texts}}, samples)


def test_files_of_other_settings_stay_apart(tmp_path: Path) -> None:
    """Old crops remain when the settings change: all of them are imported, under the names of the files."""
    image = tmp_path / "in" / "a.jpg"
    infos = [save_latent(image, {"latent": torch.randn(16, 8, 8)}, crop_x=crop) for crop in (0, 8)]
    other = save_latent(image, {"latent": torch.randn(16, 8, 8)}, flip_x=True)
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert {name: sample["info"] for name, sample in found.items()} == {
        "a_flip_x": other,
        **{f"_latent_cache/a_{hash_of(info)}": info for info in infos},
    }
    assert report.ok


@pytest.mark.parametrize("model", ["flux1", "flux"])
def test_the_text_of_the_caption_among_several(tmp_path: Path, model: str) -> None:
    """The trainer splits captions at commas and joins them with ", ", and also caches the empty caption."""
    image = tmp_path / "in" / "a.jpg"
    save_latent(image, {"latent": torch.randn(16, 8, 8)})
    blank, current, old = text_of(2), text_of(3), text_of(4)
    hashes = [save_text(image, blank, "", model=model), save_text(image, old, "a dog", model=model)]
    save_text(image, current, "a cat,  a mat \n", model=model)
    image.with_suffix(".txt").write_bytes(b"a cat, a mat[trigger] \r\n")
    save_text(tmp_path / "in" / "b.jpg", blank, "", model=model)
    save_text(tmp_path / "in" / "b.jpg", old, "a dog", model=model)
    (tmp_path / "in" / "b.txt").write_text("neither")
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert found["a"]["caption"] == "a cat, a mat[trigger]"
    assert_same(current["text_embed"], found["a"]["text"]["text_embed"])
    for name in "ab":
        assert found[name]["other_texts"].keys() == set(hashes)
        for hashed, text in zip(hashes, (blank, old), strict=True):
            assert_same(text["text_embed"], found[name]["other_texts"][hashed]["text_embed"])
    assert "text" not in found["b"]


def test_clip_vision(tmp_path: Path) -> None:
    tensors = {"image_embeds": torch.randn(1, 8), "last_hidden_state": torch.randn(1, 5, 8)}
    names = [f"in/_clip_vision_cache/{name}.safetensors" for name in (f"a_{'x' * 22}", f"uncond_{'y-_Z' * 5}ab_3")]
    for name in names:
        save(tensors, tmp_path / name)
    save_latent(tmp_path / "in" / "a.jpg", {"latent": torch.randn(4, 8, 8)})
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert report.ok
    visions = [name.removeprefix("in/").removesuffix(".safetensors") for name in names]
    assert set(found) == {"a", *visions}
    assert_same(tensors["image_embeds"], found[visions[0]]["clip_vision"]["image_embeds"])


HASH = "A" * 22


def test_bad_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    save_latent(folder / "good.jpg", {"latent": torch.randn(16, 8, 8)})
    for name, tensors, message in (
        (f"_latent_cache/a_{HASH}", ["latents"], "expected a tensor 'latent'"),
        (f"_latent_cache/a_{HASH}", ["latent", "info"], "expected a tensor 'latent'"),
        (f"_t_e_cache/a_{HASH}", ["text_embed_0", "text_embed_2"], "complete"),
        (f"_t_e_cache/a_{HASH}", ["text_embed_0", "text_embed"], "complete"),
        ("_latent_cache/a", ["latent"], "is not named"),
    ):
        save({tensor: torch.ones(2) for tensor in tensors}, folder / f"{name}.safetensors")
        assert_left_out(folder, f"{name}.safetensors", message, ["good"])
        (folder / f"{name}.safetensors").unlink()


def test_tensors_and_metadata_of_any_kind(tmp_path: Path) -> None:
    """Videos, pixels and sound; texts that look like other values, or nest too deeply, stay texts."""
    tensors = {
        "latent": torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8),
        "audio_latent": torch.randn(8, 20).half(),
        "num_frames": torch.tensor(41, dtype=torch.int32),
        "waveform": torch.randint(-9, 9, (2, 100), dtype=torch.int16),
    }
    info = save_latent(tmp_path / "in" / "clip.mp4", tensors, num_frames=41, fps=16.0, do_i2v=True)
    more = {
        "filename": "12",
        "fps": "1e5",
        "a": "[" * 90_000,
        "b": "[" * 5000 + "]" * 5000,
        "class_name": "null",
        "c": "",
    }
    save({"latent": torch.ones(2)}, tmp_path / "in" / "_latent_cache" / f"12_{HASH}.safetensors", more)
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_samples({"clip": {**tensors, "info": info}, "12": {"latent": torch.ones(2), "info": more}}, found)
