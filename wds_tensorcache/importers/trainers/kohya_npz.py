"""Caches of kohya's sd-scripts: `.npz` files next to each image.

Files, with the size of the image as width x height:

- latents: `{stem}_{width}x{height}_{model}.npz`, where the model is `sd`, `sdxl`, `sd3`, `flux`, `lumina`, `anima` or `hi`
  (HunyuanImage); also `{stem}.npz`, as older versions wrote for SD and SDXL;
- text encoder outputs: `{stem}_te_outputs.npz` (SDXL), `{stem}_{model}_te.npz` (other models);
- captions: `{stem}.caption` or `{stem}.txt`.

They become one sample, with the path of the image without suffix as its name:

    {
        "latents": float32 [C, h, w], for anima [C, 1, h, w],
        "latents_flipped": the latents of the mirrored image, if cached,
        "original_size": int64 [2], width and height of the image,
        "crop_ltrb": int64 [4], the crop of the resized image: left, top, right, bottom, in pixels,
        "alpha_mask": float32 [H, W], in pixels of the bucket, if cached,
        "text": the arrays in the file of text encoder outputs, by their names: {"t5_out": …, "l_pooled": …},
        "caption": "the text of the caption file",
    }

The entries have the same names for all models, also if the file has `latents_64x64` in place of `latents`. A sample has no
`text` or `caption` without such a file; images without latents become samples too. If an image has both a `.caption` and a
`.txt` file, the text of the `.txt` file is `tags`. Arrays that sd-scripts does not write are in `other`.

A file may contain latents of several resolutions: for several training resolutions, or abandoned when a bucket changed.
sd-scripts does not record which resolutions are in use. Each resolution becomes a sample of the same structure, so that batches
and `bucket_by="latents"` work. Names contain the resolution: `photo_64x64` and `photo_128x128` (height x width of the latents).
Each sample contains the text. Choose samples with `cache.filter(lambda entry: entry.shapes["latents"][-2] >= 96)`.
If an image has several files of latents, for example because it was resized, the sizes are in the names: `photo_0512x0512`.
If the folder has the caches of several models, the model comes first: `flux/photo` and `sdxl/photo`.

Latents are stored as sd-scripts wrote them: for SD, SDXL and SD3 without the scale and shift of the model, for FLUX with them.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import list_zip, load_npz
from wds_tensorcache.importers.source import Faults, Format, Loaded, Source, one_or_all
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.importers.trainers.joined_files import ImageFile, Joined, join_files

_NAME = re.compile(
    r"(?P<stem>.+)_(?:(?P<size>\d{4,}x\d{4,})_(?P<model>sd|sdxl|sd3|flux|lumina|anima|hi)"
    r"|te_outputs|(?P<text>sd3|flux|lumina|anima|hi)_te)\.npz",
    re.DOTALL,
)
_RESOLUTION = re.compile(r"(.+?)(_\d+x\d+)?", re.DOTALL)
_ENTRIES = ("latents", "latents_flipped", "original_size", "crop_ltrb", "alpha_mask")
_EXPORTED = b'{\n "caption": '
_NUM_PROBED = 4  # files to open, of the files whose names do not show the format


def _recognize(folder: SourceFolder) -> int:
    """Count the files of this format; 0 if most have another format."""
    names = folder.by_suffix.get(".npz", [])
    unnamed = [name for name in names if not _NAME.fullmatch(name)]
    probed = unnamed[:: -(-len(unnamed) // _NUM_PROBED) or 1]
    # files of `tensorcache export` contain the texts, too, and their captions are in `.json` files
    captions = [values for name in probed if (values := f"{name[:-4]}.json") in folder]
    are_exported = any(folder.read(values).startswith(_EXPORTED) for values in captions)
    arrays = [_arrays(folder, name) for name in probed]
    entries = {_split(array)[0] for of_file in arrays for array in of_file or ()}
    if not are_exported and entries <= {*_ENTRIES} and all(map(_is_old, arrays)):
        return len(names)
    return len(names) - len(unnamed) if 2 * len(unnamed) <= len(names) else 0


def _is_old(arrays: list[str] | None) -> bool:
    """Return whether old sd-scripts may have written these arrays."""
    return {"latents", "original_size", "crop_ltrb"} <= {_split(array)[0] for array in arrays or ()}


def _arrays(folder: SourceFolder, name: str) -> list[str] | None:
    """Return the array names of a file; None if it is damaged."""
    try:
        return [file.filename.removesuffix(".npy") for file in list_zip(folder, name)]
    except FormatError:
        return None


def _split(array: str) -> tuple[str, str]:
    match = _RESOLUTION.fullmatch(array)
    return (match[1], match[2] or "") if match else (array, "")


def _open(folder: SourceFolder) -> Source:
    names = {name: _NAME.fullmatch(name) for name in folder.by_suffix.get(".npz", ())}
    models = {match["model"] or match["text"] or "sdxl" for match in names.values() if match}
    of_old = next(iter(models & {"sd", "sdxl"})) if len(models & {"sd", "sdxl"}) == 1 else "sd_or_sdxl"
    latents, texts, bad, schemes = [], [], Faults(), set()
    for name, match in names.items():
        if match and not match["size"]:
            texts.append(ImageFile(name, match["stem"], match["text"] or "sdxl"))
            continue
        arrays = _arrays(folder, name)
        if not match and arrays is not None and not _is_old(arrays):
            bad[name] = "is not a file of sd-scripts: its name and its arrays differ"
            continue
        ends = list(dict.fromkeys(end for entry, end in map(_split, arrays or ()) if entry == "latents")) or [""]
        schemes |= {"latents_HxW" if end else "latents" for end in ends} if arrays else set()
        stem, size, model = match.group("stem", "size", "model") if match else (name[: -len(".npz")], "", of_old)
        models.add(model)
        latents.append(ImageFile(name, stem, model, size, ends))
    provenance = {"architecture": one_or_all(models), "keys": one_or_all(schemes)} if models else {}
    return join_files(folder, latents, texts, partial(_load, folder), provenance, bad, captions=(".caption", ".txt"))


def _load(folder: SourceFolder, files: Joined) -> Loaded:
    sample: dict[str, Any] = {}
    for file in files.latents:
        arrays = load_npz(folder, file.name)
        if f"latents{files.resolution}" not in arrays:
            raise FormatError("has no array 'latents', nor one such as 'latents_64x64'").at(file.name)
        sample = {entry: arrays[key] for entry in _ENTRIES if (key := entry + files.resolution) in arrays}
        other = {
            array: value
            for array, value in arrays.items()
            if _split(array)[0] not in _ENTRIES or "latents" + _split(array)[1] not in arrays
        }
        sample |= {"other": other} if other else {}
    for text in files.texts:
        sample["text"] = load_npz(folder, text.name)
    texts = [folder.read_text(name) for name in files.captions]
    return Loaded(sample | dict(zip(("caption", "tags"), texts, strict=False)))


FORMAT = Format("kohya", "kohya sd-scripts: .npz files of latents and text encoder outputs", _recognize, _open)
