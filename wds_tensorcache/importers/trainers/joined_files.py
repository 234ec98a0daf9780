"""Samples joined from a trainer's files, such as latents and texts."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from wds_tensorcache.errors import FormatError, format_count
from wds_tensorcache.importers.safe_files import load_safetensors, read_safetensors_header
from wds_tensorcache.importers.source import Faults, Loaded, Source, SourceSample, one_or_all
from wds_tensorcache.importers.source_folder import SourceFolder, naming

_NUM_SHOWN = 4  # resolutions of a file in a note
_NUM_PROBED = 8  # files whose metadata are read to recognize a format
_WIDEST = ("float32", "fp32", "bfloat16", "bf16", "float16", "fp16")
_DTYPE = re.compile(
    r"(.*?)(?:_((?:b?float|complex|u?int)(?:8|16|32|64|128)(?:_e\dm\d\w*)?|fp32|bf16|fp16|bool))?", re.ASCII | re.DOTALL
)
_LATENTS = re.compile(
    r"(?P<stem>.+?)(?:_(?P<label>\d{4,}x\d{4,})|(?=_as\.|_[a-z0-9]+_audio\.))"  # only sounds have no size
    r"_(?P<model>[a-z][a-z0-9]*)(?P<audio>_audio)?\.safetensors",
    re.DOTALL,
)
_RESOLUTION = re.compile(r"((?:(?:audio_)?latents|alpha_mask).*?)(_(?:\d+x)?\d+x\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A trainer's file for an image, with the parts of its name."""

    name: str
    stem: str  # path of the image without suffix
    model: str
    label: str = ""  # distinguishes files of one image and model, for example the image size
    resolutions: Sequence[str] = ("",)  # endings of the tensor names: `("_64x64", "_32x64")`
    tensors: Sequence[str] = ()
    audio: str = ""  # not empty for a file of sounds; the latents of the video are in another file


class Joined(NamedTuple):
    """The files of one sample."""

    latents: Sequence[ImageFile]  # one file, perhaps followed by its sound; or none
    resolution: str  # ending of the names of its tensors in the file of latents
    texts: Sequence[ImageFile]
    captions: Sequence[str]  # names of files


def join_files(
    folder: SourceFolder,
    latents: Sequence[ImageFile],
    texts: Iterable[ImageFile],
    load: Callable[[Joined], Loaded],
    provenance: Mapping[str, Any],
    bad: Faults,
    text_stem: Callable[[str], str] = str,
    captions: Sequence[str] = (),
    others: Sequence[SourceSample] = (),
) -> Source:
    """Join files of latents and texts into samples.

    Each resolution in a file of latents is a sample, and so is an image that has only texts. The name of a sample is the stem.
    If an image has several files of latents, their labels are added. If a file has several resolutions, their endings are
    added. Samples that would have equal names are named like their files instead. If the folder has files for several models,
    the name begins with the model and a slash.

    Args:
        latents: Files of latents, and of sounds, which join the latents with the same label.
        texts: Files of texts. They become part of the samples of latents with the same stem and model.
        provenance, bad: As for `Source`.
        text_stem: Function that returns the stem of texts for a stem of latents. It is called if no text has the same stem as
            the latents.
        captions: Suffixes of an image's caption files.
    """
    images: dict[tuple[str, str], list[ImageFile]] = {}
    texts_of: dict[tuple[str, str], list[ImageFile]] = {}
    for listed, by_stem in ((latents, images), (texts, texts_of)):
        for file in listed:
            by_stem.setdefault((file.model, file.stem), []).append(file)
    has_many_models = len({model for model, _ in (*images, *texts_of)}) > 1
    alone = set(texts_of)
    # model and name of each sample, its files of latents and sound, their resolution, its files of texts
    rows: list[tuple[str, str, list[ImageFile], str, list[ImageFile]]] = []
    sounds = {(file.model, file.stem, file.label): file for file in latents if file.audio}
    for (model, stem), files in images.items():
        image_labels = {file.label for file in files if not file.audio}
        files = [file for file in files if not file.audio or file.label not in image_labels]
        key = (model, stem) if (model, stem) in texts_of else (model, text_stem(stem))
        alone.discard(key)
        for file in files:
            label = f"_{file.label}" if len(files) > 1 and file.label else ""
            for resolution in file.resolutions:
                end = resolution if len(file.resolutions) > 1 else ""
                sound = sounds.get((model, stem, file.label), file)
                image = [file, sound] if sound is not file else [file]
                rows.append((model, stem + label + end, image, resolution, texts_of.get(key, [])))
    rows += [(model, stem, [], "", texts_of[model, stem]) for model, stem in sorted(alone)]
    counts = Counter((model, name) for model, name, *_ in rows)
    samples = [*others]
    for model, name, image, resolution, text in rows:
        files = [*image, *text]
        if counts[model, name] > 1:  # the image `a_64x64`, and the resolution 64x64 of the image `a`
            name = os.path.splitext(files[0].name)[0] + resolution
        name = f"{model}/{name}" if has_many_models else name
        sidecars = [path for suffix in captions if (path := files[0].stem + suffix) in folder]
        paths = (*(file.name for file in files), *sidecars)
        samples.append(SourceSample(name, paths, partial(load, Joined(image, resolution, text, sidecars))))
    samples.sort(key=lambda sample: sample.name)
    return Source(samples, provenance, bad, notes=[*_note_resolutions(latents), *_note_files(images.values())])


