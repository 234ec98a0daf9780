"""Caches of SimpleTuner, written as its caching and data backends write them."""

from __future__ import annotations

import gzip
import json
import os
from hashlib import md5, sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.importers.folders import assert_samples, imported, save
from tests.same import assert_same


def vae_name(image: str) -> str:
    return sha256(os.path.splitext(os.path.basename(image))[0].encode()).hexdigest() + ".pt"


def text_name(key: str, model: str = "flux", prompt: str | None = None) -> str:
    return md5(key.encode() + (b"" if prompt is None else b"\0prompt\0" + prompt.encode())).hexdigest() + f"-{model}.pt"


def text_embeds(seed: int = 0) -> dict[str, Any]:
    return {
        "prompt_embeds": torch.randn(1, 5 + seed, 64).bfloat16(),
        "pooled_prompt_embeds": torch.randn(1, 32).bfloat16(),
        "time_ids": torch.zeros(5, 3),
        "attention_masks": torch.ones(1, 5, dtype=torch.int64),
    }


def metadata(i: int) -> dict[str, Any]:
    return {
        "original_size": [640 + i, 480],
        "crop_coordinates": [0, i],
        "target_size": [512, 512],
        "intermediary_size": [683, 512],
        "aspect_ratio": 1.0,
        "luminance": 100.5,
    }


def write_backend(folder: Path, name: str, images: dict[str, dict[str, Any]], **config: Any) -> None:
    """Write the JSON files of a data backend into the folder of its images."""
    folder.mkdir(parents=True, exist_ok=True)
    indices = {"config": config, "aspect_ratio_bucket_indices": {"1.0": list(images)}}
    (folder / f"aspect_ratio_bucket_indices_{name}.json").write_text(json.dumps(indices))
    (folder / f"aspect_ratio_bucket_metadata_{name}.json").write_text(json.dumps(images))


def test_texts_alone(tmp_path: Path) -> None:
    name = text_name("caption")
    embeds = save(text_embeds(), tmp_path / "text" / name)
    found, report = imported(tmp_path / "text", tmp_path / "texts")
    assert (report.ok, report.fingerprint["models"]) == (True, ["flux"])
    assert_same({name[:-3]: {"text": [embeds]}}, found)


def test_images_captions_and_both_caches(tmp_path: Path) -> None:
    """A caption file of two lines gives two captions; the empty caption belongs to no image."""
    root = tmp_path / "in"
    expected: dict[str, Any] = {}
    images: dict[str, dict[str, Any]] = {}
    for i, stem in enumerate(["a", "sub/b", "sub/c d", "ä"]):
        path = f"/moved/photos/{stem}.png"
        images[path] = metadata(i)
        captions = [f"a photo, {i}", f"line two of {stem} "][: 1 + i % 2]
        caption_file = root / "photos" / f"{stem}.txt"
        caption_file.parent.mkdir(parents=True, exist_ok=True)
        caption_file.write_text("\n".join(captions))
        place = root / "cache/vae/set" / os.path.dirname(stem) / vae_name(path)
        latents = save(torch.randn(16, 8, 8 + i).half(), place)
        place.write_bytes(gzip.compress(place.read_bytes()))  # as with compress_cache
        texts = [save(text_embeds(i), root / "cache/text" / text_name(caption)) for caption in captions]
        expected[f"cache/vae/set/{stem}"] = {
            "latents": latents,
            "image_path": path,
            "image_metadata": images[path],
            "caption": captions,
            "text": texts,
        }
    empty = save(text_embeds(), root / "cache/text" / text_name(""))
    write_backend(root / "photos", "set", images, resolution=512, crop=True)
    (root / "photos" / "more.txt").write_text("of no image")
    found, report = imported(root, tmp_path / "out")
    assert report.ok
    assert report.unused == ["photos/more.txt"]
    assert_same({"text": [empty]}, found.pop(f"cache/text/{text_name('')[:-3]}"))
    assert_samples(expected, found)
    assert report.fingerprint["data_backends"] == {"set": {"resolution": 512, "crop": True}}


