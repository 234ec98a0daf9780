"""Caches of musubi-tuner: `.safetensors` files in the cache folder of a dataset.

Files, where `{arch}` is the short name of the architecture, for example `hv`, `wan`, `fp`, `fk`, `f2d`, `qi`, `zi` or `kr2`:

- latents of an image: `{stem}_{width}x{height}_{arch}.safetensors`, with the size of the image;
- latents of a part of a video: `{stem}_{first frame}-{frames}_{width}x{height}_{arch}.safetensors`, for example
  `clip_00025-081_1280x0720_wan.safetensors`; FramePack adds the number of the section: `clip_00000-081-0002_…`;
- the sound of a video, in forks that train LTX-2: `{stem}_{width}x{height}_ltx2_audio.safetensors`;
- latents of sounds alone, in forks that train ACE-Step: `{stem}_as.safetensors`, without a size;
- text encoder outputs: `{stem}_{arch}_te.safetensors`, one file for all parts of a video.

Each file of latents becomes one sample, with the name of the file without size and architecture. Its tensors have the names
that musubi-tuner uses in its batches, without F x H x W, dtype and `varlen_`:

    {
        "latents": [C, F, H, W], or [C, H, W] for image architectures; HiDream-O1 has pixel tokens [h, w, dim],
        "latents_control_0": …, "clip": …, "f_indices": …, "latents_clean_2x": … and so on: all other tensors in the file,
        "audio_latents": [C, T, mel bins], "audio_lengths": frames of the sound before padding, for LTX-2,
        "original_size": (width, height) of the image or video; ACE-Step has latents [T, C] and no size,
        "frame_count": frames of the part, for videos,
        "first_frame": position of the part in the video, for videos,
        "section": number of the section, for videos of FramePack,
        "text": the text encoder outputs: {"t5": …}, {"llm": …, "llm_mask": …, "clipL": …}, {"vl_embed": …}, …
        "caption": the text from which they were made,
    }

Tensors that were `varlen_` are as long as the text: use `collate={"text.t5": tc.pad(…)}` or `"list"`. If a file has a tensor in
several dtypes, only the widest tensor has the name, and the other tensors have their whole keys. `metadata` contains the other
entries of the metadata, unless they are the same in all files.

If two files of latents have the same stem, for example because images of two folders share a cache folder, the sizes are in the
names: `photo_0512x0512`. Both images share one file of text encoder outputs, so an image may have the text of the other image,
as in musubi-tuner. If the folder has the caches of several architectures, the short name comes first: `wan/clip_00000-081`.

Samples without text have no `text` and `caption` (musubi-tuner skips these), and texts without latents are samples too.
"""

from __future__ import annotations

import re
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.source import Format, Source
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.importers.trainers.joined_files import Content, Table, TableFiles, find_resolutions, name_tensors

_PART = re.compile(r"^(.+)_(\d{5,})-\d{3,}(?:-(\d+))?\Z", re.DOTALL)


_TABLE = Table(
    "musubi-tuner",
    # texts of kohya have the number of their tokens before `_te`
    re.compile(r"(?!.+_\d+(?:_m)?_te\.)(?P<stem>.+)_(?P<model>[a-z][a-z0-9]*)_te\.safetensors", re.DOTALL),
    has_crops=False,
    per_file={"latents": re.compile("width|height|frame_count"), "text": re.compile("caption1")},
)


def _open(folder: SourceFolder) -> Source:
    return TableFiles(_TABLE, folder).join(_add, lambda stem: _PART.sub(r"\1", stem))


def _add(sample: dict[str, Any], content: Content) -> str:
    tensors, metadata = content.tensors, content.metadata
    if content.resolution is None:
        sample["text"] = name_tensors(tensors)
        sample |= {"caption": metadata["caption1"]} if "caption1" in metadata else {}
        return "text"
    if content.file.audio:
        sample |= name_tensors(tensors)
        return "audio"
    if len(find_resolutions(tensors)) > 1:
        raise FormatError("has latents of more than one resolution, but musubi-tuner writes a file for each")
    sample.update(content.name_latents(tensors))
    if "frame_count" in metadata:
        (sample["frame_count"],) = content.numbers("frame_count", count=1)
        if match := _PART.fullmatch(content.file.stem):
            sample["first_frame"] = int(match[2])
            sample |= {"section": int(match[3])} if match[3] else {}
    return "latents"


FORMAT = Format(
    "musubi",
    "musubi-tuner and forks: .safetensors files of latents, sounds and text encoder outputs",
    _TABLE.recognize,
    _open,
)
