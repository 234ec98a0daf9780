"""SimpleTuner: the VAE cache and the cache of text embeddings. Both contain `.pt` files with hashed names.

- VAE cache, `cache/vae/…/{sha256 of the image's file name without suffix}.pt`: a tensor `[C, H, W]`, or `[C, T, H, W]` for
  video; for audio a dict with `latents`, `latent_lengths` and lyrics.
- Text embeddings, `cache/text/…/{md5 of the caption}-{model}.pt`: a dict, for example `prompt_embeds`,
  `pooled_prompt_embeds`, `attention_masks`.
- `aspect_ratio_bucket_indices_{id}.json` and `aspect_ratio_bucket_metadata_{id}.json`, next to the images: paths, sizes and
  crops.

With `compress_cache`, a `.pt` file is compressed by gzip.

Each sample is one file of the VAE cache. Its other entries depend on the files in the imported folder:

    {"latents": …,
     "image_path": "/photos/harbor.png", "image_metadata": {"crop_coordinates": [0, 0], "target_size": [1024, 1024], …},
     "caption": ["a harbor"], "text": [{"prompt_embeds": …, "pooled_prompt_embeds": …}]}

- `image_path` and `image_metadata` come from the JSON files. With these files, a sample's name is the folder of its file and
  the image's file name without suffix. Otherwise the name is the path of the file without suffix.
- `text` has one dict for each caption that the cache contains. Captions are found by the `caption_strategy` in the JSON: in
  `.txt` files next to the images (`textfile`), or in the file names of images (`filename`). Without a strategy, the caption is
  in the `.txt` file if the image has such a file, otherwise in its name. An `instance_prompt` is a caption, too. Other captions
  are unknown. If the name of a file hashes only the path of its image, the caption is `""`. It is None if there may be a
  caption, because older versions left the caption out of the hash. A sample is bad if its image has a `.txt` file, and the
  cache contains none of the image's captions although other images have text. Embeddings that several images share are stored
  with each image.

So import the folder that contains the images' JSON and `.txt` files and both caches. If the caches are elsewhere, import each
of them separately: the VAE cache gives samples `{"latents": …}`, the text cache gives samples `{"text": [{…}]}`.

Text embeddings that belong to no image, for example of the empty caption, also become samples `{"text": [{…}]}`. Leave them out
of training: `cache.filter(lambda entry: "latents" in entry.shapes)`. Text is not joined if the folder has embeddings of several
models. Folders whose names contain `image_embeds` have samples `{"image_embeds": …}`.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import md5, sha256
from typing import Any

import torch

from wds_tensorcache.codec.skeleton.limits import check_depth
from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import load_torch
from wds_tensorcache.importers.source import Faults, Format, Loaded, Source, SourceSample, num_common
from wds_tensorcache.importers.source_folder import SourceFolder

_FILE = re.compile(r"(?:.*/)?(?:[0-9a-f]{64}|[0-9a-f]{32}-[\w.-]+)\.pt", re.ASCII | re.DOTALL)
_TEXT = re.compile(r"([0-9a-f]{32})-([\w.-]+)\.pt", re.ASCII)
_JSON = re.compile(r"(.*/)?aspect_ratio_bucket_(indices|metadata)(?:_([^/]+))?\.json", re.ASCII | re.DOTALL)


@dataclass(slots=True)
class _Backend:
    """One data backend, which is a folder of images with one resolution."""

    folder: str  # of its JSON files, with `/` at the end, or empty
    id: str
    config: dict[str, Any] = field(default_factory=dict)
    images: dict[str, dict[str, Any]] = field(default_factory=dict)  # metadata by path
    num_common: int = 0  # folders with which all paths begin


@dataclass(frozen=True, slots=True)
class _Image:
    path: str
    metadata: Mapping[str, Any]
    backend: _Backend

    @property
    def parts(self) -> list[str]:
        """The parts of the path, which may be a Windows path."""
        return self.path.replace("\\", "/").split("/")

    @property
    def relative_paths(self) -> list[str]:
        """The image's path relative to each possible folder of the backend."""
        # the folder of the backend contains all its images
        return ["/".join(self.parts[at:]) for at in range(self.backend.num_common + 1)]

    @property
    def stem(self) -> str:
        return os.path.splitext(self.parts[-1])[0]