def test_captions_in_settings_names_and_hashes_of_paths(tmp_path: Path) -> None:
    root = tmp_path / "in"
    keys = {
        "a_red_cat": text_name("a red cat"),
        "b": text_name("sks dog"),
        "c": text_name("/data/c.png"),
        "d": text_name("set:/data/d.png", prompt="sks dog"),
        "e": text_name("sks dog e"),
        "f": text_name("set:f.png"),  # relative to the folder of the backend
        "g": text_name("data/g.png", prompt="sks dog"),
    }
    captions = ["a red cat", "sks dog", None, "sks dog", "sks dog e", None, "sks dog"]
    for i, name in enumerate(keys.values()):
        save(text_embeds(i), root / "text" / name)
    images = {f"/data/{stem}.png": metadata(i) for i, stem in enumerate(keys)}
    for path in images:
        save(torch.randn(4, 8, 8), root / "vae" / vae_name(path))
    write_backend(root, "set", images, instance_prompt="sks dog")
    found, report = imported(root, tmp_path / "out")
    assert report.ok
    assert found.keys() == {f"vae/{stem}" for stem in keys}
    for stem, caption in zip(keys, captions, strict=True):
        assert caption in found[f"vae/{stem}"]["caption"]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (None, {"a_cat": ["a dog"], "b": ["a cat"]}),
        ("textfile", {"a_cat": ["a dog"], "b": ["a cat"]}),
        ("filename", {"a_cat": ["a cat"], "b": None}),
        ("csv", {"a_cat": None, "b": None}),
    ],
)
def test_a_file_name_that_is_the_caption_of_another_image(
    tmp_path: Path, strategy: str | None, expected: dict[str, list[str] | None]
) -> None:
    root = tmp_path / "in"
    for i, (stem, caption) in enumerate([("a_cat", "a dog"), ("b", "a cat")]):
        save(torch.randn(4, 8, 8), root / "vae" / vae_name(stem))
        save(text_embeds(i), root / "text" / text_name(caption))
        (root / f"{stem}.txt").write_text(caption)
    write_backend(root, "set", {f"/data/{stem}.png": metadata(0) for stem in expected}, caption_strategy=strategy)
    samples, report = imported(root, tmp_path / "out")
    assert report.ok
    assert {stem: samples[f"vae/{stem}"].get("caption") for stem in expected} == expected


@pytest.mark.parametrize(("caption", "expected"), [(None, [""]), ("", [""]), ("\n", [""]), ("a cat", [None])])
def test_empty_captions_by_path(tmp_path: Path, caption: str | None, expected: list[str | None]) -> None:
    """Models that hash the path add the caption to it, unless it is empty; older versions never added it."""
    root, states = tmp_path / "in", text_embeds(0)
    save(states, root / "text" / text_name("set:/data/a.png"))
    save(torch.randn(4, 8, 8), root / "vae" / vae_name("/data/a.png"))
    write_backend(root, "set", {"/data/a.png": metadata(0)})
    if caption is not None:
        (root / "a.txt").write_text(caption)
    found, report = imported(root, tmp_path / "out")
    assert report.ok
    assert found["vae/a"]["caption"] == expected
    assert_same([states], found["vae/a"]["text"])


@pytest.mark.parametrize("hashed", [True, False])
def test_paths_of_windows_and_names_without_hashes(tmp_path: Path, hashed: bool) -> None:
    """`hash_filenames` is an option of older versions."""
    root = tmp_path / "in"
    write_backend(root, "set", {"C:\\photos\\a.v2.png": metadata(0)})
    latents = save(torch.randn(4, 8, 8), root / "vae" / (vae_name("a.v2.png") if hashed else "a.v2.pt"))
    found, report = imported(root, tmp_path / "out", format="simpletuner")
    assert report.ok
    assert found.keys() == {"vae/a.v2"}
    assert found["vae/a.v2"]["image_path"] == "C:\\photos\\a.v2.png"
    assert_same(latents, found["vae/a.v2"]["latents"])


def test_resolutions_and_equal_file_names(tmp_path: Path) -> None:
    """Two backends cache the same images, some of which have the same name in different folders."""
    root = tmp_path / "in"
    expected = {}
    for number, size in enumerate((512, 1024)):
        images = {}
        for i, stem in enumerate(["x/1", "y/1", "1", "z/x/1", "2"]):
            path = f"/data/{stem}.jpg"
            images[path] = {**metadata(i), "target_size": [size, size]}
            latents = save(
                torch.randn(4, 2 + number, 2), root / f"vae/set-{size}" / os.path.dirname(stem) / vae_name(path)
            )
            sample = {"latents": latents, "image_path": path, "image_metadata": images[path]}
            expected[f"vae/set-{size}/{stem}"] = sample
        write_backend(root / "json", f"id{size}", images, cache_dir_vae=f"/old/cache/vae/set-{size}")
    found, report = imported(root, tmp_path / "out")
    assert report.ok
    assert_samples(expected, found)


def test_metadata_that_may_be_of_another_image_is_left_out(tmp_path: Path) -> None:
    """One cached file stands for two images whose names differ only in their suffix."""
    latents = save(torch.randn(4, 2, 2), tmp_path / "in" / "vae" / vae_name("a.png"))
    write_backend(tmp_path / "in", "set", {"/data/a.png": metadata(0), "/data/a.jpg": metadata(1)})
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_same({"vae/a": {"latents": latents}}, found)


def test_audio_video_and_image_embeds(tmp_path: Path) -> None:
    """Without the JSON files, the names are hashes."""
    audio = {"latents": torch.randn(8, 16, 20), "latent_lengths": torch.tensor(20), "lyrics": ["la", None]}
    video = torch.randn(16, 3, 4, 4).bfloat16()
    embeds = torch.randn(1, 257, 32)
    save(audio, tmp_path / "in" / "vae" / vae_name("song.wav"))
    save(video, tmp_path / "in" / "vae" / vae_name("clip.mp4"))
    save(embeds, tmp_path / "in" / "conditioning_image_embeds" / vae_name("clip.mp4"))
    save({**audio, "extra": 1}, tmp_path / "in" / "vae" / "unhashed.pt")
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert (report.format, len(found), report.ok) == ("simpletuner", 4, True)
    song, clip = vae_name("song.wav")[:-3], vae_name("clip.mp4")[:-3]
    assert_same(audio, found[f"vae/{song}"])
    assert_same({"latents": video}, found[f"vae/{clip}"])
    assert_same({"image_embeds": embeds}, found[f"conditioning_image_embeds/{clip}"])
    assert found["vae/unhashed"]["extra"] == 1


