"""The files that a trainer has written for each image or video, such as latents and text states, joined into samples."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from wds_tensorcache.importers.source import Loaded, SourceSample

_NUM_SHOWN = 4  # resolutions of a file in a note


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file that a trainer has written for an image.

    Attributes:
        name: Relative path of the file.
        stem: Relative path of the image without suffix, from the name of the file.
        model: Model for which the file was written, from its name.
        label: Part of the name that distinguishes files of one image and model, for example the image size.
        resolutions: Endings of the tensor names, one for each resolution: `("_64x64", "_32x64")`.
    """

    name: str
    stem: str
    model: str
    label: str = ""
    resolutions: tuple[str, ...] = ("",)


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
    for files, found in ((latents, images), (texts, texts_of)):
        for file in files:
            found.setdefault((file.model, file.stem), []).append(file)
    has_many_models = len({model for model, _ in (*images, *texts_of)}) > 1
    alone = set(texts_of)
    samples: list[tuple[str, str, ImageFile | None, str, list[ImageFile]]] = []
    for (model, stem), same in images.items():
        key = (model, stem) if (model, stem) in texts_of else (model, text_stem(stem))
        alone.discard(key)
        for file in same:
            label = f"_{file.label}" if len(same) > 1 and file.label else ""
            for resolution in file.resolutions:
                end = resolution if len(file.resolutions) > 1 else ""
                samples.append((model, stem + label + end, file, resolution, texts_of.get(key, [])))
    samples += [(model, stem, None, "", texts_of[model, stem]) for model, stem in sorted(alone)]
    counts = Counter((model, name) for model, name, *_ in samples)
    made = []
    for model, name, image, resolution, text in samples:
        files = [file for file in (image, *text) if file is not None]
        paths = (*(file.name for file in files), *captions(files[0].stem))
        if counts[model, name] > 1:  # the image `a_64x64`, and the resolution 64x64 of the image `a`
            name = os.path.splitext(paths[0])[0] + resolution
        name = f"{model}/{name}" if has_many_models else name
        made.append(SourceSample(name, paths, partial(load, image, resolution, text)))
    return sorted(made, key=lambda sample: sample.name)


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
