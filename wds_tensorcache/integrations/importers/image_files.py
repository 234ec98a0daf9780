"""The files that a trainer has written for each image or video, such as latents and text states, joined into samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from wds_tensorcache.integrations.importers.source import Loaded, SourceSample

__all__ = ["ImageFile", "join_files"]


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
) -> list[SourceSample]:
    """Return a sample for each resolution in each file of latents, and for each image that has only files of text states.

    The name of a sample is the stem. If an image has several files of latents, their labels are added; if a file has several
    resolutions, their endings are added. If the files are of several models, the model is the first part of the path.

    Args:
        latents: Files of latents.
        texts: Files of text states. The files with the stem and model of a file of latents become part of its samples.
        load: Function that reads a sample. It receives the file of latents or None, the resolution, and the files of text
            states.
        text_stem: Function that returns the stem of the text for a stem of latents, if no text has the same stem.
    """
    images: dict[tuple[str, str], list[ImageFile]] = {}
    by_image: dict[tuple[str, str], list[ImageFile]] = {}
    for files, found in ((latents, images), (texts, by_image)):
        for file in files:
            found.setdefault((file.model, file.stem), []).append(file)
    alone = set(by_image)
    prefixed = len({model for model, _ in (*images, *by_image)}) > 1
    samples = []
    for (model, stem), same in images.items():
        key = (model, stem) if (model, stem) in by_image else (model, text_stem(stem))
        alone.discard(key)
        text = by_image.get(key, [])
        for file in same:
            for resolution in file.resolutions:
                name = f"{model}/{stem}" if prefixed else stem
                name += f"_{file.label}" if len(same) > 1 and file.label else ""
                name += resolution if len(file.resolutions) > 1 else ""
                paths = (file.name, *(each.name for each in text))
                samples.append(SourceSample(name, paths, partial(load, file, resolution, text)))
    for model, stem in alone:
        text = by_image[model, stem]
        name = f"{model}/{stem}" if prefixed else stem
        samples.append(SourceSample(name, tuple(each.name for each in text), partial(load, None, "", text)))
    return sorted(samples, key=lambda sample: sample.name)
