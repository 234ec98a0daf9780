"""diffusion-pipe: latents and text embeddings in `shard_{n}.bin` files. A `metadata.db` in each folder describes them.

diffusion-pipe writes one folder for each size of media, `cache/{model}/cache_{size}/`, with these subfolders:

- `latents/`: an item for each picture or clip, with `latents`, `mask`, `image_spec`, the list `caption`, and tensors that the
  model needs, such as `control_latents`.
- `text_embeddings_1/`, `text_embeddings_2/`, …: for each text encoder, an item for each caption, for example with
  `clip_embed` or `t5_embed`. With aspect ratio buckets, these folders are in `cache/{model}/ar_frames_{ratio}_{frames}/`, and
  all sizes of the ratio share them.

`cache/{model}/uncond_text_embeddings_1/`, … contain the embedding of the empty caption.

Each sample is one picture or clip: the dict of its latents, and `text`, a list with one dict for each caption. The dict of a
caption contains the tensors of all text encoders:

    {"latents": …, "mask": …, "image_spec": [None, "/photos/harbor.jpg"], "caption": ["a harbor"],
     "text": [{"clip_embed": …, "t5_embed": …}]}

The items are joined by `image_spec`, the media file. The name of a sample is the folder of its size, and the path of the media
file without suffix. The path is relative to the folder that contains all media files.

The sample `uncond` of a model has only `text`. Leave it out of training, and choose one of several captions:

    cache = tc.open(path).filter(lambda entry: "latents" in entry.shapes)
    loader = tc.Loader(cache, batch_size=4, choose={("clip", "t5"): ("text.*.clip_embed", "text.*.t5_embed")})

Without text folders, samples have no `text`. Without `latents` folders, each item of a text folder is a
sample, named by its position.

The fingerprints of all folders become the provenance. Each `metadata.db` is opened read-only, and only plain tables are
accepted. The tables must describe the `.bin` files without gaps. If there is a `metadata.db-journal`, caching was interrupted:
let diffusion-pipe finish it first.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import quote

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import parse_torch
from wds_tensorcache.importers.source import Faults, Format, Loaded, Source, SourceSample, name_media
from wds_tensorcache.importers.source_folder import SourceFolder, naming
from wds_tensorcache.integrations.pickles import peek_pth

_DATABASE = "metadata.db"
_SHARD = re.compile(r"shard_(0|[1-9]\d{0,8})", re.ASCII)
_TEXT = re.compile(r"(uncond_)?text_embeddings_\d+", re.ASCII)
_SIZE = re.compile(r"(.*/)?cache_(?:([\d.]+)x)?\d+x\d+x(\d+)", re.ASCII)
_PEEK_NBYTES = 1 << 13  # most pickles are shorter, unless their captions are long
_Spec = tuple[Any, ...]  # `image_spec`, the tar (or None) and the name of the media file


class _Item(NamedTuple):
    """A file of `torch.save` in the bytes `[begin, end)` of a `.bin` file."""

    file: str
    begin: int
    end: int

    @property
    def where(self) -> str:
        return f"{self.file}, item at byte {self.begin}"

    def load(self, folder: SourceFolder) -> dict[str, Any]:
        with naming(self.where):
            value = parse_torch(folder.read_range(*self), folder.trust)
            if not isinstance(value, dict):
                raise FormatError(f"contains {type(value).__name__}, expected a dict")
            return value

    def find_spec(self, folder: SourceFolder) -> _Spec | None:
        """Return the item's `image_spec`, or None if it cannot be read."""
        for end in sorted({min(self.begin + _PEEK_NBYTES, self.end), self.end}):
            with suppress(FormatError):
                value = peek_pth(folder.read_range(self.file, self.begin, end))
                spec = value.get("image_spec") if isinstance(value, dict) else None
                is_spec = isinstance(spec, (list, tuple)) and all(isinstance(part, (str, type(None))) for part in spec)
                return tuple(spec) if is_spec and spec else None
        return None


_Texts = dict[str, dict[_Spec | None, list[_Item]]]  # by text folder and media file; an item for each caption


def _recognize(folder: SourceFolder) -> int:
    caches = {os.path.dirname(name) for name in folder.names if os.path.basename(name) == _DATABASE}
    shards = (os.path.split(name) for name in folder.by_suffix.get(".bin", ()))
    return sum(path in caches and _SHARD.fullmatch(file[:-4]) is not None for path, file in shards)


