"""WebDataset shards with members of numpy, torch or pickle.

These are `.npy`, `.npz`, `.pt`, `.pth`, `.ckpt`, `.pyd`, `.pickle`, `.pkl`, `.ten` and `.tb` members.

Each sample of the tars keeps its key if `tc.safe_key` may have made it, as in tars of `tensorcache export`. Otherwise,
`tc.safe_key` makes a key from the old key. If two tars contain the same key, it makes all keys from the path of the tar and the
old key. The members with tensors are decoded:

    000000.latent.npy, 000000.text.pth    ->  {"latent": …, "text": …}, by the names before the suffix
    000000.pyd                            ->  the pickled object itself, if this is the only member with tensors
    000000.npy, 000000.pth                ->  {"npy": …, "pth": …}

The key of a member ends at the first dot, as in webdataset: `1.0.npy` and `1.5.npy` are the members `0.npy` and `5.npy` of one
sample, `1`. The report has a note about members whose names begin with a digit or contain a space before the suffix.

Numpy arrays become tensors. All other members, such as `.jpg`, `.json` and `.txt`, stay members as they are. Compressed tars
are refused. If the files are not trusted, pickles, `.pt`, `.pth` and `.ckpt` members may contain only tensors, arrays of
numbers or texts, and plain values.

Symbolic and hard links in a tar are not followed, but reported. Hidden files, such as `._1.npy` from macOS, are skipped.

If a tar is damaged, only the samples before the damaged sample are imported.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from wds_tensorcache.errors import FormatError, format_count, list_names
from wds_tensorcache.importers.safe_files import parse_numpy, parse_torch, tensors_of
from wds_tensorcache.importers.source import Faults, Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder, naming
from wds_tensorcache.integrations.webdataset import decode
from wds_tensorcache.shards.names import SKELETON, TENSORS, half_of, is_safe_key, split_member
from wds_tensorcache.shards.tar import Scanner, find_header, hidden_members
from wds_tensorcache.storage.files import ShardFile

_DECODED = frozenset({"pyd", "pickle", "pkl", "pt", "pth", "ckpt", "npy", "npz", "ten", "tb"})
_NUM_PROBED = 64  # members of a tar to look at, if its first sample is not longer
_NUM_NAMED = 3  # members in a note
_LIKE_STEM = re.compile(r"(?:\d|[^.]*\s).*\..*", re.DOTALL).match  # the rest of a name such as `1.5.npy`
_Extent = tuple[int, int]  # begin and end of a member's content in the tar, in bytes
_DECODE = decode(lazy=False)


def _recognize(folder: SourceFolder) -> int:
    """Count the tars with members to decode, other than caches."""
    heads = [_first_suffixes(folder, name) for name in folder.by_suffix.get(".tar", ())]
    return sum(
        any(_kind(suffix) in _DECODED for suffix in head)
        and not any(suffix.endswith((SKELETON, TENSORS)) for suffix in head)
        for head in heads
    )


def find_shard(folder: SourceFolder) -> str | None:
    """Return the relative path of a cache's shard, or None."""
    for name in folder.by_suffix.get(".tar", ()):
        halves = [half_of(suffix.lower()) for suffix in _first_suffixes(folder, name)]
        if any(half is not None and half.is_skeleton for half in halves):
            return name
    return None


def _first_suffixes(folder: SourceFolder, name: str) -> list[str]:
    """Return the suffixes of a tar's first members, up to any damage."""
    suffixes: list[str] = []
    with suppress(FormatError), naming(name):
        file = ShardFile(folder.locate(name))
        first = None
        for member, *_ in Scanner(file.read, file.nbytes):
            if (split := _split(member)) is None:
                continue
            key, suffix = split
            first = first or key
            if key != first and len(suffixes) >= _NUM_PROBED:
                break
            suffixes.append(suffix)
    return suffixes


def _split(member: str) -> tuple[str, str] | None:
    """Split a member's name into key and suffix, which may be empty. Return None for a hidden file."""
    is_hidden = member.rpartition("/")[2].startswith(".")
    return split_member(member) or (None if is_hidden else (member, ""))


def _kind(suffix: str) -> str:
    return suffix.rpartition(".")[2].lower()