def _open(folder: SourceFolder) -> Source:
    bad = Faults()
    metadata_files: list[str] = []
    backends = _read_backends(folder, bad, metadata_files)
    # latents are named by the hash of the image's file name without suffix, or (old) by that name itself
    images_of: dict[str, list[_Image]] = {}
    for backend in backends:
        for path, metadata in backend.images.items():
            image = _Image(path, metadata, backend)
            for name in (sha256(image.stem.encode("utf-8", "surrogatepass")).hexdigest(), image.stem):
                images_of.setdefault(name, []).append(image)
    latents: list[str] = []
    texts: dict[str, list[str]] = {}
    models: set[str] = set()
    for name in folder.by_suffix.get(".pt", ()):
        if match := _TEXT.fullmatch(name.rpartition("/")[2]):
            texts.setdefault(match[1], []).append(name)
            models.add(match[2])
        else:
            latents.append(name)
    rows: list[tuple[str, _Image | None, dict[str, str | None], bool]] = []
    best_images: dict[str, _Image | None] = {}
    taken: set[int] = set()
    # `photos/a.png` also fits the file of `photos/sub/a.png`, which therefore chooses first
    for name in sorted(latents, key=lambda name: -name.count("/")):
        images = images_of.get(_stem_of(name), [])
        best = _best_image(name, images) or _best_image(name, [image for image in images if id(image) not in taken])
        best_images[name] = best
        taken.add(id(best))
    for name in latents:
        path, best, images = name.rpartition("/")[0], best_images[name], images_of.get(_stem_of(name), [])
        strategy = best.backend.config.get("caption_strategy") if best else None
        caption_file = _find_captions(folder, best) if best and strategy in (None, "textfile") else None
        hashes: dict[str, str | None] = {}
        if best and len(models) == 1:
            hashes = _text_hashes(folder, best, caption_file)
            metadata_files += [caption_file] if caption_file else []
        joined = {text: caption for key, caption in hashes.items() for text in texts.get(key, ())}
        sample = f"{path}/{images[0].stem}".lstrip("/") if images else os.path.splitext(name)[0]
        rows.append((sample, best, {name: None, **joined}, caption_file is not None))
    is_joined = any(len(files) > 1 for _, _, files, _ in rows)
    samples = [
        SourceSample(sample, tuple(files), partial(_load, folder, best, files, is_joined and has_captions))
        for sample, best, files, has_captions in rows
    ]
    used = {file for _, _, files, _ in rows for file in files}
    for name in (name for names in texts.values() for name in names if name not in used):
        samples.append(SourceSample(os.path.splitext(name)[0], (name,), partial(_load_text, folder, name)))
    configs = {backend.id: backend.config for backend in backends}
    provenance = {"models": sorted(models), **({"data_backends": configs} if configs else {})}
    return Source(samples, provenance, bad, metadata_files)


def _stem_of(name: str) -> str:
    return name.rpartition("/")[2][: -len(".pt")]


def _load(folder: SourceFolder, image: _Image | None, files: dict[str, str | None], needs_text: bool) -> Loaded:
    name, *texts = files
    value = load_torch(folder, name)
    if isinstance(value, torch.Tensor):
        value = {"image_embeds" if "image_embeds" in name.rpartition("/")[0] else "latents": value}
    if not isinstance(value, dict) or not value.keys() & {"latents", "image_embeds"}:
        raise FormatError(f"contains {type(value).__name__}, expected a tensor, or a dict with 'latents'").at(name)
    if image:
        value = {**value, "image_path": image.path, "image_metadata": dict(image.metadata)}
    if needs_text and not texts:
        raise FormatError("the cache has no text embeddings of the caption in the .txt file of its image").at(name)
    if texts:
        value |= {"caption": [files[text] for text in texts], "text": [load_torch(folder, text) for text in texts]}
    return Loaded(value)


def _load_text(folder: SourceFolder, name: str) -> Loaded:
    return Loaded({"text": [load_torch(folder, name)]})