def _open(folder: SourceFolder) -> Source:
    latents: dict[str, list[_Item]] = {}
    texts: dict[str, _Texts] = {}  # by the folder that contains the text folders
    unconds: dict[str, _Texts] = {}
    fingerprints: dict[str, str] = {}
    bad = Faults()
    listed: set[str] = set()
    databases = [name for name in folder.names if os.path.basename(name) == _DATABASE]
    for database in databases:
        with bad.of(database):
            path = os.path.dirname(database)
            fingerprints[path], items = _read_database(folder, database)
            listed.update(item.file for item in items)
            parent, cache = os.path.split(path)
            match = _TEXT.fullmatch(cache)
            if not match:
                latents[path] = items
                continue
            specs = (unconds if match[1] else texts).setdefault(parent, {}).setdefault(cache, {})
            for item in items:
                specs.setdefault(item.find_spec(folder), []).append(item)
    for name in folder.by_suffix.get(".bin", ()):
        path, file = os.path.split(name)
        if name not in listed and file.startswith("shard_") and os.path.join(path, _DATABASE) in folder:
            bad[name] = f"is not listed in {_DATABASE}, or {_DATABASE} is bad"
    samples = list(_latent_samples(folder, latents, texts, bad))
    for place, caches in texts.items() if not latents else ():
        for cache, specs in caches.items():
            for number, item in enumerate(chain.from_iterable(specs.values())):
                samples.append(_sample(folder, f"{place}/{cache}/{number:08d}", item, {}))
    for place, caches in unconds.items():
        items_of = {cache: [*chain.from_iterable(specs.values())] for cache, specs in caches.items()}
        samples.append(_sample(folder, f"{place}/uncond", None, items_of))
    return Source(samples, {"fingerprints": fingerprints}, bad, databases)


def _latent_samples(
    folder: SourceFolder, latents: dict[str, list[_Item]], texts: dict[str, _Texts], bad: Faults
) -> Iterator[SourceSample]:
    """Yield a sample for each item of latents; report unused texts."""
    used: set[tuple[str, _Spec | None]] = set()
    for path, items in latents.items():
        parent, cache = os.path.split(path)
        candidates = _text_folders(parent, texts)
        specs = [item.find_spec(folder) for item in items]
        names = name_media([str(spec[-1]) if spec else f"{at:08d}" for at, spec in enumerate(specs)])
        for item, spec, name in zip(items, specs, names, strict=True):
            places = [place for place in candidates if any(spec in items_of for items_of in texts[place].values())]
            used.update((place, spec) for place in places)
            captions = {
                text_cache: items_of.get(spec, []) for place in places for text_cache, items_of in texts[place].items()
            }
            problem = f"has text embeddings in {' and '.join(places) or 'no folder'}, expected exactly one folder"
            is_joined = len(places) == 1 or not candidates
            where = parent if cache == "latents" else path
            yield _sample(folder, f"{where}/{name}", item, captions, None if is_joined else problem)
    for place, caches in texts.items() if latents else ():
        for cache, items_of in caches.items():
            if unused := [spec for spec in items_of if (place, spec) not in used]:
                problem = f"{len(unused)} media files have no latents, such as {unused[0]!r:.200}"
                bad[os.path.join(place, cache)] = problem


def _text_folders(parent: str, texts: dict[str, _Texts]) -> list[str]:
    """Return the folders that may contain texts for the latents in `parent`."""
    match = _SIZE.fullmatch(parent)
    if parent in texts or match is None:
        return [parent] if parent in texts else []
    root, ratio, frames = match.groups("")
    # folders of older versions do not name the ratio
    pattern = re.compile(rf"{re.escape(root)}ar_frames_{re.escape(ratio) or '[^/]+'}_{frames}")
    return list(filter(pattern.fullmatch, texts))


def _sample(
    folder: SourceFolder, name: str, item: _Item | None, captions: dict[str, list[_Item]], problem: str | None = None
) -> SourceSample:
    items = filter(None, (item, *chain.from_iterable(captions.values())))
    files = tuple(dict.fromkeys(part.file for part in items))
    return SourceSample(name.lstrip("/"), files, partial(_load, folder, item, captions, problem))


