"""SimpleTuner: the VAE cache and the cache of text embeddings, `.pt` files with hashed names.

- VAE cache, `cache/vae/…/{sha256 of the image's file name}.pt`: a tensor `[C, H, W]`, or `[C, T, H, W]` for video; for audio
  a dict with `latents`, `latent_lengths` and lyrics.
- Text embeddings, `cache/text/…/{md5 of the caption}-{model}.pt`: a dict, for example `prompt_embeds`,
  `pooled_prompt_embeds`, `attention_masks`.
- `aspect_ratio_bucket_indices_{id}.json` and `aspect_ratio_bucket_metadata_{id}.json`, next to the images: paths, sizes and
  crops.

With `compress_cache`, a `.pt` file is compressed by gzip.

Each sample is one file of the VAE cache. Its other entries depend on the files in the imported folder:

    {"latents": …,
     "image_path": "/photos/harbor.png", "image_metadata": {"crop_coordinates": [0, 0], "target_size": [1024, 1024], …},
     "caption": ["a harbor"], "text": [{"prompt_embeds": …, "pooled_prompt_embeds": …}]}

- `image_path` and `image_metadata` come from the JSON files. A sample's name is then the folder of its file and the image's
  file name without suffix, otherwise the path of the file without suffix.
- `text` has one dict for each caption that the cache contains. Captions are found in `.txt` files next to the images, in the
  file names of images, and in `instance_prompt`. If captions of an image are in a `.txt` file, but none is in the cache, the
  sample is bad, unless no image has text. Embeddings that several images share are stored with each.

So import the folder that contains the images' JSON and `.txt` files and both caches. If the caches are elsewhere, import each
of them separately: the VAE cache gives samples `{"latents": …}`, the text cache gives samples `{"text": [{…}]}`.

Text embeddings of no image, such as that of the empty caption, also become samples `{"text": [{…}]}`. Leave them out of
training: `cache.filter(lambda entry: "latents" in entry.shapes)`. Text is not joined if the folder has embeddings of several
models. Folders whose names contain `image_embeds` have samples `{"image_embeds": …}`.
"""

from __future__ import annotations

import os.path
import re
from functools import partial

import torch

from wds_tensorcache.codec.skeleton.limits import check_depth
from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.lookups.simpletuner_images import (
    Image,
    best_image,
    images_by_hash,
    read_backends,
    text_hashes,
)
from wds_tensorcache.importers.safe_files import load_torch
from wds_tensorcache.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder

_FILE = re.compile(r"(?:.*/)?(?:[0-9a-f]{64}|[0-9a-f]{32}-[\w.-]+)\.pt", re.ASCII | re.DOTALL)
_TEXT = re.compile(r"([0-9a-f]{32})-([\w.-]+)\.pt", re.ASCII)


def _open(folder: SourceFolder) -> Source:
    """Find the latents, and join them with the images and embeddings of captions that have their hashes."""
    backends, bad = read_backends(folder)
    known = images_by_hash(backends)
    latents: list[str] = []
    texts: dict[str, list[str]] = {}
    models: set[str] = set()
    for name in folder.by_suffix.get(".pt", ()):
        match = _TEXT.fullmatch(name.rpartition("/")[2])
        if match:
            texts.setdefault(match[1], []).append(name)
            models.add(match[2])
        else:
            latents.append(name)
    found: list[tuple[str, Image | None, dict[str, str | None], bool]] = []
    for name in latents:
        path, _, file = name.rpartition("/")
        images = known.get(file[: -len(".pt")], [])
        image = best_image(name, images)
        hashes, has_captions = text_hashes(folder, image) if image else ({}, False)
        joined = {each: caption for key, caption in hashes.items() for each in texts.get(key, ()) if len(models) == 1}
        sample = f"{path}/{images[0].stem}".lstrip("/") if images else os.path.splitext(name)[0]
        found.append((sample, image, {name: None, **joined}, has_captions))
    is_joined = any(len(files) > 1 for _, _, files, _ in found)
    samples = [
        SourceSample(sample, tuple(files), partial(_load, folder, image, files, is_joined and has_captions))
        for sample, image, files, has_captions in found
    ]
    used = {file for _, _, files, _ in found for file in files}
    for name in (name for names in texts.values() for name in names if name not in used):
        samples.append(SourceSample(os.path.splitext(name)[0], (name,), partial(_load_text, folder, name)))
    configs = {backend.id: backend.config for backend in backends}
    return Source(samples, {"models": sorted(models), **({"data_backends": configs} if configs else {})}, bad)


def _load(folder: SourceFolder, image: Image | None, files: dict[str, str | None], needs_text: bool) -> Loaded:
    name, *texts = files
    value = load_torch(folder, name)
    if isinstance(value, torch.Tensor):
        value = {"image_embeds" if "image_embeds" in name.rpartition("/")[0] else "latents": value}
    if not isinstance(value, dict) or not value.keys() & {"latents", "image_embeds"}:
        raise FormatError(f"contains {type(value).__name__}, expected a tensor, or a dict with 'latents'").at(name)
    if image:
        try:
            check_depth(image.metadata)
        except FormatError as exc:
            raise exc.at(f"metadata of {name}") from exc
        value = {**value, "image_path": image.path, "image_metadata": dict(image.metadata)}
    if needs_text and not texts:
        raise FormatError("the cache has no text embeddings of the caption in the .txt file of its image").at(name)
    if texts:
        value |= {"caption": [files[text] for text in texts], "text": [load_torch(folder, text) for text in texts]}
    return Loaded(value)


def _load_text(folder: SourceFolder, name: str) -> Loaded:
    return Loaded({"text": [load_torch(folder, name)]})


FORMAT = Format(
    "simpletuner",
    "SimpleTuner: .pt files of the VAE and text caches, joined by the images' JSON and .txt files",
    _FILE,
    _open,
)
