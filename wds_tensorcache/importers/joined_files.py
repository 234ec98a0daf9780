"""Formats that are a table of file names: the files of an image or video, such as latents and texts, become a sample."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.importers.safe_files import load_safetensors, read_safetensors_header
from wds_tensorcache.importers.source import Faults, Loaded, SourceSample, one_or_all
from wds_tensorcache.importers.source_folder import SourceFolder

_NUM_SHOWN = 4  # resolutions of a file in a note
_NUM_PROBED = 8  # files whose metadata are read to recognize a format
_DTYPES = {dtype_name(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPE = re.compile(rf"(.+)_({'|'.join(map(re.escape, sorted(_DTYPES, key=len, reverse=True)))})", re.DOTALL)
_RESOLUTION = re.compile(r"((?:latents|alpha_mask).*?)_((?:\d+x)?\d+x\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file that a trainer has written for an image; its name tells stem, model and label."""

    name: str
    stem: str  # path of the image without suffix
    model: str
    label: str = ""  # distinguishes files of one image and model, for example the image size
    resolutions: tuple[str, ...] = ("",)  # endings of the tensor names: `("_64x64", "_32x64")`
    tensors: tuple[str, ...] = ()


class Joined(NamedTuple):
    """The files of one sample: those of latents and texts, and the names of caption files."""

    latents: ImageFile | None
    resolution: str  # ending of the names of its tensors in the file of latents
    texts: Sequence[ImageFile]
    captions: Sequence[str]


def join_files(
    folder: SourceFolder,
    latents: Iterable[ImageFile],
    texts: Iterable[ImageFile],
    load: Callable[[Joined], Loaded],
    text_stem: Callable[[str], str] = str,
    captions: Sequence[str] = (),
) -> list[SourceSample]:
    """Return a sample for each resolution in each file of latents, and for each image that has only files of text states.

    The name of a sample is the stem. If an image has several files of latents, their labels are added. If a file has several
    resolutions, their endings are added. Samples that would have equal names are named like their files instead. If the folder
    has files for several models, the name begins with the model and a slash.

    Args:
        texts: Files of text states. They become part of the samples of latents that have the same stem and model.
        text_stem: Function that returns the stem of texts for a stem of latents. It is called if no text has the stem itself.
        captions: Suffixes of an image's caption files.
    """
    images: dict[tuple[str, str], list[ImageFile]] = {}
    texts_of: dict[tuple[str, str], list[ImageFile]] = {}
    for files, by_stem in ((latents, images), (texts, texts_of)):
        for file in files:
            by_stem.setdefault((file.model, file.stem), []).append(file)
    has_many_models = len({model for model, _ in (*images, *texts_of)}) > 1
    alone = set(texts_of)
    rows: list[tuple[str, str, ImageFile | None, str, list[ImageFile]]] = []
    for (model, stem), same in images.items():
        key = (model, stem) if (model, stem) in texts_of else (model, text_stem(stem))
        alone.discard(key)
        for file in same:
            label = f"_{file.label}" if len(same) > 1 and file.label else ""
            for resolution in file.resolutions:
                end = resolution if len(file.resolutions) > 1 else ""
                rows.append((model, stem + label + end, file, resolution, texts_of.get(key, [])))
    rows += [(model, stem, None, "", texts_of[model, stem]) for model, stem in sorted(alone)]
    counts = Counter((model, name) for model, name, *_ in rows)
    samples = []
    for model, name, image, resolution, text in rows:
        every = [file for file in (image, *text) if file is not None]
        sidecars = [path for suffix in captions if (path := every[0].stem + suffix) in folder]
        if counts[model, name] > 1:  # the image `a_64x64`, and the resolution 64x64 of the image `a`
            name = os.path.splitext(every[0].name)[0] + resolution
        name = f"{model}/{name}" if has_many_models else name
        paths = (*(file.name for file in every), *sidecars)
        samples.append(SourceSample(name, paths, partial(load, Joined(image, resolution, text, sidecars))))
    return sorted(samples, key=lambda sample: sample.name)


def note_resolutions(latents: Sequence[ImageFile]) -> list[str]:
    """Return a note about the files of latents that become several samples, if there are any."""
    several = [file for file in latents if len(file.resolutions) > 1]
    if not several:
        return []
    ends = several[0].resolutions
    sizes = ", ".join(end.removeprefix("_") or "one without a size" for end in ends[:_NUM_SHOWN])
    shown = sizes + ", …" * (len(ends) > _NUM_SHOWN)
    return [
        f"{len(several):,} of {len(latents):,} files of latents have several resolutions, for example {several[0].name}: "
        f"{shown}; the files do not tell which one is in use, so each is a sample, and cache.filter chooses"
    ]


class SuffixedKey(NamedTuple):
    """The parts of a tensor name: `latents_clean_2x_9x64x64_bfloat16` is `latents_clean_2x`, `9x64x64` and `bfloat16`."""

    content: str
    resolution: str = ""
    dtype: str = ""


def parse_key(key: str) -> SuffixedKey:
    """Return the parts of a tensor name. Names that end with `_mask` have no dtype."""
    match = None if key.endswith("_mask") else _DTYPE.fullmatch(key)
    content, dtype = (match[1], match[2]) if match else (key, "")
    match = _RESOLUTION.fullmatch(content)
    return SuffixedKey(match[1], match[2], dtype) if match else SuffixedKey(content, "", dtype)