def test_text_of_several_models_is_not_joined(tmp_path: Path) -> None:
    root = tmp_path / "in"
    save(torch.randn(4, 2, 2), root / "vae" / vae_name("a.png"))
    save(text_embeds(), root / "text" / text_name("a", "flux"))
    save(text_embeds(), root / "text" / text_name("a", "sdxl"))
    write_backend(root, "set", {"/data/a.png": metadata(0)})
    found, report = imported(root, tmp_path / "out")
    assert report.ok
    assert len(found) == 3
    assert "text" not in found["vae/a"]
    assert report.fingerprint["models"] == ["flux", "sdxl"]


def test_an_image_of_equal_name_in_a_subfolder_has_its_own_text(tmp_path: Path) -> None:
    """A model hashes the path in the folder of the backend; the last image has its name as caption, and no `.txt` file."""
    root = tmp_path / "in"
    captions = {"a": "make it red", "sub/a": "make it red", "b": "a dog", "sub/b": "b"}
    expected = {}
    for i, (stem, caption) in enumerate(captions.items()):
        save(torch.randn(4, 2, 2), root / "vae" / os.path.dirname(stem) / vae_name(stem))
        name = text_name(f"set:{stem}.png", prompt=caption) if caption == "make it red" else text_name(caption)
        expected[f"vae/{stem}"] = [save(text_embeds(i), root / "text" / name)]
        (root / stem).parent.mkdir(exist_ok=True)
        if stem != "sub/b":
            (root / f"{stem}.txt").write_text(caption)
    write_backend(root, "set", {f"/data/{stem}.png": metadata(0) for stem in captions}, cache_dir_vae="vae")
    samples, report = imported(root, tmp_path / "out")
    assert report.ok
    assert_same(expected, {name: samples[name]["text"] for name in expected})
    assert {name: sample["caption"] for name, sample in samples.items()} == {
        f"vae/{stem}": [caption] for stem, caption in captions.items()
    }


def test_changed_captions_are_reported(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for stem in "abc":
        save(torch.randn(4, 2, 2), root / "vae" / vae_name(stem))
    save(text_embeds(), root / "text" / text_name("a cat"))
    save(text_embeds(), root / "text" / text_name("old"))
    (root / "a.txt").write_text("a cat")
    (root / "b.txt").write_text("changed")
    write_backend(root, "set", {f"/data/{stem}.png": metadata(0) for stem in "abc"})
    with pytest.raises(tc.FormatError, match=r"vae/b: .*no text embeddings of the caption"):
        tc.import_cache(root, tmp_path / "stopped")
    save([1], root / "vae" / vae_name("d"))
    found, report = imported(root, tmp_path / "out", on_error="skip")
    assert found.keys() == {"vae/a", "vae/c", f"text/{text_name('old')[:-3]}"}
    assert [each.name for each in report.skipped] == [f"vae/{vae_name('d')[:-3]}", "vae/b"]
    assert "contains list, expected a tensor" in report.skipped[0].what


BAD_JSON = ["", "7", "[" * 100_000, "null", '["/data/a.png"]']
BAD_FILES = [(kind, content) for kind in ("indices", "metadata") for content in BAD_JSON]
BAD_FILES += [("metadata", '{"a": 7}'), ("metadata", '{"/data/a.png": [1]}'), ("indices", '{"config": 7}')]
BAD_FILES += [
    ("indices", f'{{"aspect_ratio_bucket_indices": {content}}}') for content in ("[1]", '{"a": 7}', '{"1.0": [5]}')
]


def test_bad_json(tmp_path: Path) -> None:
    save(torch.randn(4, 2, 2), tmp_path / "in" / "vae" / vae_name("a.png"))
    for number, (kind, content) in enumerate(BAD_FILES):
        (tmp_path / "in" / f"aspect_ratio_bucket_{kind}_{number:02d}.json").write_text(content)
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert len(found) == 1
    names = [f"aspect_ratio_bucket_{kind}_{number:02d}.json" for number, (kind, _) in enumerate(BAD_FILES)]
    assert sorted(each.name for each in report.skipped) == sorted(names)
    assert any("5 is not a path" in each.what for each in report.skipped)


def test_deep_metadata(tmp_path: Path) -> None:
    deep = json.loads("[" * 900 + "]" * 900)
    for stem in "ab":
        save(torch.ones(2), tmp_path / "in" / vae_name(stem))
    write_backend(tmp_path / "in", "set", {"/a.png": {"more": deep}, "/b.png": {"loss": 0.5}}, loss=float("nan"))
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert list(found) == ["b"]
    assert "nested too deeply" in report.skipped[0].what
    assert report.fingerprint["data_backends"] == {"set": {"loss": "NaN"}}
