"""The images that SimpleTuner lists in JSON files: they tell which image and caption a hashed file name stands for."""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import md5, sha256
from typing import Any

from wds_tensorcache.codec.skeleton.limits import check_depth
from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.source_folder import SourceFolder

_FILE = re.compile(r"aspect_ratio_bucket_(indices|metadata)(?:_(.+))?\.json", re.ASCII | re.DOTALL)
_MAX_NBYTES = 1 << 30


@dataclass(slots=True)
class Backend:
    """One data backend, which is a folder of images with one resolution.

    Attributes:
        id: Its name.
        folder: Folder of its JSON files, with `/` at the end, or empty.
        config: Its settings when it was cached.
        images: Metadata by path of the image.
    """

    id: str
    folder: str
    config: dict[str, Any] = field(default_factory=dict)
    images: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a backend."""

    path: str
    metadata: Mapping[str, Any]
    backend: Backend

    @property
    def stem(self) -> str:
        """The file name without its suffix; the path may be one of Windows."""
        return os.path.splitext(self.path.replace("\\", "/").rpartition("/")[2])[0]


def read_backends(folder: SourceFolder) -> tuple[list[Backend], dict[str, str]]:
    """Return the backends that the JSON files in a folder describe, and the bad files with their faults."""
    backends: dict[tuple[str, str], Backend] = {}
    bad: dict[str, str] = {}
    for name in folder.by_suffix.get(".json", ()):
        path, _, file = name.rpartition("/")
        match = _FILE.fullmatch(file)
        if not match:
            continue
        backend = backends.setdefault((path, match[2] or ""), Backend(match[2] or "", f"{path}/".lstrip("/")))
        try:
            # the fingerprint of a cache, to which the settings belong, has no NaN
            constant = str if match[1] == "indices" else None
            content = json.loads(folder.read_text(name, _MAX_NBYTES), parse_constant=constant)
            if match[1] == "metadata":
                found = content
            else:
                config = dict(content.get("config") or {})
                check_depth(config)
                backend.config = config
                buckets = content.get("aspect_ratio_bucket_indices") or {}
                found = {path: {} for paths in buckets.values() for path in paths}
            for image, metadata in found.items():
                if not isinstance(image, str):
                    raise TypeError(f"{image!r:.100} is not a path")
                backend.images[image] = {**backend.images.get(image, {}), **metadata}
        except FormatError as exc:
            bad[name] = exc.reason
        except (ValueError, TypeError, AttributeError, RecursionError) as exc:
            bad[name] = f"is not SimpleTuner's JSON: {exc!r:.200}"
    return list(backends.values()), bad


def images_by_hash(backends: list[Backend]) -> dict[str, list[Image]]:
    """Return all images by the names of their latents: the hash of the file name without suffix, or (old) that name itself."""
    found: dict[str, list[Image]] = {}
    for backend in backends:
        for path, metadata in backend.images.items():
            image = Image(path, metadata, backend)
            for name in (sha256(image.stem.encode("utf-8", "surrogatepass")).hexdigest(), image.stem):
                found.setdefault(name, []).append(image)
    return found


def best_image(name: str, images: list[Image]) -> Image | None:
    """Return the image whose latents are in the file `name`; None if that cannot be told.

    The file is in the backend's cache folder, in the same subfolder as the image in the backend's folder. Images with the same
    file name are told apart by these.
    """
    parts = name.split("/")[:-1]

    def score(image: Image) -> int:
        num_same = _num_common(parts, image.path.replace("\\", "/").split("/")[:-1])
        cache = str(image.backend.config.get("cache_dir_vae") or image.backend.id).rstrip("/").split("/")
        return num_same + _num_common(parts[: len(parts) - num_same], cache)

    scores = [score(image) for image in images]
    best = [image for image, each in zip(images, scores, strict=True) if each == max(scores)]
    is_known = bool(best) and all((each.path, each.metadata) == (best[0].path, best[0].metadata) for each in best)
    return best[0] if is_known else None


def text_hashes(folder: SourceFolder, image: Image) -> tuple[dict[str, str | None], bool]:
    """Return the captions that an image may have, by the hash that names their embeddings, and whether it has a caption file.

    Captions are in a `.txt` file next to the image, in its name, or in the settings. Some models hash the path of the image,
    relative to the backend's folder, which may have been moved since; newer versions also hash the caption. A caption that is
    not in the hash is None.
    """
    parts = image.path.replace("\\", "/").split("/")
    paths = (image.backend.folder + "/".join(parts[at:]) for at in range(len(parts)))
    files = (os.path.splitext(path)[0] + ".txt" for path in paths)
    file = next((file for file in files if file in folder), None)
    captions = [image.stem, image.stem.replace("_", " "), *_lines(folder, file)]
    prompt = image.backend.config.get("instance_prompt")
    if isinstance(prompt, str):
        captions = [prompt, *(f"{prompt} {caption}" for caption in captions), *captions]
    tails = ["/".join(parts[at:]) for at in range(len(parts))]
    keys = [key for path in dict.fromkeys([image.path, *tails]) for key in (path, f"{image.backend.id}:{path}")]
    hashed: dict[str, str | None] = dict.fromkeys(map(_md5, keys))
    hashed |= {_md5(f"{key}\0prompt\0{caption}"): caption for key in keys for caption in captions}
    return hashed | {_md5(caption): caption for caption in captions}, file is not None


def _lines(folder: SourceFolder, file: str | None) -> Iterator[str]:
    """Yield the content of a caption file, and its lines, as SimpleTuner splits them."""
    if file is not None:
        try:
            text = folder.read(file, 1 << 20).decode()
        except (FormatError, ValueError):  # too long, or not UTF-8, which SimpleTuner cannot read either
            return
        yield text
        yield from (line for line in text.split("\n") if line)


def _md5(text: str) -> str:
    return md5(text.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()


def _num_common(left: list[str], right: list[str]) -> int:
    """Return how many parts at the end of two paths are equal."""
    count = 0
    while count < min(len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    return count
