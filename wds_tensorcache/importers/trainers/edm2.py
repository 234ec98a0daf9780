"""EDM2 and REPA: means and standard deviations of latents, with their classes.

The tool `dataset_tool.py encode` of EDM2 writes `.npy` files into a folder, or into a zip without compression:

- `{index[:5]}/img-mean-std-{index}.npy`, where the index has 8 digits: float32 [8, h, w], the 4 means of a latent's
  distribution, followed by its 4 standard deviations, neither scaled nor shifted;
- `dataset.json`: `{"labels": [["00000/img-mean-std-00000000.npy", 6], …]}`, or `{"labels": null}`.

REPA writes the same files into a folder `vae-sd`, next to a folder `images` with the pictures: `00000/img00000000.png`. REPA
matches the pictures with the latents by their positions in sorted order.

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
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from zipfile import ZIP_STORED, ZipInfo

import torch

from wds_tensorcache.errors import FormatError, list_names
from wds_tensorcache.importers.safe_files import as_tensor, list_zip
from wds_tensorcache.importers.source import Faults, Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder, naming
from wds_tensorcache.integrations.arrays import check_content, parse_npy, view_content

_MOMENTS = re.compile(r"((?:.*/)?)(\d{5}/img-mean-std-\d{8}\.npy)", re.DOTALL | re.ASCII)
_IMAGES, _FEATURES = "images/", "vae-sd/"
_PICTURE = re.compile(r".+/img\d{8}\.(png|jpe?g|webp)", re.DOTALL | re.ASCII | re.IGNORECASE)
_LABELS = "dataset.json"
_Read = Callable[[str], memoryview]


def _recognize(folder: SourceFolder) -> int:
    count = sum(_MOMENTS.fullmatch(name) is not None for name in folder.by_suffix.get(".npy", ()))
    for name in folder.by_suffix.get(".zip", ()):
        with suppress(FormatError):  # such a zip is reported if other files are recognized
            count += any(_MOMENTS.fullmatch(file.filename) for file in list_zip(folder, name))
    return count


def _open(folder: SourceFolder) -> Source:
    samples: list[SourceSample] = []
    bad = Faults()
    notes: list[str] = []
    used = _add(samples, bad, folder.names, folder.view)
    for name in folder.by_suffix.get(".zip", ()):
        with bad.of(name):
            files = {file.filename: file for file in list_zip(folder, name) if not file.is_dir()}
            used_there = _add(samples, bad, sorted(files), partial(_view_zipped, folder, name, files), name)
            if not used_there:
                raise FormatError("has no files of moments")
            if rest := sorted(files.keys() - used_there):
                notes.append(f"{len(rest):,} files in {name} were not used, for example {list_names(rest[:3])}")
    return Source(samples, {}, bad, sorted(used), notes)


def _view_zipped(folder: SourceFolder, name: str, files: dict[str, ZipInfo], file: str) -> memoryview:
    """View a stored file in a zip, and check its CRC."""
    with naming(name), naming(f"{file!r:.200}"):
        if files[file].compress_type != ZIP_STORED:
            raise FormatError("is compressed, expected a stored file")
        content: memoryview = view_content(partial(folder.view, name), files[file])
        check_content(content, files[file])
        return content


def _add(samples: list[SourceSample], bad: Faults, names: Collection[str], read: _Read, archive: str = "") -> set[str]:
    """Add samples and faults of a folder or zip; return used files."""
    prefix = f"{archive[:-4]}/" if archive else ""
    roots: dict[str, list[str]] = {}
    all_used: set[str] = set()
    for match in filter(None, map(_MOMENTS.fullmatch, names)):
        roots.setdefault(match[1], []).append(match[2])
    for root, files in roots.items():
        listed = root + _LABELS
        labels = None
        with bad.of(prefix + listed):
            labels = _read_labels(read, listed) if listed in names else None
        pictures = _pictures(root, names, len(files), prefix, bad)
        all_used.update((listed, *(root + file for file in files), *filter(None, pictures)))
        for file, picture in zip(files, pictures, strict=True):
            label = None if labels is None else labels.pop(file, None)
            if labels is not None and label is None:
                bad[prefix + root + file] = f"has no label in {listed}"
                continue
            more_files = [picture, None if label is None else listed]
            used = (archive,) if archive else (root + file, *filter(None, more_files))
            load = partial(_load, read, root + file, label, picture)
            samples.append(SourceSample(prefix + (root + file)[:-4], used, load))
        if labels:
            first = next(iter(labels))
            bad[prefix + listed] = f"has labels of {len(labels):,} missing files, for example {first!r:.200}"
    return all_used


def _read_labels(read: _Read, name: str) -> dict[str, torch.Tensor] | None:
    """Return the labels by file; None if the file lists no labels."""
    listed = json.loads(bytes(read(name)))["labels"]
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


def _pictures(root: str, names: Collection[str], count: int, prefix: str, bad: Faults) -> list[str | None]:
    """Return REPA's picture for each file of moments, by position."""
    pictures: list[str | None] = []
    if f"/{root}".endswith(f"/{_FEATURES}"):
        parent = root[: -len(_FEATURES)] + _IMAGES
        pictures += [name for name in names if name.startswith(parent) and _PICTURE.fullmatch(name)]
        if pictures and len(pictures) != count:
            bad[prefix + parent] = f"has {len(pictures):,} pictures for {count:,} latents, so they cannot be matched"
    return pictures if len(pictures) == count else [None] * count


def _load(read: _Read, name: str, label: torch.Tensor | None, picture: str | None) -> Loaded:
    with naming(name):
        moments = as_tensor(parse_npy(read(name)))
        if not isinstance(moments, torch.Tensor) or moments.ndim < 3 or moments.shape[-3] % 2:
            form = f"{moments.dtype}{list(moments.shape)}"
            raise FormatError(f"is {form}, expected means and deviations [2 * C, h, w]")
    members = {os.path.splitext(picture)[1][1:].lower(): bytes(read(picture))} if picture else {}
    return Loaded({"moments": moments} | ({} if label is None else {"label": label}), members)


FORMAT = Format(
    "edm2", "EDM2, REPA: img-mean-std-*.npy in a folder or an uncompressed zip, with labels", _recognize, _open
)
