"""Formats that are a table of file names: the files of an image or video, such as latents and texts, become a sample."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from wds_tensorcache.importers.source import Loaded, SourceSample, one_or_all
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.importers.suffixed_keys import CommonMetadata, peek_header

_NUM_SHOWN = 4  # resolutions of a file in a note
_NUM_PROBED = 8  # files whose metadata are read to recognize a format


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file that a trainer has written for an image.

    Attributes:
        name: Relative path of the file.
        stem: Relative path of the image without suffix, from the name of the file.
        model: Model for which the file was written, from its name.
        label: Part of the name that distinguishes files of one image and model, for example the image size.
        resolutions: Endings of the tensor names, one for each resolution: `("_64x64", "_32x64")`.
        tensors: Names of the tensors, if they were read.
    """

    name: str
    stem: str
    model: str
    label: str = ""
    resolutions: tuple[str, ...] = ("",)
    tensors: tuple[str, ...] = ()


def join_files(
    latents: Iterable[ImageFile],
    texts: Iterable[ImageFile],
    load: Callable[[ImageFile | None, str, Sequence[ImageFile]], Loaded],
    text_stem: Callable[[str], str] = str,
    captions: Callable[[str], Sequence[str]] = lambda stem: (),
) -> list[SourceSample]:
    """Return a sample for each resolution in each file of latents, and for each image that has only files of text states.

    The name of a sample is the stem. If an image has several files of latents, their labels are added. If a file has several
    resolutions, their endings are added. Samples that would have equal names are named like their files instead. If the folder
    has files for several models, the name begins with the model and a slash.

    Args:
        latents: Files of latents.
        texts: Files of text states. They become part of the samples of latents that have the same stem and model.
        load: Function that reads a sample. It receives the file of latents or None, the resolution, and the files of text
            states.
        text_stem: Function that returns the stem of texts for a stem of latents. It is called if no text has the stem itself.
        captions: Function that returns the names of an image's caption files for its stem.
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
        paths = (*(file.name for file in every), *captions(every[0].stem))
        if counts[model, name] > 1:  # the image `a_64x64`, and the resolution 64x64 of the image `a`
            name = os.path.splitext(paths[0])[0] + resolution
        name = f"{model}/{name}" if has_many_models else name
        samples.append(SourceSample(name, paths, partial(load, image, resolution, text)))
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


@dataclass(slots=True)
class JoinedFiles:
    """The `.safetensors` files of latents and texts in a folder, and what their metadata have in common."""

    latents: list[ImageFile] = field(default_factory=list)
    texts: list[ImageFile] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    architectures: set[str] = field(default_factory=set)
    metadata: dict[str, CommonMetadata] = field(default_factory=dict)

    @property
    def provenance(self) -> dict[str, Any]:
        return {
            "architecture": one_or_all(self.architectures),
            "metadata": {kind: common.shared for kind, common in self.metadata.items()},
            "keys": sorted(set().union(*(common.scheme for common in self.metadata.values()))),
        }


@dataclass(frozen=True, slots=True)
class Table:
    """The names of the `.safetensors` files that a program writes for each image.

    Attributes:
        program: Name of the program.
        latents, texts: Patterns of the names. Their groups are the stem, the model, and for some a label.
        is_ours: Function that returns whether a file with this name and these metadata is one of the program.
        per_file: For "latents" and "text", the pattern of the metadata that belong to one file.
    """

    program: str
    latents: re.Pattern[str]
    texts: re.Pattern[str]
    is_ours: Callable[[str, dict[str, str]], bool]
    per_file: dict[str, str]

    def recognize(self, folder: SourceFolder) -> int:
        """Return the number of files that fit, if at least half of all do by name, judged by the metadata of some."""
        names = folder.by_suffix.get(".safetensors", [])
        fitting = [name for name in names if self.latents.fullmatch(name) or self.texts.fullmatch(name)]
        if not fitting or 2 * len(fitting) < len(names):
            return 0
        probed = fitting[:: -(-len(fitting) // _NUM_PROBED)]
        return len(fitting) * sum(self.is_ours(name, peek_header(folder, name)[1]) for name in probed) // len(probed)

    def find(self, folder: SourceFolder) -> JoinedFiles:
        """Return the files in a folder; only their headers are read."""
        files = JoinedFiles(metadata={kind: CommonMetadata(re.compile(keys)) for kind, keys in self.per_file.items()})
        for name in folder.by_suffix.get(".safetensors", ()):
            match = self.latents.fullmatch(name) or self.texts.fullmatch(name)
            tensors, metadata = peek_header(folder, name)
            if match is None or (metadata and not self.is_ours(name, metadata)):
                files.bad[name] = f"is not a file of {self.program}: its name or its metadata differ"
                continue
            is_text = match.re is self.texts
            groups = {"label": "", **match.groupdict()}
            (files.texts if is_text else files.latents).append(
                ImageFile(name, groups["stem"], groups["model"], groups["label"], tensors=tuple(tensors))
            )
            if tensors:
                files.metadata["text" if is_text else "latents"].add(tensors, metadata)
            files.architectures |= {metadata["architecture"]} if metadata else set()
        return files
