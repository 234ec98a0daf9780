"""Records of the items that fail in a build, in its folder."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from wds_tensorcache.arguments import user_level
from wds_tensorcache.errors import BuildError, FormatError, format_count
from wds_tensorcache.storage.folder import Folder
from wds_tensorcache.storage.urls import shown

_NAME = re.compile(r"failures(?:-r[0-9]+of([0-9]+))?\.jsonl").fullmatch
_FOLDERS = os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(__file__))
_IS_LIBRARY = re.compile(rf"(?:{'|'.join(map(re.escape, _FOLDERS))})/|<frozen |.*/(?:site|dist)-packages/").match
_log = logging.getLogger("wds_tensorcache")
_MAX_TEXT = 1000  # characters of a message


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one item, a line of JSON in the file."""

    item: int  # number of the item in the source
    key: str  # of its sample; `""` if the key is made from the item, which could not be read
    error: str  # name of the exception's class
    text: str  # message of the exception, at most 1,000 characters
    # Last frame of the traceback that is outside installed packages and the standard library, or else the last frame: file,
    # line, function and source.
    frame: str

    @staticmethod
    def of(item: int, key: str, exc: BaseException) -> Failure:
        frames = traceback.extract_tb(exc.__traceback__)
        frame = next((frame for frame in reversed(frames) if not _IS_LIBRARY(frame.filename)), frames[-1])
        where = f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        return Failure(item, key, type(exc).__name__, text_of(exc)[:_MAX_TEXT], where[:_MAX_TEXT])

    @property
    def place(self) -> str:
        """The item's number, and its key if it is known."""
        return f"item {self.item}" + f" (key {self.key!r})" * bool(self.key)

    def __str__(self) -> str:
        return f"{self.error}: {self.text}".replace("\n", " ") + f" ({self.frame})"


def text_of(exc: BaseException) -> str:
    """Return an exception's message, even if its `__str__` raises an error."""
    return str(traceback.TracebackException(type(exc), exc, None))


class Failures:
    """The failures of one `build` call on one rank, and their file.

    Each rank replaces its own file as a whole. A kill loses failures that the file does not list yet. Their items have no
    samples, so the next call tries them again.

    Attributes:
        folder: Folder of the files.
        name: Name of the rank's file.
        earlier: Failures of this rank's items in earlier calls, on any ranks, by item number.
        new: Failures of this call by item number.
        reached: Number of the last item that this call has tried, at first -1. Items are tried in the order of their numbers.

    Threads: any thread may call `add`.
    """

    def __init__(
        self, folder: Folder, names: list[str], is_own: Callable[[int], bool], rank: int, world_size: int
    ) -> None:
        self.folder, self._is_own = folder, is_own
        self.name = f"failures-r{rank}of{world_size}.jsonl" if world_size > 1 else "failures.jsonl"
        # also after a kill while the file was written for the first time
        self._has_file = any(self.name in name for name in names)
        # ranks of another world size cannot run now
        self._files_of_other_sizes = [
            name for name in names if (match := _NAME(name)) and int(match[1] or 1) != world_size
        ]
        self.earlier = {failure.item: failure for failure in list_failures(folder, names) if self._is_own(failure.item)}
        self.new: dict[int, Failure] = {}
        self.reached = -1
        self._lock, self._num_written = threading.Lock(), 0

    def add(self, failure: Failure) -> None:
        with self._lock:
            if not self.new:  # a mistake in `fn` would otherwise be seen only at the end
                _log.warning("tc.build: %s failed: %s", failure.place, failure)
            self.new[failure.item] = failure
            # Cost: each write repeats all failures, so their number grows by a tenth between two writes.
            if len(self.new) > 1.1 * self._num_written:
                self._write()

    def save(self, is_complete: bool) -> None:
        """Write the file. If this call has tried all items, earlier failures are dropped."""
        if is_complete:
            self.earlier.clear()
            for name in self._files_of_other_sizes:
                self._change(name, partial(self._drop_own, name))
        if self.new or self._has_file:
            self._write()

    def _drop_own(self, name: str, before: bytes) -> bytes:
        return _format(f for f in _parse(before, self.folder.locate(name)) if not self._is_own(f.item))

    def content(self) -> bytes:
        """Return the file's content, with earlier failures of items not reached."""
        later = {number: failure for number, failure in self.earlier.items() if number > self.reached}
        return _format((later | self.new).values())

    def _write(self) -> None:
        self._change(self.name, lambda before: self.content())
        self._has_file, self._num_written = True, len(self.new)

    def _change(self, name: str, apply: Callable[[bytes], bytes]) -> None:
        contents: list[bytes] = []

        def change(before: bytes | None) -> bytes:
            contents.append(apply(before or b""))
            return contents[-1]

        self.folder.change(name, change)
        if not contents[-1]:
            self.folder.delete([name])

    def report(
        self,
        allow: bool,
        remedy: str = "call build again, which tries these items again",
        folder: str | None = None,
    ) -> None:
        """Raise BuildError if items have failed; with `allow`, warn instead. `folder` will contain the file."""
        if not self.new:
            return
        failures = sorted(self.new.values(), key=lambda failure: failure.item)
        first, path = failures[0], os.path.join(folder, self.name) if folder else shown(self.folder.locate(self.name))
        problem = f"{format_count(len(failures), 'item')} failed, listed in {path}; the first is {first.place}: "
        problem += f"{first.error}: {first.text}"
        if allow:
            warnings.warn(f"tc.build: {problem}", stacklevel=user_level())
            return
        where = f"All other samples are in {shown(self.folder.path or os.curdir)!r}"
        error = BuildError(f"{problem}. {where}; correct the items and {remedy}, or pass allow_failures=True")
        error.failures = tuple((f.key or None, f"item {f.item}: {f}") for f in failures)
        raise error


def _format(failures: Iterable[Failure]) -> bytes:
    in_order = sorted(failures, key=lambda failure: failure.item)
    records = (dataclasses.asdict(failure) | {"key": failure.key or None} for failure in in_order)
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def list_failures(folder: Folder, names: Iterable[str] | None = None) -> list[Failure]:
    """Return a folder's failures, one per item, in order of the items. Raise FormatError if a file has other content."""
    failures: dict[int, Failure] = {}
    for name in filter(_NAME, folder.names() if names is None else names):
        try:
            content = folder.read(name) or b""
        except FormatError as exc:
            raise FormatError(f"{exc}; rename it: tc.build writes its list of failures there", kind=exc.kind) from exc
        failures |= {failure.item: failure for failure in _parse(content, folder.locate(name))}
    return [failures[item] for item in sorted(failures)]


def _parse(content: bytes, path: str) -> Iterator[Failure]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            failure = Failure(**record | {"key": record["key"] or ""})
            if [type(value) for value in dataclasses.astuple(failure)] != [int, *[str] * 4]:
                raise TypeError
        except (TypeError, ValueError, KeyError, RecursionError):
            remedy = "delete the file; the next call of `build` tries all items without a sample, and lists what fails"
            problem = f"line {number} is not a failure of tc.build; {remedy}"
            raise FormatError(problem, kind="index").at(shown(path)) from None
        yield failure