def _note_resolutions(latents: Sequence[ImageFile]) -> list[str]:
    """Return a note if files of latents have several resolutions."""
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


def _note_files(images: Iterable[list[ImageFile]]) -> list[str]:
    """Return a note if images have several files of latents besides flips."""
    candidates = [[file for file in files if not file.audio and not file.label.startswith("flip_")] for files in images]
    repeated = [files for files in candidates if len(files) > 1]
    if not repeated:
        return []
    first, second, *_ = repeated[0]
    return [
        f"{format_count(len(repeated), 'image')} with several files of latents, for example {first.name} and {second.name}; "
        "the names do not tell which one is in use, so each is a sample"
    ]


class Key(NamedTuple):
    """The parts of a tensor name: `latents_clean_2x_9x64x64_bfloat16` is `latents_clean_2x`, `_9x64x64` and `bfloat16`."""

    content: str
    resolution: str
    dtype: str


@lru_cache(1 << 10)  # most files have the same names
def parse_key(key: str) -> Key:
    """Return the parts of a tensor name; missing parts are empty."""
    match = _DTYPE.fullmatch(key)
    content, dtype = match.groups("") if match else (key, "")
    match = _RESOLUTION.fullmatch(content)
    return Key(match[1], match[2], dtype) if match else Key(content, "", dtype)


def find_resolutions(keys: Iterable[str]) -> list[str]:
    """Return the distinct resolutions of tensors called `latents`, such as `_64x64`. "" stands for a name without one."""
    return list(dict.fromkeys(key.resolution for key in map(parse_key, keys) if key.content == "latents"))


