"""The items of one cache folder of diffusion-pipe: `metadata.db` says where each is in the `shard_{n}.bin` files."""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.importers.safe_files import parse_torch
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.integrations.pickles import peek_pth

DATABASE = "metadata.db"
SHARD = re.compile(r"shard_(0|[1-9]\d{0,8})", re.ASCII)
Spec = tuple[Any, ...]  # `image_spec`, the tar (or None) and the name of the media file
_MIN_ROW_NBYTES = 4
_PEEK_NBYTES = 1 << 13  # most pickles are shorter, unless their captions are long


@dataclass(frozen=True, slots=True)
class Item:
    """The bytes `[begin, end)` of a `.bin` file, which are a file of `torch.save`."""

    file: str
    begin: int
    end: int

    @property
    def where(self) -> str:
        """The file and the offset, for messages."""
        return f"{self.file}, item at byte {self.begin}"

    def load(self, folder: SourceFolder) -> dict[str, Any]:
        """Return the dict that the item contains.

        Raises:
            FormatError: The item is damaged, contains other classes than tensors and plain values, or is not a dict.
        """
        try:
            value = parse_torch(folder.read_range(self.file, self.begin, self.end), folder.trust)
            if not isinstance(value, dict):
                raise FormatError(f"contains {type(value).__name__}, expected a dict")
        except TensorCacheError as exc:
            raise exc.at(self.where) from exc
        return value

    def find_spec(self, folder: SourceFolder) -> Spec | None:
        """Return the item's `image_spec`; None if it has none, or is bad, which `load` reports."""
        for end in sorted({min(self.begin + _PEEK_NBYTES, self.end), self.end}):
            try:
                value = peek_pth(folder.read_range(self.file, self.begin, end))
                spec = value.get("image_spec") if isinstance(value, dict) else None
                is_spec = isinstance(spec, (list, tuple)) and all(isinstance(part, (str, type(None))) for part in spec)
                return tuple(spec) if is_spec and spec else None
            except FormatError:
                continue
        return None


def read_database(folder: SourceFolder, name: str) -> tuple[str, list[Item]]:
    """Return the fingerprint and the items of a cache, in the order in which the trainer numbers them.

    The database is opened read-only and immutable, and only plain tables are read. Views, triggers, virtual tables, functions
    and journals are refused, because SQLite would execute them.

    Raises:
        FormatError: The database is damaged, interrupted or hostile, or does not describe the `.bin` files.
    """
    path = name[: -len(DATABASE)]
    for suffix in ("-journal", "-wal"):
        if f"{name}{suffix}" in folder:  # Hazard: SQLite would roll back what the journal lists
            raise FormatError(
                f"{DATABASE}{suffix} exists, so caching was interrupted or still runs; let diffusion-pipe resume and finish it"
            ).at(name)
    try:
        with _open_copy(folder, name) as database:
            database.text_factory = lambda text: text.decode("utf-8", "replace")
            database.execute("PRAGMA trusted_schema=OFF")
            tables = _list_tables(database)
            database.set_authorizer(lambda action, *_: _ALLOWED.get(action, sqlite3.SQLITE_DENY))
            fingerprints = database.execute("SELECT value FROM fingerprint LIMIT 1").fetchall()
            limit = os.path.getsize(folder.locate(name)) // _MIN_ROW_NBYTES
            rows = _read_rows(database.execute("SELECT shard, shard_index FROM items ORDER BY rowid"), limit)
            shards = {
                table: _read_rows(database.execute(f"SELECT offset, size FROM {table} ORDER BY rowid"), limit)
                for table in tables
                if SHARD.fullmatch(table)
            }
        items = {
            int(table[len("shard_") :]): _items(folder, f"{path}{table}.bin", each) for table, each in shards.items()
        }
        return str(fingerprints[0][0] if fingerprints else ""), _ordered(rows, items)
    except sqlite3.Error as exc:
        raise FormatError(f"cannot be read: {exc!r:.300}").at(name) from exc
    except FormatError as exc:
        raise exc.at(name) from exc


@contextmanager
def _open_copy(folder: SourceFolder, name: str) -> Iterator[sqlite3.Connection]:
    """Open a copy of a database. SQLite opens files by path alone, which may have become that of another file."""
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, DATABASE)
        with open(path, "wb") as file:
            file.write(folder.read(name))
        with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)) as database:
            yield database


_ALLOWED = {sqlite3.SQLITE_SELECT: sqlite3.SQLITE_OK, sqlite3.SQLITE_READ: sqlite3.SQLITE_OK}


def _list_tables(database: sqlite3.Connection) -> list[str]:
    """Return the names of all tables; raise FormatError if there is anything but plain tables of plain columns."""
    found = database.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    for kind, name, sql in found:
        if kind != "table" or not re.fullmatch(r"CREATE TABLE \w+ ?\(\w+(, ?\w+)*\)", str(sql), re.ASCII):
            raise FormatError(
                f"contains {str(kind)!r:.20} {str(name)!r:.80}, expected only the tables of diffusion-pipe"
            )
    return [str(name) for _, name, _ in found]


def _read_rows(rows: Iterable[tuple[Any, ...]], limit: int) -> list[tuple[int, int]]:
    """Return rows of two integers that are not negative.

    Hazard: a small damaged file can contain the same page many times, so that it has billions of rows.
    """
    result: list[tuple[int, int]] = []
    for left, right in rows:
        if left.__class__ is not int or right.__class__ is not int or min(left, right) < 0:
            raise FormatError(f"row {len(result)} is ({left!r:.40}, {right!r:.40}), expected two offsets or numbers")
        if len(result) >= limit:
            raise FormatError(f"has more rows than fit into its pages, {limit:,}")
        result.append((left, right))
    return result


def _items(folder: SourceFolder, file: str, rows: list[tuple[int, int]]) -> list[Item]:
    """Return the items of one `.bin` file, whose rows must follow each other without gaps."""
    if file not in folder:
        raise FormatError(f"{file} is missing")
    items = []
    end = 0
    for begin, nbytes in rows:
        if begin != end or not nbytes:
            raise FormatError(f"{file}: the item of {nbytes:,} bytes at byte {begin:,} does not start at byte {end:,}")
        end = begin + nbytes
        items.append(Item(file, begin, end))
    folder.read_range(file, end, end)  # raises FormatError if the file is shorter
    return items


def _ordered(rows: list[tuple[int, int]], items: dict[int, list[Item]]) -> list[Item]:
    """Return the items in the order of the table `items`, which must contain each once."""
    ordered = []
    for shard, number in rows:
        each = items.get(shard, [])
        if number >= len(each):
            raise FormatError(f"item {number} of shard {shard} does not exist")
        ordered.append(each[number])
    if not len(ordered) == len(set(ordered)) == sum(map(len, items.values())):
        raise FormatError(f"the table 'items' has {len(ordered)} rows, expected one for each item in the shards")
    return ordered
