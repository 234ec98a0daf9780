"""OneTrainer (mgds DiskCache): `.pt` files named by position, in `image/` and `text/`.

OneTrainer writes `{cache_dir}/image/{hash}/variation-{n}/` and `{cache_dir}/text/{hash}/variation-{n}/`, where a hash stands
for a concept and its settings. Each variation contains `0.pt`, `1.pt`, …, one for each file of the concept, and
`aggregate.pt`, a list with more entries of each file:

- images: `latent_image`, `original_resolution`, `crop_offset`, for some models `latent_mask`, `latent_conditioning_image`; in
  `aggregate.pt` `crop_resolution`, `image_path`;
- text: `tokens_1`, `tokens_mask_1`, `text_encoder_1_hidden_state`, `text_encoder_1_pooled_state` and so on.

Each sample is one file of a concept, with a dict for its image and a dict for its text:

    {"image": {"latent_image": …, "original_resolution": …, "crop_resolution": …, "image_path": "/photos/harbor.png"},
     "text": {"tokens_1": …, "text_encoder_1_hidden_state": …}}

If any concept has several variations of its text, such as random captions, `text` is a list of dicts in all samples.
Random crops and flips make `image` such a list, too. In training, choose one of them:

    choose = {("tokens", "state"): ("text.*.tokens_1", "text.*.text_encoder_1_hidden_state")}
    loader = tc.Loader(cache, batch_size=4, choose=choose)

The name of a sample is the path of its image without suffix, relative to the folder that contains all images.

The cache does not record the image folder to which a text folder belongs. Two folders are joined by position, as OneTrainer
does, if they have the same number of files. For this, all image folders must have different numbers of files, and exactly one
text folder must match each image folder. Otherwise nothing is joined: samples have `image` or `text`, and text is named
`text/{hash}/{position}`. To join concepts with equal numbers of files, import a folder with the `image/{hash}` and
`text/{hash}` of one concept.

A variation without `aggregate.pt` is unfinished. A variation with other images than the first variation of the concept was
cached from other files. Files of both kinds are reported, and so are files without an entry in `aggregate.pt`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import load_torch
from wds_tensorcache.importers.source import Faults, Format, Loaded, Source, SourceSample, name_media, number_repeats
from wds_tensorcache.importers.source_folder import SourceFolder

_FILE = re.compile(r"(?:(.*)/)?variation-(0|[1-9]\d{0,8})/(0|[1-9]\d{0,8}|aggregate)\.pt", re.ASCII | re.DOTALL)


@dataclass(slots=True)
class _Group:
    """The cached files of one concept."""

    path: str  # folder of its variations
    variations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # content of `aggregate.pt` by folder
    images: list[str | None] = field(default_factory=list)  # path of the image at each position

    @property
    def part(self) -> str:
        """The entry of the samples that contains these files: `"image"` or `"text"`."""
        return "image" if any(self.images) else "text"


def _recognize(folder: SourceFolder) -> int:
    matches = list(filter(None, map(_FILE.fullmatch, folder.by_suffix.get(".pt", ()))))
    return len(matches) if any(match[3] == "aggregate" for match in matches) else 0


def _open(folder: SourceFolder) -> Source:
    bad = Faults()
    concepts: dict[str, dict[int, list[str]]] = {}
    for match in filter(None, map(_FILE.fullmatch, folder.by_suffix.get(".pt", ()))):
        concepts.setdefault(match[1] or "", {}).setdefault(int(match[2]), []).append(match[0])
    groups = [_read_group(folder, path, variations, bad) for path, variations in concepts.items()]
    groups = [group for group in groups if group.variations]
    pairs = _pair(groups)
    lists = {group.part for group in groups if len(group.variations) > 1}
    rows = [(group, at) for group in groups if group.path not in pairs.values() for at in range(len(group.images))]
    media = iter(name_media([path for group, at in rows if (path := group.images[at])]))
    names = number_repeats(next(media) if group.images[at] else f"{group.path}/{at}" for group, at in rows)
    texts = {group.path: group for group in groups}
    samples = []
    for (group, at), name in zip(rows, names, strict=True):
        parts = {part.part: part for part in (group, texts.get(pairs.get(group.path, ""))) if part}
        files = tuple(f"{variation}/{at}.pt" for part in parts.values() for variation in part.variations)
        samples.append(SourceSample(name, files, partial(_load, folder, parts, at, lists)))
    described = {group.path: {"items": len(group.images), "variations": len(group.variations)} for group in groups}
    aggregates = [f"{variation}/aggregate.pt" for group in groups for variation in group.variations]
    return Source(samples, {"groups": described, "joined": pairs}, bad, aggregates)


def _read_group(folder: SourceFolder, path: str, variations: dict[int, list[str]], bad: Faults) -> _Group:
    """Return the finished variations of a concept; report other files in `bad`."""
    group = _Group(path)
    for number, files in sorted(variations.items()):
        variation = f"{path}/variation-{number}".lstrip("/")
        try:
            entries = _read_aggregate(folder, f"{variation}/aggregate.pt")
            paths = [entry.get("image_path") for entry in entries]
            images = [path if isinstance(path, str) else None for path in paths]
            if group.variations and images != group.images:
                problem = "was cached from other files than the first variation; let OneTrainer cache them again"
                raise FormatError(problem)
        except FormatError as exc:
            bad.update(dict.fromkeys(files, f"{variation}: {exc.reason}"))
            continue
        group.variations[variation], group.images = entries, images
        expected = {f"{variation}/{at}.pt" for at in ("aggregate", *range(len(entries)))}
        bad.update(dict.fromkeys(sorted({*files} - expected), f"aggregate.pt has only {len(entries)} entries"))
    return group


def _read_aggregate(folder: SourceFolder, name: str) -> list[dict[str, Any]]:
    if name not in folder:
        raise FormatError("has no aggregate.pt, so caching was interrupted; let OneTrainer finish it")
    entries = load_torch(folder, name)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise FormatError("aggregate.pt is not a list of dicts")
    return entries


def _pair(groups: list[_Group]) -> dict[str, str]:
    """Pair image and text folders by number of files, if unambiguous."""
    counts = {part: Counter(len(group.images) for group in groups if group.part == part) for part in ("image", "text")}
    if counts["image"] != counts["text"] or max(counts["image"].values(), default=0) != 1:
        return {}
    texts = {len(group.images): group.path for group in groups if group.part == "text"}
    return {group.path: texts[len(group.images)] for group in groups if group.part == "image"}


def _load(folder: SourceFolder, parts: dict[str, _Group], at: int, lists: set[str]) -> Loaded:
    value = {}
    for part, group in parts.items():
        loaded = [_load_one(folder, f"{path}/{at}.pt", entries[at]) for path, entries in group.variations.items()]
        value[part] = loaded if part in lists else loaded[0]
    return Loaded(value)


def _load_one(folder: SourceFolder, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    if name not in folder:
        raise FormatError("is missing, but aggregate.pt has an entry for it").at(name)
    value = load_torch(folder, name)
    if not isinstance(value, dict):
        raise FormatError(f"contains {type(value).__name__}, expected a dict").at(name)
    return {**value, **entry}


FORMAT = Format(
    "onetrainer",
    "OneTrainer: image/ and text/ folders with variation-n/*.pt and aggregate.pt, joined by position",
    _recognize,
    _open,
)
