"""Caches of musubi-tuner: `.safetensors` files in the cache folder of a dataset.

Files, where `{arch}` is the short name of the architecture, for example `hv`, `wan`, `fp`, `fk`, `f2d`, `qi`, `zi` or `kr2`:

- latents of an image: `{stem}_{width}x{height}_{arch}.safetensors`, with the size of the image;
- latents of a part of a video: `{stem}_{first frame}-{frames}_{width}x{height}_{arch}.safetensors`, for example
  `clip_00025-081_1280x0720_wan.safetensors`; FramePack adds the number of the section: `clip_00000-081-0002_…`;
- text encoder outputs: `{stem}_{arch}_te.safetensors`, one file for all parts of a video.

Each file of latents becomes one sample, with the name of the file without size and architecture. Its tensors have the names
that musubi-tuner uses in its batches, without F x H x W, dtype and `varlen_`:

    {
        "latents": [C, F, H, W], or [C, H, W] for image architectures; HiDream-O1 has pixel tokens [h, w, dim],
        "latents_control_0": …, "clip": …, "f_indices": …, "latents_clean_2x": … and so on: all other tensors in the file,
        "original_size": (width, height) of the image or video,
        "frame_count": frames of the part, for videos,
        "first_frame": position of the part in the video, for videos,
        "section": number of the section, for videos of FramePack,
        "text": the text encoder outputs: {"t5": …}, {"llm": …, "llm_mask": …, "clipL": …}, {"vl_embed": …}, …
        "caption": the text from which they were made,
    }

Tensors that were `varlen_` are as long as the text: use `collate={"text.t5": tc.pad(…)}` or `"list"`. If a file has a tensor in
several dtypes, the widest one has the name, and the other ones have their whole keys. `metadata` contains the other entries of
the metadata, unless they are the same in all files.

If two files of latents have one stem, for example since images of two folders share a cache folder, the sizes are in the names:
`photo_0512x0512`. There is only one file of text encoder outputs for both, so one of them may have the text of the other image,
as in musubi-tuner. If the folder has the caches of several architectures, the short name comes first: `wan/clip_00000-081`.

Samples without text have no `text` and `caption` (musubi-tuner skips these), and texts without latents are samples too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.image_files import ImageFile, join_files
from wds_tensorcache.importers.safe_files import load_safetensors
from wds_tensorcache.importers.source import Format, Loaded, Source, one_or_all
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.importers.suffixed_keys import (
    CommonMetadata,
    as_numbers,
    parse_key,
    peek_header,
    probe_headers,
    short_names,
)

_LATENTS = re.compile(r"(.+)_(\d{4,}x\d{4,})_([a-z][a-z0-9]*)\.safetensors", re.DOTALL)
_TEXT = re.compile(r"(.+)_([a-z][a-z0-9]*)_te\.safetensors", re.DOTALL)
_TEXT_OF_KOHYA = re.compile(r".+_\d+(_m)?_te\.safetensors", re.DOTALL)
_PART = re.compile(r"(.+)_(\d{5,})-\d{3,}(?:-(\d+))?", re.DOTALL)


def _recognize(folder: SourceFolder) -> int:
    names = folder.by_suffix.get(".safetensors", [])
    fitting = [name for name in names if _is_text(name) or _LATENTS.fullmatch(name)]
    if not fitting or 2 * len(fitting) < len(names):
        return 0
    probed = probe_headers(folder, fitting)
    return len(fitting) * sum(map(_is_ours, probed.values())) // len(probed)


def _is_text(name: str) -> bool:
    return bool(_TEXT.fullmatch(name)) and not _TEXT_OF_KOHYA.fullmatch(name)


def _is_ours(metadata: dict[str, str]) -> bool:
    is_kohya = any(key.startswith("crop_ltrb") for key in metadata)
    return {"architecture", "format_version"} <= metadata.keys() and not is_kohya


def _open(folder: SourceFolder) -> Source:
    latents, texts, bad, architectures = [], [], {}, set()
    of_latents = CommonMetadata(re.compile("width|height|frame_count"))
    of_texts = CommonMetadata(re.compile("caption1"))
    for name in folder.by_suffix.get(".safetensors", ()):
        match = _LATENTS.fullmatch(name) or (_TEXT.fullmatch(name) if _is_text(name) else None)
        keys, metadata = peek_header(folder, name)
        if match is None or (metadata and not _is_ours(metadata)):
            bad[name] = "is not a file of musubi-tuner: its name or its metadata differ"
            continue
        is_text = match.re is _TEXT
        if is_text:
            texts.append(ImageFile(name, match[1], match[2]))
        else:
            latents.append(ImageFile(name, match[1], match[3], match[2]))
        if keys:
            (of_texts if is_text else of_latents).add(keys, metadata)
        architectures |= {metadata["architecture"]} if metadata else set()
    load = partial(_load, folder, of_latents, of_texts)
    provenance = {
        "architecture": one_or_all(architectures),
        "metadata": {"latents": of_latents.shared, "text": of_texts.shared},
        "keys": sorted(of_latents.scheme | of_texts.scheme),
    }
    return Source(join_files(latents, texts, load, _stem_of_video), provenance, bad)


def _stem_of_video(stem: str) -> str:
    match = _PART.fullmatch(stem)
    return match[1] if match else stem


def _load(
    folder: SourceFolder,
    of_latents: CommonMetadata,
    of_texts: CommonMetadata,
    latents: ImageFile | None,
    resolution: str,
    texts: Sequence[ImageFile],
) -> Loaded:
    sample: dict[str, Any] = {}
    rest: dict[str, dict[str, str]] = {}
    if latents is not None:
        tensors, metadata = load_safetensors(folder, latents.name)
        try:
            sample = _named(tensors)
            if "latents" not in sample:
                raise FormatError("has no tensor 'latents_…'")
            sample |= _facts(latents.stem, metadata)
        except FormatError as exc:
            raise exc.at(latents.name) from exc
        rest["latents"] = of_latents.rest_of(metadata)
    for text in texts:
        tensors, metadata = load_safetensors(folder, text.name)
        sample["text"] = _named(tensors)
        if "caption1" in metadata:
            sample["caption"] = metadata["caption1"]
        rest["text"] = of_texts.rest_of(metadata)
    rest = {kind: entries for kind, entries in rest.items() if entries}
    return Loaded(sample | ({"metadata": rest} if rest else {}))


def _named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by the names that musubi-tuner uses in batches, sorted, because safetensors orders by dtype."""
    parts = {key: parse_key(key.removeprefix("varlen_")) for key in tensors}
    if len({each.resolution for each in parts.values() if each.content == "latents"}) > 1:
        raise FormatError("has latents of more than one resolution, but musubi-tuner writes a file for each")
    return dict(sorted((name, tensors[key]) for key, name in short_names(parts).items()))


def _facts(stem: str, metadata: dict[str, str]) -> dict[str, Any]:
    """Return what the metadata and the name of a file of latents say of the image or video."""
    facts: dict[str, Any] = {}
    if {"width", "height"} <= metadata.keys():
        facts["original_size"] = as_numbers(metadata, "width", "height", count=2)
    if "frame_count" in metadata:
        (facts["frame_count"],) = as_numbers(metadata, "frame_count", count=1)
        if match := _PART.fullmatch(stem):
            facts["first_frame"] = int(match[2])
            facts |= {"section": int(match[3])} if match[3] else {}
    return facts


FORMAT = Format("musubi", "musubi-tuner: .safetensors files of latents and text encoder outputs", _recognize, _open)