def short_names(keys: dict[str, SuffixedKey]) -> dict[str, str]:
    """Return the content of each key; if several keys have one content, all but the widest keep their whole names."""
    order = [torch.float32, torch.bfloat16, torch.float16]
    ranks = {
        key: order.index(each) if (each := _DTYPES.get(parts.dtype)) in order else 3 for key, parts in keys.items()
    }
    names: dict[str, str] = {}
    taken: set[str] = set(keys)
    for key in sorted(keys, key=ranks.__getitem__):
        content = keys[key].content
        names[key] = content if content == key or content not in taken else key
        taken.add(content)
    return {key: names[key] for key in keys}


def as_numbers(metadata: dict[str, str], *keys: str, count: int) -> tuple[int, ...]:
    """Return `count` integers of metadata; commas separate those in one entry."""
    texts = ",".join(metadata[key] for key in keys).split(",")
    if len(texts) != count or not all(re.fullmatch(r"\s*-?[0-9]{1,9}\s*", text) for text in texts):
        values = ", ".join(f"{key} {metadata[key]!r:.100}" for key in keys)
        raise FormatError(f"the metadata has {values}, expected {count} integers")
    return tuple(map(int, texts))


@dataclass(frozen=True, slots=True)
class Table:
    """The names of the `.safetensors` files that a program writes for each image; their groups: stem, model, label."""

    program: str
    latents: re.Pattern[str]
    texts: re.Pattern[str]
    is_ours: Callable[[str, dict[str, str]], bool]  # from the name of a file and its metadata
    per_file: dict[str, re.Pattern[str]]  # metadata that belong to one file of "latents" and of "text"

    def recognize(self, folder: SourceFolder) -> int:
        """Return the number of files that fit, if at least half of all do by name, judged by the metadata of some."""
        names = folder.by_suffix.get(".safetensors", [])
        fitting = [name for name in names if self.latents.fullmatch(name) or self.texts.fullmatch(name)]
        if not fitting or 2 * len(fitting) < len(names):
            return 0
        probed = fitting[:: -(-len(fitting) // _NUM_PROBED)]
        return len(fitting) * sum(self.is_ours(name, _peek_header(folder, name)[1]) for name in probed) // len(probed)


class TableFiles:
    """The files of a table in a folder, of which only the headers are read, and what their metadata have in common."""

    def __init__(self, table: Table, folder: SourceFolder) -> None:
        self.folder = folder
        self.latents: list[ImageFile] = []
        self.texts: list[ImageFile] = []
        self.bad = Faults()
        self._per_file = table.per_file
        self._shared: dict[str, dict[str, str]] = {}  # metadata that all files of a kind have
        architectures: set[str] = set()
        scheme: set[str] = set()
        for name in folder.by_suffix.get(".safetensors", ()):
            match = table.latents.fullmatch(name) or table.texts.fullmatch(name)
            tensors, metadata = _peek_header(folder, name)
            if match is None or (metadata and not table.is_ours(name, metadata)):
                self.bad[name] = f"is not a file of {table.program}: its name or its metadata differ"
                continue
            kind, files = ("text", self.texts) if match.re is table.texts else ("latents", self.latents)
            label = match.groupdict().get("label", "")
            files.append(ImageFile(name, match["stem"], match["model"], label, tensors=tuple(tensors)))
            architectures |= {metadata["architecture"]} if metadata else set()
            scheme |= set(map(_scheme, tensors))
            if tensors:
                entries = {key: text for key, text in metadata.items() if not self._per_file[kind].fullmatch(key)}
                self._shared[kind] = dict(sorted(entries.items() & self._shared.get(kind, entries).items()))
        self.provenance = {
            "architecture": one_or_all(architectures),
            "metadata": {kind: self._shared.get(kind, {}) for kind in self._per_file},
            "keys": sorted(scheme),
        }

    def load(
        self, add: Callable[[dict[str, Any], ImageFile, Joined, dict[str, Any], dict[str, str]], str], files: Joined
    ) -> Loaded:
        """Read the files of a sample.

        Args:
            add: Function that puts tensors and metadata of a file into a sample. It returns the name under which the sample's
                `metadata` has the entries that not all files share.
        """
        sample: dict[str, Any] = {}
        more: dict[str, dict[str, str]] = {}
        for file in filter(None, (files.latents, *files.texts)):
            tensors, metadata = load_safetensors(self.folder, file.name)
            kind = "latents" if file is files.latents else "text"
            try:
                name = add(sample, file, files, tensors, metadata)
            except FormatError as exc:
                raise exc.at(file.name) from exc
            shared = self._shared.get(kind, {})
            rest = {key: text for key, text in sorted(metadata.items()) if shared.get(key) != text}
            rest = {key: text for key, text in rest.items() if not self._per_file[kind].fullmatch(key)}
            more |= {name: rest} if rest else {}
        return Loaded(sample | ({"metadata": more} if more else {}))


def _peek_header(folder: SourceFolder, name: str) -> tuple[list[str], dict[str, str]]:
    """Return tensor names and metadata; none for a damaged file, whose fault `load_safetensors` raises later."""
    try:
        return read_safetensors_header(folder, name)
    except (TensorCacheError, OSError):
        return [], {}


def _scheme(key: str) -> str:
    """Return a tensor name with placeholders: `latents_FxHxW_dtype`."""
    content, resolution, dtype = parse_key(key)
    size = ("", "_HxW", "_FxHxW")[resolution.count("x")]
    return re.sub(r"_\d+(?=_|$)", "_N", content) + size + ("_dtype" if dtype else "")