def _open(folder: SourceFolder) -> Source:
    tar_samples: list[tuple[ShardFile, str, str, dict[str, _Extent]]] = []  # tar, its name, key, members by suffix
    bad = Faults()
    for name in folder.by_suffix.get(".tar", ()):
        samples: dict[str, dict[str, _Extent]] = {}
        key = ""
        with bad.of(name):
            file = ShardFile(folder.locate(name))
            scanner = Scanner(file.read, file.nbytes)
            for member, begin, nbytes in scanner:
                if (split := _split(member)) is None:
                    continue
                key, suffix = split
                members = samples.setdefault(key, {})
                if suffix in members:
                    raise FormatError(f"member {member!r:.100} occurs twice", kind="duplicate")
                members[suffix] = begin, begin + nbytes
            key = ""
            hidden = find_header(file.read, scanner.end, file.nbytes)
            if hidden is not None:
                bad[name] = str(hidden_members(scanner.end, hidden))
            bad |= {f"{name}: {link}": "is a link to another member, which is not followed" for link in scanner.links}
        samples.pop(key, None)  # of a damaged tar: the sample may lack members
        tar_samples += [(file, name, key, members) for key, members in samples.items()]
    doubles = [key for key, count in Counter(key for _, _, key, _ in tar_samples).items() if count > 1]
    notes = _note_stems([(key, members) for _, _, key, members in tar_samples])
    if doubles:
        listed = f"{format_count(len(doubles), 'key')}, for example {list_names(doubles[:_NUM_NAMED])}"
        notes.append(f"several tars have the same {listed}, so all keys begin with the path of their tar")
    return Source(
        [
            SourceSample(
                f"{name[:-4]}/{key}" if doubles else key,
                (name,),
                partial(_load, folder, file, name, key, members),
                key if not doubles and is_safe_key(key) else None,
            )
            for file, name, key, members in tar_samples
        ],
        # Hazard: after a new tar changes the keys, a resumed import would store all samples twice.
        {"keys": "with the paths of the tars"} if doubles else {},
        bad,
        notes=notes,
    )


def _note_stems(samples: list[tuple[str, dict[str, _Extent]]]) -> list[str]:
    """Return a note if members look like separate samples."""
    doubtful = {key: suffixes for key, members in samples if (suffixes := list(filter(_LIKE_STEM, members)))}
    if not doubtful:
        return []
    names = [f"{key}.{suffix}" for key, suffixes in islice(doubtful.items(), _NUM_NAMED) for suffix in suffixes]
    first, suffixes = next(iter(doubtful.items()))
    return [
        f"members that look like separate samples, in {format_count(len(doubtful), 'sample')}: for example "
        f"{list_names(names[:_NUM_NAMED])}: in a WebDataset tar, a key ends at the first dot, so {first!r:.100} has "
        f"{len(suffixes):,} of them; to keep them apart, extract the tars, and import the folder with --format files (format=)"
    ]


def _load(folder: SourceFolder, file: ShardFile, name: str, key: str, extents: dict[str, _Extent]) -> Loaded:
    raw = {suffix: file.read(*extent) for suffix, extent in extents.items()}
    file.check_unchanged()
    values: dict[str, Any] = {}
    for suffix in [suffix for suffix in raw if _kind(suffix) in _DECODED]:
        with naming(f"{name}: sample {key!r:.100}"):
            values[suffix] = tensors_of(_decode(suffix, raw.pop(suffix), folder.trust))
    if "" in raw:
        raise FormatError(f"member {key!r:.100} has no suffix").at(name)
    if len(values) == 1 and "." not in next(iter(values)):
        return Loaded(next(iter(values.values())), raw)
    names = {suffix: suffix.rpartition(".")[0] or suffix for suffix in values}
    is_clear = len(set(names.values())) == len(names)
    return Loaded({names[suffix] if is_clear else suffix: value for suffix, value in values.items()}, raw)


def _decode(suffix: str, raw: bytes, trust: bool) -> Any:
    kind = _kind(suffix)
    if kind in ("ten", "tb"):
        return _DECODE({"__key__": "", kind: raw})[kind]
    with naming(f"member {suffix!r:.100}"):
        return parse_numpy(raw, kind, trust) if kind in ("npy", "npz") else parse_torch(raw, trust)


FORMAT = Format(
    "webdataset",
    "WebDataset tars with .pyd, .pickle, .pkl, .pt, .pth, .ckpt, .npy, .npz and .ten members; other members stay as they are",
    _recognize,
    _open,
    True,
)