def _load(folder: SourceFolder, item: _Item | None, captions: dict[str, list[_Item]], problem: str | None) -> Loaded:
    """Load an item with its texts, or raise FormatError with `problem`."""
    value = item.load(folder) if item else {}
    if captions and "text" in value:
        problem = "has an entry 'text', where its text embeddings would be"
    num_captions = len(value["caption"]) if isinstance(value.get("caption"), list) else 1
    for cache, items in captions.items():
        if len(items) != num_captions:
            problem = problem or f"has {num_captions} captions, but {cache} has {len(items)} items for it"
    if problem:
        raise FormatError(problem).at(item.where if item else "uncond")
    if captions:
        loaded = [[text.load(folder) for text in items] for items in captions.values()]
        value["text"] = [
            {key: part for text in texts for key, part in text.items() if key != "image_spec"}
            for texts in zip(*loaded, strict=True)
        ]
    return Loaded(value)


def _read_database(folder: SourceFolder, name: str) -> tuple[str, list[_Item]]:
    """Return a cache's fingerprint, and its items in the trainer's order."""
    for suffix in ("-journal", "-wal"):
        if f"{name}{suffix}" in folder:  # Hazard: SQLite would roll back the changes in the journal
            raise FormatError(
                f"{_DATABASE}{suffix} exists, so caching was interrupted or still runs; let diffusion-pipe resume and finish it"
            )
    uri = f"file:{quote(os.path.abspath(folder.locate(name)))}?mode=ro&immutable=1"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        database.text_factory = lambda text: text.decode("utf-8", "replace")
        database.execute("PRAGMA trusted_schema=OFF")
        # Hazard: SQLite would execute views, triggers, virtual tables and functions.
        tables = filter(_SHARD.fullmatch, _list_tables(database))
        fingerprints = database.execute("SELECT value FROM fingerprint LIMIT 1").fetchall()
        rows = _read_rows(database, "shard, shard_index FROM items")
        extents = {table: _read_rows(database, f"offset, size FROM {table}") for table in tables}
    path = os.path.dirname(name)
    items = {
        (int(table[len("shard_") :]), number): item
        for table, pairs in extents.items()
        for number, item in enumerate(_find_items(folder, os.path.join(path, f"{table}.bin"), pairs))
    }
    if sorted(rows) != sorted(items):
        raise FormatError(f"the table 'items' has {len(rows)} rows, expected one for each item in the shards")
    return str(fingerprints[0][0] if fingerprints else ""), [items[row] for row in rows]


def _list_tables(database: sqlite3.Connection) -> list[str]:
    """Return the names of all tables; refuse anything but plain tables."""
    schema = database.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    for kind, name, sql in schema:
        if kind != "table" or not re.fullmatch(r"CREATE TABLE \w+ ?\(\w+(, ?\w+)*\)", str(sql), re.ASCII):
            raise FormatError(
                f"contains {str(kind)!r:.20} {str(name)!r:.80}, expected only the tables of diffusion-pipe"
            )
    return [str(name) for _, name, _ in schema]


def _read_rows(database: sqlite3.Connection, query: str) -> list[tuple[int, int]]:
    """Return pairs of non-negative integers; raise FormatError for other values."""
    rows = database.execute(f"SELECT {query} ORDER BY rowid").fetchall()
    for at, row in enumerate(rows):
        if not all(type(value) is int and value >= 0 for value in row):
            raise FormatError(f"row {at} is {row!r:.100}, expected two offsets or numbers")
    return rows


def _find_items(folder: SourceFolder, file: str, extents: list[tuple[int, int]]) -> list[_Item]:
    """Return the items of a `.bin` file, which must be contiguous."""
    if file not in folder:
        raise FormatError(f"{file} is missing")
    items, end = [], 0
    for begin, nbytes in extents:
        if begin != end or not nbytes:
            raise FormatError(f"{file}: the item of {nbytes:,} bytes at byte {begin:,} does not start at byte {end:,}")
        end = begin + nbytes
        items.append(_Item(file, begin, end))
    folder.read_range(file, end, end)  # raises FormatError if the file is shorter
    return items


FORMAT = Format(
    "diffusion-pipe",
    "diffusion-pipe: shard_n.bin files with metadata.db, latents joined with the embeddings of their captions",
    _recognize,
    _open,
)
