"""Formats, and the samples that they find in a folder; samples are read on request."""

from __future__ import annotations

import os.path
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.source_folder import SourceFolder


@dataclass(frozen=True, slots=True)
class Loaded:
    """One sample in memory.

    Attributes:
        value: Nested structure of tensors and small values.
        members: Other members by extension: `{"jpg": b"…"}`.
    """

    value: Any
    members: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceSample:
    """One sample of a source, not read yet.

    Attributes:
        name: Name in the source, for example a relative path without suffix. `tc.safe_key` makes the key from it.
        files: Relative paths of the files from which it is read.
        load: Function that reads it. It raises FormatError or OSError if a file is bad, and may run in any thread.
        key: Key of the sample; None to make it from the name.
    """

    name: str
    files: tuple[str, ...]
    load: Callable[[], Loaded]
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The samples that an importer has found in a folder.

    Attributes:
        samples: Samples in a fixed order, with distinct names.
        provenance: How the samples were made, as JSON values: model, architecture, version, the trainer's metadata. It becomes
            part of the fingerprint.
        bad: Files that belong to the format but to no sample, with the reason: `{"a.npz": "no image size in the name"}`.
        metadata_files: Files that were read and belong to no sample, for example those of the provenance.
        notes: Sentences for the report about facts that the files do not contain.
    """

    samples: Sequence[SourceSample]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    bad: Mapping[str, str] = field(default_factory=dict)
    metadata_files: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Format:
    """A format in which a program stores tensors.

    Attributes:
        name: Name for `--format`.
        title: The program, and what it writes, in one line.
        files: Pattern of the names of its files; or a function that returns how many files of a folder this format would read.
            It judges by the names, and if they do not suffice, by the beginnings of a few files.
        open: Function that finds the samples in a folder.
        is_generic: True for a format that fits the files of many programs. It is chosen only if no other format fits.
    """

    name: str
    title: str
    files: re.Pattern[str] | Callable[[SourceFolder], int]
    open: Callable[[SourceFolder], Source]
    is_generic: bool = False

    def recognize(self, folder: SourceFolder) -> int:
        """Return how many files of a folder this format would read."""
        if isinstance(self.files, re.Pattern):
            return sum(self.files.fullmatch(name) is not None for name in folder.names)
        return self.files(folder)


class Faults(dict[str, str]):
    """Bad files with the reason, as in `Source.bad`."""

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Catch a FormatError, which is the fault of the file."""
        try:
            yield
        except FormatError as exc:
            self[name] = exc.reason


def one_or_all(names: set[str]) -> str | list[str]:
    """Return the only name, or the sorted list of all names."""
    return next(iter(names)) if len(names) == 1 else sorted(names)


def name_media(paths: Sequence[str]) -> list[str]:
    """Return distinct names of media files with these absolute paths.

    A name is the path relative to the folder that contains all files, without its suffix if no other file then has the same
    name. A repeated name gets a number: `clips/a`, `clips/a~2`.
    """
    split = [path.replace("\\", "/").strip("/").split("/") for path in paths]
    folders = [parts[:-1] for parts in split] or [[]]
    common = num_common(min(folders), max(folders))
    names = ["/".join(parts[common:]) for parts in split]
    stems = {name: os.path.splitext(name)[0] for name in names}
    counts = Counter(stems.values())
    return number_repeats(stems[name] if counts[stems[name]] == 1 else name for name in names)


def num_common(left: Iterable[str], right: Iterable[str]) -> int:
    """Return how many parts at the beginning of two paths are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def number_repeats(names: Iterable[str]) -> list[str]:
    """Return the names with a number at the end of each name that occurred before."""
    distinct: dict[str, None] = {}
    counts: Counter[str] = Counter()
    for name in names:
        numbered = name
        while numbered in distinct:
            counts[name] += 1
            numbered = f"{name}~{counts[name] + 1}"
        distinct[numbered] = None
    return list(distinct)