def name_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Shorten tensor keys to their content, such as `latents`, and sort tensors.

    If several keys declare the same content, only the tensor with the widest dtype is renamed. If a key is equal to the
    content, no tensor is renamed to it.
    """

    def rank(key: str) -> int:
        dtype = parse_key(key).dtype
        return _WIDEST.index(dtype) // 2 if dtype in _WIDEST else len(_WIDEST)

    named: dict[str, torch.Tensor] = {}
    for key in sorted(tensors, key=rank):
        content = parse_key(key.removeprefix("varlen_")).content
        named[key if content in named or content in tensors else content] = tensors[key]
    return dict(sorted(named.items()))


class Content(NamedTuple):
    """A file's content, and the resolution that belongs to the sample."""

    file: ImageFile
    resolution: str | None  # ending of the names of its tensors; None for a file of texts
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]

    def name_latents(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return tensors by name, and `original_size` if the metadata contains it. Raise FormatError without `latents`."""
        sample: dict[str, Any] = {**name_tensors(tensors)}
        if "latents" not in sample:
            raise FormatError("has no tensor 'latents_…'")
        if {"width", "height"} <= self.metadata.keys() and any(size := self.numbers("width", "height", count=2)):
            sample["original_size"] = size
        return sample

    def numbers(self, *keys: str, count: int) -> tuple[int, ...]:
        """Return `count` comma-separated integers of the metadata, or raise FormatError."""
        texts = ",".join(self.metadata[key] for key in keys).split(",")
        if len(texts) != count or not all(re.fullmatch(r"\s*-?[0-9]{1,9}\s*", text) for text in texts):
            values = ", ".join(f"{key} {self.metadata[key]!r:.100}" for key in keys)
            raise FormatError(f"the metadata has {values}, expected {count} integers")
        return tuple(map(int, texts))


@dataclass(frozen=True, slots=True)
class Table:
    """A description of the `.safetensors` files of a program."""

    program: str
    texts: re.Pattern[str]  # names of files of texts, with the groups stem, model and perhaps label
    has_crops: bool  # whether the metadata of latents contains the crop
    per_file: dict[str, re.Pattern[str]]  # keys of metadata that differ in each file of "latents" and "text"

    def match(self, name: str) -> re.Match[str] | None:
        """Match a file name, with the groups stem, model and perhaps label."""
        return _LATENTS.fullmatch(name) or self.texts.fullmatch(name)

    def is_ours(self, match: re.Match[str], metadata: dict[str, str]) -> bool:
        """Return whether the program may have written such a file."""
        has_crops = any(key.startswith("crop_ltrb") for key in metadata)
        is_kind = match.re is self.texts or has_crops == self.has_crops
        return is_kind and {"architecture", "format_version"} <= metadata.keys()

    def recognize(self, folder: SourceFolder) -> int:
        """Estimate the number of the program's files from a few headers."""
        names = folder.by_suffix.get(".safetensors", [])
        fitting = list(filter(None, map(self.match, names)))
        # most files are of another program
        if not fitting or 2 * len(fitting) < len(names):
            return 0
        probed = fitting[:: -(-len(fitting) // _NUM_PROBED)]
        num_ours = sum(self.is_ours(match, _peek_header(folder, match[0])[1]) for match in probed)
        return len(fitting) * num_ours // len(probed)


class TableFiles:
    """A program's files in a folder, and metadata that they share. The constructor reads only headers."""

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
            match = table.match(name)
            tensors, metadata = _peek_header(folder, name)
            if match is None or (metadata and not table.is_ours(match, metadata)):
                self.bad[name] = f"is not a file of {table.program}: its name or its metadata differ"
                continue
            kind, files = ("text", self.texts) if match.re is table.texts else ("latents", self.latents)
            files.append(ImageFile(name, **match.groupdict(""), tensors=tensors))
            architectures |= {metadata["architecture"]} if metadata else set()
            scheme |= set(map(_scheme, tensors))
            if tensors:
                entries = self._without_per_file(kind, metadata)
                self._shared[kind] = dict(sorted(entries.items() & self._shared.get(kind, entries).items()))
        self.provenance: dict[str, Any] = {
            "architecture": one_or_all(architectures),
            "metadata": {kind: self._shared.get(kind, {}) for kind in table.per_file},
            "keys": sorted(scheme),
        }

    def join(self, add: Callable[[dict[str, Any], Content], str], text_stem: Callable[[str], str] = str) -> Source:
        """Join the files into samples.

        Args:
            add: Function that puts the content of a file into a sample. It returns the key under which the sample's `metadata`
                contains the entries that not all files share.
            text_stem: As for `join_files`.
        """

        def load(joined: Joined) -> Loaded:
            sample: dict[str, Any] = {}
            more: dict[str, dict[str, str]] = {}
            for file in (*joined.latents, *joined.texts):
                resolution = joined.resolution if file in joined.latents else None
                content = Content(file, resolution, *load_safetensors(self.folder, file.name))
                with naming(file.name):
                    name = add(sample, content)
                kind = "text" if resolution is None else "latents"
                entries = self._without_per_file(kind, content.metadata)
                rest = dict(sorted(entries.items() - self._shared.get(kind, {}).items()))
                more |= {name: rest} if rest else {}
            return Loaded(sample | ({"metadata": more} if more else {}))

        return join_files(self.folder, self.latents, self.texts, load, self.provenance, self.bad, text_stem)

    def _without_per_file(self, kind: str, metadata: dict[str, str]) -> dict[str, str]:
        return {key: text for key, text in metadata.items() if not self._per_file[kind].fullmatch(key)}


def _peek_header(folder: SourceFolder, name: str) -> tuple[list[str], dict[str, str]]:
    """Return tensor names and metadata; both are empty for damaged files."""
    try:
        tensors, metadata = read_safetensors_header(folder, name)
        return list(tensors), metadata
    except FormatError:
        return [], {}


def _scheme(key: str) -> str:
    """Return a tensor name with placeholders, such as `latents_FxHxW_dtype`."""
    content, resolution, dtype = parse_key(key)
    size = ("", "_HxW", "_FxHxW")[resolution.count("x")]
    return re.sub(r"_\d+(?=_|$)", "_N", content) + size + ("_dtype" if dtype else "")
