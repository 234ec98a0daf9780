"""Formats, and the samples that a format finds in a folder. Samples are read on request."""

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
from wds_tensorcache.importers.source_folder import SourceFolder, naming


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
    """A sample of a source, read on request.

    Attributes:
        name: Name in the source, for example a relative path without suffix.
        files: Relative paths of the sample's files.
        load: Function that reads the sample, in any thread. It raises FormatError if a file is bad.
        key: Key of the sample; None if `tc.safe_key` makes the key from the name.
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
        provenance: Description of how the samples were made, in JSON values: model, architecture, version, the trainer's
            metadata. It becomes part of the fingerprint.
        bad: Faults by file, for files of the format that belong to no sample: `{"a.npz": "no image size in the name"}`.
        metadata_files: Files that were read and belong to no sample, for example the files with the provenance.
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
        title: The program and its files, in one line.
        files: Pattern of file names, or a function that counts the files of this format in a folder. The function looks at the
            names and, if they do not suffice, at small parts of some files.
        open: Function that finds the samples in a folder.
        is_generic: True for a format that fits the files of many programs. It is chosen only if no other format fits.
    """

    name: str
    title: str
    files: re.Pattern[str] | Callable[[SourceFolder], int]
    open: Callable[[SourceFolder], Source]
    is_generic: bool = False


class Faults(dict[str, str]):
    """The faults of bad files, by file, as in `Source.bad`."""

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Record a file's error if `naming` makes it a FormatError."""
        try:
            with naming(name):
                yield
        except FormatError as exc:
            self[name] = str(exc).removeprefix(f"{name}: ")


def one_or_all(names: set[str]) -> str | list[str]:
    """Return the only name, or a sorted list of all names."""
    return next(iter(names)) if len(names) == 1 else sorted(names)


def name_media(paths: Sequence[str]) -> list[str]:
    """Return distinct names of media files, made from their absolute paths.

    Names are relative to the folder that contains all files. A suffix is dropped if no other name is equal without its suffix.
    A repeated name gets a number: `clips/a`, `clips/a~2`.
    """
    split = [path.replace("\\", "/").strip("/").split("/") for path in paths]
    folders = [parts[:-1] for parts in split] or [[]]
    common = num_common(min(folders), max(folders))
    names = ["/".join(parts[common:]) for parts in split]
    stems = {name: os.path.splitext(name)[0] for name in names}
    counts = Counter(stems.values())
    return number_repeats(stems[name] if counts[stems[name]] == 1 else name for name in names)


def num_common(left: Iterable[str], right: Iterable[str]) -> int:
    """Return the number of equal parts at the beginning of two paths."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def number_repeats(names: Iterable[str]) -> list[str]:
    """Return distinct names: append a number to each repeated name."""
    distinct: dict[str, None] = {}
    counts: Counter[str] = Counter()
    for name in names:
        numbered = name
        while numbered in distinct:
            counts[name] += 1
            numbered = f"{name}~{counts[name] + 1}"
        distinct[numbered] = None
    return list(distinct)
