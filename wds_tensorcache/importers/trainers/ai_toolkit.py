"""ai-toolkit: `_latent_cache` and `_t_e_cache`, folders of `.safetensors` files next to the images.

- `_latent_cache/{stem}_{hash}.safetensors`: `latent` [C, h, w] or [C, T, h, w], and for some models `first_frame_latent`,
  `audio_latent`, `num_frames` (int32 []), `tensor` (uint8 pixels), `waveform` (int16), `waveform_sample_rate`. The metadata
  says how the latent was made: `filename`, `scale_to_width`, `crop_x`, `latent_space_version`, `flip_x`, and more, as JSON.
- `_t_e_cache/{stem}_{hash}.safetensors`: `text_embed`, or `text_embed_0`, `text_embed_1`, … for models with several tensors;
  `pooled_embed`; `attention_mask` or `attention_mask_0`, …; newer models use other names, and metadata with `class_name`.
- `{stem}.txt`, the caption.

Each sample is one file of latents, or a text without latents:

    {
        "latent": as stored, and the other tensors of the file,
        "info": {"filename": "photo.jpg", "crop_x": 0, "latent_space_version": "flux1", …},
        "text": {"text_embed": [1, T, D] or a list of them, "pooled_embed": …, "attention_mask": …},
        "text_info": {"class_name": "AdvancedPromptEmbeds", …}, if the text has metadata,
        "caption": "the text of the caption file",
    }

Numbered tensors become lists in the order of their numbers. ai-toolkit itself sorts their names as text, so its training sees
`text_embed_10` before `text_embed_2`. Tensors keep the batch dimension of 1 that texts have.

A uint8 `latent` or `tensor` stays uint8: `x.float() / 127.5 - 1` gives the pixels in [-1, 1]. For an int16 `waveform`, use
`x.float() / 32767`. Latents have the scale and shift of the model.

The name of a sample is the path of the image without suffix. ai-toolkit writes one file for each flip: `photo`, `photo_flip_x`.
Files of other crops, sizes or models stay in the folder when the settings change. Then the samples of an image with several
such files are named like the files: `_latent_cache/photo_2rOEG1vU3l4zJd5dAdyDDA`.

An image may have several files of text, for example another file with the empty caption for dropout. The file whose hash fits
the caption becomes `text`, and the other files become `other_texts`, a dict by hash. No hash fits if a trigger word or a
control image is part of it. Then all files of text become `other_texts`. A single file of text is always `text`.

Files of `_clip_vision_cache` become separate samples, `{"clip_vision": …, "info": …}`, named like their files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from wds_tensorcache.codec.skeleton.limits import check_depth
from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import load_safetensors, read_safetensors_header
from wds_tensorcache.importers.source import Faults, Format, Loaded, Source, SourceSample, one_or_all
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.importers.trainers.joined_files import ImageFile, Joined, join_files

_FILE = re.compile(
    r"((?:.*/)?)_(latent|t_e|clip_vision)_cache/(.+)_([A-Za-z0-9_-]{22}(?:_\d+)?)\.safetensors", re.DOTALL | re.ASCII
)
_NUMBERED = re.compile(r"(text_embed|attention_mask)_(\d{1,9})", re.ASCII)
_NOT_INFO = {"format", "software"}
_TEXTS = ("filename", "latent_space_version", "class_name")
# the hash of a text depends on the model, which the file of the text does not name; some models have another name in latents
_MODELS = ("flux", "sd1", "sd2", "sd3", "sdxl", "pixart", "auraflow", "ssd", "vega", "ltx2", "ltx2.3", "minimax_h3")


def _open(folder: SourceFolder) -> Source:
    latents, texts, samples, bad = [], [], [], Faults()
    versions: set[str] = set()
    for name in folder.by_suffix.get(".safetensors", ()):
        match = _FILE.fullmatch(name)
        if match is None:
            if re.search(r"(?:^|/)_(?:latent|t_e|clip_vision)_cache/", name):
                bad[name] = "is not named {stem}_{hash}.safetensors"
            continue
        stem = match[1] + match[3]
        if match[2] == "t_e":
            texts.append(ImageFile(name, stem, "", match[4]))
        elif match[2] == "clip_vision":
            samples.append(SourceSample(name[: -len(".safetensors")], (name,), partial(_load_vision, folder, name)))
        else:
            with bad.of(name):
                info = _info(read_safetensors_header(folder, name)[1])
                versions |= {str(info["latent_space_version"])} if "latent_space_version" in info else set()
                flips = "_".join(flip for flip in ("flip_x", "flip_y") if info.get(flip))
                latents.append(ImageFile(name, stem, "", flips))
    models = tuple(dict.fromkeys((*sorted(versions), *_MODELS)))
    provenance = {"latent_space_version": one_or_all(versions)} if versions else {}
    load = partial(_load, folder, models)
    return join_files(folder, latents, texts, load, provenance, bad, captions=(".txt",), others=samples)


def _load(folder: SourceFolder, models: tuple[str, ...], files: Joined) -> Loaded:
    sample: dict[str, Any] = {}
    for file in files.latents:
        tensors, metadata = load_safetensors(folder, file.name)
        if "latent" not in tensors or "info" in tensors:
            raise FormatError(f"expected a tensor 'latent', found {list(tensors)!r:.300}").at(file.name)
        sample = {"latent": tensors["latent"], **tensors, "info": _info(metadata)}
    captions = [folder.read_text(name) for name in files.captions]
    texts = {text.label: _load_text(folder, text.name) for text in files.texts}
    hashes: Iterable[str] = texts
    if len(texts) > 1:
        hashes = chain.from_iterable(_hashes(folder.read(name).decode(), models) for name in files.captions)
    if (hashed := next(filter(texts.__contains__, hashes), None)) is not None:
        text, info = texts.pop(hashed)
        sample |= {"text": text} | ({"text_info": info} if info else {})
    if texts:
        sample["other_texts"] = {name: text for name, (text, _) in texts.items()}
    return Loaded(sample | ({"caption": captions[0]} if captions else {}))


def _hashes(caption: str, models: tuple[str, ...]) -> Iterator[str]:
    """Yield the possible hashes of a caption in ai-toolkit's file names."""
    text = ", ".join(caption.replace("\r\n", "\n").split(","))  # ai-toolkit adds a second blank after each comma
    text = text.replace("[name]", "").replace("[trigger]", "")
    for model in models:
        info = {"caption": text, "text_embedding_space_version": model, "text_embedding_version": 1}
        digest = hashlib.md5(json.dumps(info, sort_keys=True).encode(), usedforsecurity=False).digest()
        yield base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _load_text(folder: SourceFolder, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a text's tensors, numbered tensors as lists, and its metadata."""
    tensors, metadata = load_safetensors(folder, name)
    info = _info(metadata)
    if "class_name" in info:  # the tensors of such a class may have any names
        return dict(tensors), info
    text: dict[str, Any] = {}
    numbered: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if match := _NUMBERED.fullmatch(key):
            text.setdefault(match[1], [])
            numbered.setdefault(match[1], {})[int(match[2])] = tensor
        else:
            text[key] = tensor
    for key, parts in numbered.items():
        if sorted(parts) != list(range(len(parts))) or not isinstance(text[key], list):
            raise FormatError(f"the tensors {key}_0, {key}_1, … are not complete: {list(tensors)!r:.300}").at(name)
        text[key] = [parts[number] for number in range(len(parts))]
    return text, info


def _load_vision(folder: SourceFolder, name: str) -> Loaded:
    tensors, metadata = load_safetensors(folder, name)
    return Loaded({"clip_vision": tensors, "info": _info(metadata)})


def _info(metadata: dict[str, str]) -> dict[str, Any]:
    """Return the metadata with decoded JSON values: `"12"` becomes `12`."""
    info: dict[str, Any] = {}
    for key in sorted(metadata.keys() - _NOT_INFO):
        info[key] = text = metadata[key]
        if key not in _TEXTS:
            try:
                value = json.loads(text)
                check_depth(value)
                # a text such as `1e5` is not a number that ai-toolkit wrote
                info[key] = value if json.dumps(value) == text else text
            except (ValueError, RecursionError):
                continue  # a text
    return info


FORMAT = Format(
    "ai-toolkit", "ai-toolkit: _latent_cache and _t_e_cache, joined by the names of the images", _FILE, _open
)