def _read_backends(folder: SourceFolder, bad: Faults, metadata_files: list[str]) -> list[_Backend]:
    """Read the JSON files of all backends; add their names to `metadata_files`."""
    backends: dict[tuple[str, str], _Backend] = {}
    for match in filter(None, map(_JSON.fullmatch, folder.by_suffix.get(".json", ()))):
        name, place = match[0], (match[1] or "", match[3] or "")
        backend = backends.setdefault(place, _Backend(*place))
        metadata_files.append(name)
        with bad.of(name):
            images = folder.read_json(name, names_nan=match[2] == "indices")
            if match[2] == "indices":
                config = dict(images.get("config") or {})
                check_depth(config)
                backend.config = config
                buckets = images.get("aspect_ratio_bucket_indices") or {}
                images = {path: {} for paths in buckets.values() for path in paths}
            for image, metadata in images.items():
                if not isinstance(image, str):
                    raise FormatError(f"{image!r:.100} is not a path")
                backend.images[image] = {**backend.images.get(image, {}), **metadata}
    for backend in backends.values():
        folders = [path.replace("\\", "/").split("/")[:-1] for path in backend.images] or [[]]
        backend.num_common = num_common(min(folders), max(folders))
    return list(backends.values())


def _best_image(name: str, images: list[_Image]) -> _Image | None:
    """Return the image of a file of latents, if exactly one fits."""
    # The file is in the cache folder of its backend, in the same subfolder as the image in the folder of the backend.
    parts = name.split("/")[-2::-1]

    def score(image: _Image) -> int:
        num_same = num_common(parts, image.parts[-2::-1])
        cache = str(image.backend.config.get("cache_dir_vae") or image.backend.id).rstrip("/").split("/")
        return num_same + num_common(parts[num_same:], reversed(cache))

    scores = list(map(score, images))
    highest = max(scores, default=0)
    best = [image for image, number in zip(images, scores, strict=True) if number == highest]
    is_known = bool(best) and all((image.path, image.metadata) == (best[0].path, best[0].metadata) for image in best)
    return best[0] if is_known else None


def _find_captions(folder: SourceFolder, image: _Image) -> str | None:
    # the folder of the image may have been moved
    paths = (image.backend.folder + path for path in image.relative_paths)
    return next((file for path in paths if (file := os.path.splitext(path)[0] + ".txt") in folder), None)


def _text_hashes(folder: SourceFolder, image: _Image, caption_file: str | None) -> dict[str, str | None]:
    """Return possible captions of an image by hash; None for unknown captions."""
    strategy = image.backend.config.get("caption_strategy")
    uses_name = strategy == "filename" or (strategy is None and caption_file is None)
    captions = [image.stem, image.stem.replace("_", " ")] if uses_name else []
    # newer versions hash the path alone only for an empty caption, which is "" in a .txt file
    caption_of_path: str | None = "" if strategy in (None, "textfile") else None
    if caption_file is not None:
        with suppress(FormatError, ValueError):  # not UTF-8, which SimpleTuner cannot read either
            text = folder.read(caption_file).decode()
            captions += [text, *filter(None, text.split("\n"))]
            caption_of_path = None if text.strip() else caption_of_path
    prompt = image.backend.config.get("instance_prompt")
    if isinstance(prompt, str):
        captions = [prompt, *(f"{prompt} {caption}" for caption in captions), *captions]
        caption_of_path = None if prompt.strip() else caption_of_path
    # Some models hash the path of the image in the folder of its backend, which may have been moved since.
    paths = dict.fromkeys([image.path, *image.relative_paths])
    keys = [key for path in paths for key in (path, f"{image.backend.id}:{path}")]
    hashed: dict[str, str | None] = dict.fromkeys(map(_md5, keys), caption_of_path)
    hashed |= {_md5(f"{key}\0prompt\0{caption}"): caption for key in keys for caption in captions}
    return hashed | {_md5(caption): caption for caption in captions}


def _md5(text: str) -> str:
    return md5(text.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()


FORMAT = Format(
    "simpletuner",
    "SimpleTuner: .pt files of the VAE and text caches, joined by the images' JSON and .txt files",
    _FILE,
    _open,
)
