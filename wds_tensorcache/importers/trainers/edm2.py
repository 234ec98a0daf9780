"""EDM2 and REPA: means and standard deviations of latents as `.npy` files, with their classes, in a folder or a zip.

The tool `dataset_tool.py encode` of EDM2 writes a folder, or a zip without compression:

- `{index[:5]}/img-mean-std-{index}.npy`, where the index has 8 digits: float32 [8, h, w], the 4 means of a latent's
  distribution, followed by its 4 standard deviations, neither scaled nor shifted;
- `dataset.json`: `{"labels": [["00000/img-mean-std-00000000.npy", 6], …]}`, or `{"labels": null}`.

REPA writes the same into a folder `vae-sd`, next to a folder `images` with the pictures: `00000/img00000000.png`. It matches
the pictures with the latents by their positions in sorted order.

Each sample is one such file:

    {"moments": float32 [8, h, w], "label": int64 []}

A label that is a list of numbers becomes float32 [L]; without labels, there is no `label`. REPA's pictures are members of
the sample, for example `png`. `tc.sample_moments("moments", to="latent")` draws `mean + std * noise` in the loader, as both
programs do. Then EDM2 shifts and scales each channel; REPA multiplies by 0.18215.

The name of a sample is the path of its file without suffix; files in a zip have the zip's path first:
`imagenet/00000/img-mean-std-00000000`. Files in a zip are read by position. Nothing is extracted.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from wds_tensorcache.errors import FormatError, TensorCacheError, list_names
from wds_tensorcache.importers.safe_files import as_tensor, list_zip, view_zip_file
from wds_tensorcache.importers.source import Faults, Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.integrations.arrays import parse_npy

_MOMENTS = re.compile(r"((?:.*/)?)(\d{5}/img-mean-std-\d{8}\.npy)", re.DOTALL | re.ASCII)
_IMAGES, _FEATURES = "images/", "vae-sd/"
_PICTURE = re.compile(r".+/img\d{8}\.(png|jpe?g|webp)", re.DOTALL | re.ASCII | re.IGNORECASE)
_LABELS = "dataset.json"
_MAX_LABELS_NBYTES = 1 << 30
_Read = Callable[[str], "memoryview | bytes"]


def _recognize(folder: SourceFolder) -> int:
    count = sum(_MOMENTS.fullmatch(name) is not None for name in folder.by_suffix.get(".npy", ()))
    for name in folder.by_suffix.get(".zip", ()):
        try:
            count += any(_MOMENTS.fullmatch(file.filename) for file in list_zip(folder, name))
        except (TensorCacheError, OSError):
            continue  # such a zip is reported if other files are recognized
    return count


def _open(folder: SourceFolder) -> Source:
    """Find the files of moments and the labels in the folder and in its zips."""
    samples: list[SourceSample] = []
    bad = Faults()
    notes: list[str] = []
    used = _add(samples, bad, folder.names, folder.view, "", None)
    for name in folder.by_suffix.get(".zip", ()):
        with bad.of(name):
            files = {file.filename: file for file in list_zip(folder, name) if not file.is_dir()}
            read = partial(_read_zipped, folder, name, files)
            used_there = _add(samples, bad, sorted(files), read, f"{name[:-4]}/", name)
            if not used_there:
                raise FormatError("has no files of moments")
            if rest := sorted(files.keys() - used_there):
                notes.append(f"{len(rest):,} files in {name} were not used, for example {list_names(rest[:3])}")
    return Source(samples, {}, bad, sorted(used), notes)


def _read_zipped(folder: SourceFolder, name: str, files: dict[str, Any], file: str) -> memoryview:
    return view_zip_file(folder, name, files[file])


def _add(
    samples: list[SourceSample],
    bad: Faults,
    names: Sequence[str],
    read: _Read,
    prefix: str,
    archive: str | None,
) -> set[str]:
    """Add the samples of a folder or zip, and its faults; return the names of the files that it uses."""
    roots: dict[str, list[str]] = {}
    all_used: set[str] = set()
    for name in names:
        if match := _MOMENTS.fullmatch(name):
            roots.setdefault(match[1], []).append(match[2])
    for root, files in roots.items():
        labels = None
        with bad.of(prefix + root + _LABELS):
            labels = _read_labels(read, root + _LABELS) if root + _LABELS in names else None
        pictures = _pictures(root, names, len(files), prefix, bad)
        all_used.update((root + _LABELS, *(root + file for file in files), *filter(None, pictures)))
        for file, picture in zip(files, pictures, strict=True):
            label = None if labels is None else labels.pop(file, None)
            if labels is not None and label is None:
                bad[prefix + root + file] = f"has no label in {root}{_LABELS}"
                continue
            used = tuple(name for name in (root + file, picture) if name)
            load = partial(_load, read, root + file, label, picture)
            samples.append(SourceSample(prefix + (root + file)[:-4], (archive,) if archive else used, load))
        if labels:
            bad[prefix + root + _LABELS] = (
                f"has labels of {len(labels):,} missing files, for example {next(iter(labels))!r:.200}"
            )
    return all_used


def _read_labels(read: _Read, name: str) -> dict[str, torch.Tensor] | None:
    """Return the labels by file; None if there are none."""
    try:
        content = read(name)
        if len(content) > _MAX_LABELS_NBYTES:
            raise FormatError(f"has {len(content):,} bytes, expected at most {_MAX_LABELS_NBYTES:,}")
        listed = json.loads(bytes(content))["labels"]
        if listed is None:
            return None
        labels = {}
        for file, label in listed:
            is_vector = isinstance(label, list) and all(type(part) in (int, float) for part in label)
            if not isinstance(file, str) or not (is_vector or type(label) is int):
                raise FormatError(f"{[file, label]!r:.200} is not a file with its label")
            dtype = torch.float32 if is_vector else torch.int64
            labels[file.replace("\\", "/")] = torch.tensor(label, dtype=dtype)
        return labels
    except (FormatError, ValueError, TypeError, KeyError, RuntimeError, OverflowError, RecursionError) as exc:
        raise FormatError(f"has no list of labels: {exc!r:.300}") from exc


def _pictures(root: str, names: Sequence[str], count: int, prefix: str, bad: Faults) -> list[str | None]:
    """Return REPA's picture of each file in `vae-sd`, by position."""
    parent = root[: -len(_FEATURES)] + _IMAGES
    if not f"/{root}".endswith(f"/{_FEATURES}"):
        return [None] * count
    found = [name for name in names if name.startswith(parent) and _PICTURE.fullmatch(name)]
    if found and len(found) != count:
        bad[prefix + parent] = f"has {len(found):,} pictures for {count:,} latents, so they cannot be matched"
    return [*found] if len(found) == count else [None] * count


def _load(read: _Read, name: str, label: torch.Tensor | None, picture: str | None) -> Loaded:
    try:
        moments = as_tensor(parse_npy(memoryview(read(name))))
    except TensorCacheError as exc:
        raise exc.at(name) from exc
    except Exception as exc:  # numpy raises many kinds of exceptions
        raise FormatError(f"cannot be decoded: {exc!r:.300}").at(name) from exc
    if not isinstance(moments, torch.Tensor) or moments.ndim < 3 or moments.shape[-3] % 2:
        raise FormatError(f"is {moments.dtype}{list(moments.shape)}, expected means and deviations [2 * C, h, w]").at(
            name
        )
    members = {os.path.splitext(picture)[1][1:].lower(): bytes(read(picture))} if picture else {}
    return Loaded({"moments": moments} | ({} if label is None else {"label": label}), members)


FORMAT = Format(
    "edm2", "EDM2, REPA: img-mean-std-*.npy in a folder or an uncompressed zip, with labels", _recognize, _open
)
