"""Read files of `torch.save` whose pickles differ only in texts and numbers, as the files of one trainer do: decode only one.

A plan has the bytes that the pickles have in common, and the decoded object with places for tensors, texts and numbers. Between
the common bytes are opcodes that push a text or a number. They may differ only where decoding puts the value into the object,
and does nothing else with it. To find out, the pickle is decoded with a `_Place` instead of the value: an object that cannot be
a key, and that no builder accepts. So a pickle that matches a plan decodes to the plan's object, with the pickle's own values.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct
from typing import Any

import torch

from wds_tensorcache.codec.skeleton import opcodes as op
from wds_tensorcache.codec.skeleton.types import Allowed
from wds_tensorcache.codec.tree import ATOMS, DICTS, rebuild, walk
from wds_tensorcache.errors import FormatError
from wds_tensorcache.integrations.pickles.advice import advising
from wds_tensorcache.integrations.pickles.pth_file import PthFile, read_pth_file
from wds_tensorcache.integrations.pickles.storages import Storage, load_storage, view_storage
from wds_tensorcache.integrations.pickles.tensor_reader import TensorReader
from wds_tensorcache.integrations.pickles.translate import BINPERSID, MAX_SHORT, find_fields, translate

_MAX_PLANS, _MAX_KINDS = 64, 64
_MAX_FIELDS = 128
_CREDIT = 16.0  # number of plans that may be made before one is used
_ALLOWANCE = 1 / 32  # credit for each file that matches no plan
_NOT_PLANNED: Any = object()  # in place of the object, if the pickle must be decoded
_MARKER = uuid.uuid4().hex  # occurs in no file
_INT, _FLOAT = Struct("<i").unpack_from, Struct(">d").unpack_from


def view_pth(content: memoryview, limit: int, remedy: str, reader_class: type[TensorReader]) -> Any:
    """Return the object in a file of `torch.save`, as `load_pth` does.

    Args:
        content: Content of the file, writable.
        limit, reader_class: As for `load_pth`.
        remedy: Advice for users that trust the file, at the end of all messages.

    Raises:
        UnsafeSkeletonError, FormatError: As `load_pth`.

    Memory: tensors alias `content`, unless it is not aligned for them.
    """
    file = read_pth_file(content, remedy)
    with advising(remedy):
        planned = _PLANS.read(file, limit)
    return file.decode(limit, {}, remedy, remedy, reader_class) if planned is _NOT_PLANNED else planned


@dataclass(slots=True)
class _Place:
    """The place of a text or number in an object. It has no hash, so that it is not a key."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """A storage that is not loaded. Ranges of bytes would be equal for all empty ones."""

    name: str
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """The place of a tensor in an object."""

    record: str  # name of the storage in the zip
    dtype: torch.dtype
    offset: int  # in elements, as the next two
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """The object in all files whose pickles have certain bytes, with places for what differs between the files.

    Attributes:
        fixed: Bytes before, between and after the opcodes that may differ.
        planned: The object with `_Place` and `_Tensor`.
        lengths: Length in bytes of each storage that is opened, by name.
        nbytes: Number of bytes of all tensors; elements that tensors share count once per tensor.
    """

    fixed: tuple[bytes, ...]
    planned: Any
    lengths: dict[str, int]
    nbytes: int

    def match(self, pickled: bytes) -> list[Any] | None:
        """Return the texts and numbers of a pickle; None if it does not match."""
        values: list[Any] = []
        *parts, last = self.fixed
        position = 0
        try:
            for part in parts:
                at = position + len(part)
                if pickled[position:at] != part:
                    return None
                value, position = _read_field(pickled, at)
                values.append(value)
        except (IndexError, UnicodeDecodeError, ValueError):
            return None
        return values if pickled[position:] == last else None

    def fits(self, records: dict[str, range], limit: int) -> bool:
        """Return whether a file has the storages, and the tensors do not exceed the limit."""
        return self.nbytes <= limit and all(
            name in records and len(records[name]) == count for name, count in self.lengths.items()
        )

    def read(self, file: PthFile, values: list[Any]) -> Any:
        """Return the object with the tensors of a file, and with these texts and numbers."""
        storages = {name: load_storage(file.file, file.records[name]) for name in self.lengths}

        def fill(place: Any) -> Any:
            if place.__class__ is _Place:
                return values[place.number]
            return view_storage(storages[place.record], place.dtype, place.offset, place.size, place.stride)

        return rebuild(self.planned, fill, (_Place, _Tensor))


def _read_field(pickled: bytes, at: int) -> tuple[Any, int]:
    """Return the text or number that the opcode at `at` pushes, and its end; raise ValueError for any other opcode."""
    code = pickled[at]
    if code == op.BINUNICODE or code == op.SHORT_BINUNICODE:
        begin = at + (5 if code == op.BINUNICODE else 2)
        end = begin + int.from_bytes(pickled[at + 1 : begin], "little")
        if end > len(pickled):
            raise ValueError("the pickle is cut short")
        return pickled[begin:end].decode(), end
    if code == op.BININT1:
        return pickled[at + 1], at + 2
    end = at + 1 + op.FIXED_NBYTES.get(code, len(pickled))
    if end > len(pickled):
        raise ValueError("another opcode, or the pickle is cut short")
    if code == op.BININT2:
        return int.from_bytes(pickled[at + 1 : end], "little"), end
    if code == op.BININT:
        return _INT(pickled, at + 1)[0], end
    if code == op.BINFLOAT:
        return _FLOAT(pickled, at + 1)[0], end
    raise ValueError("the opcode pushes neither a text nor a number")


class _Planner(TensorReader):
    """A reader that returns `_Place` in place of markers, and `_Tensor` in place of tensors.

    It reads no storage, and refuses tensors with a gradient.

    Args:
        records: Range of bytes of each storage, by its name in the zip.
        nbytes: Length of the pickle.
        limit: As for `load_pth`.
    """

    def __init__(self, records: dict[str, range], nbytes: int, limit: int) -> None:
        named: Any = {name: _Record(name, len(record)) for name, record in records.items()}
        super().__init__(memoryview(b""), named, nbytes, limit, "", "")
        self.num_tensors = 0
        self.lengths: dict[str, int] = {}  # of the storages that are opened, by name

    def open_storage(self, stack: list[Any], allow: Allowed, num_callables: int) -> int:
        top = stack[-1]
        if top.__class__ is not str or not top.startswith(_MARKER):
            return super().open_storage(stack, allow, num_callables)
        stack[-1] = _Place(int(top.removeprefix(_MARKER)))
        return 0

    def load_memory(self, record: Any) -> Any:
        self.lengths[record.name] = record.nbytes
        return record

    def view_tensor(self, storage: Storage, dtype: torch.dtype, offset: int, size: Any, stride: Any, count: int) -> Any:
        self.num_tensors += 1
        return _Tensor(storage.memory.name, dtype, offset, tuple(size), tuple(stride))

    def build_tensor(self, args: tuple[Any, ...], *, has_dtype: bool) -> Any:
        if args[4] is not False:
            raise FormatError("a tensor requires a gradient, or has something else than a bool in this place")
        return super().build_tensor(args, has_dtype=has_dtype)


_PLANNED = {*DICTS, list, tuple, _Tensor, _Place}


class _Plans:
    """The plans that were used last.

    Making a plan takes longer than decoding a file. So few plans are made unless they are used.

    Threads: any number of threads may use it at once; at worst, a plan is made twice.
    """

    def __init__(self) -> None:
        self._plans: list[_Plan] = []
        self._kinds: dict[tuple[bytes, ...], tuple[int, ...]] = {}  # the fields that may differ
        self._credit = _CREDIT

    def read(self, file: PthFile, limit: int) -> Any:
        """Return the object in a file, or _NOT_PLANNED."""
        if len(file.pickled) > MAX_SHORT:
            return _NOT_PLANNED
        for number, plan in enumerate(self._plans):
            values = plan.match(file.pickled)
            if values is not None:
                if number:
                    self._plans = [plan, *(other for other in self._plans if other is not plan)]
                self._credit = min(_CREDIT, self._credit + 1)
                return _read_planned(plan, file, limit, values)
        self._credit = min(_CREDIT, self._credit + _ALLOWANCE)
        if self._credit >= 1:
            self._credit -= 1
            made = self._make(file.pickled, file.records, limit)
            if made is not None:
                self._plans = [made, *self._plans[: _MAX_PLANS - 1]]
                values = made.match(file.pickled)
                if values is not None:
                    return _read_planned(made, file, limit, values)
        return _NOT_PLANNED

    def _make(self, pickled: bytes, records: dict[str, range], limit: int) -> _Plan | None:
        fields = find_fields(pickled)
        if fields is None or len(fields) > _MAX_FIELDS:
            return None
        kind = _between(pickled, fields)
        chosen = self._kinds.get(kind)
        if chosen is None:
            # A file that is damaged would make all fields fixed for the good files of its kind.
            if _decode(pickled, records, limit, 0) is None:
                return None
            chosen = tuple(
                number
                for number, field in enumerate(fields)
                if _decode(_marked(pickled, [field]), records, limit, 1) is not None
            )
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            self._kinds[kind] = chosen
        free = [fields[number] for number in chosen]
        decoded = _decode(_marked(pickled, free), records, limit, len(free))
        if decoded is None:
            return None
        planned, planner = decoded
        return _Plan(_between(pickled, free), planned, planner.lengths, planner.nbytes)


_PLANS = _Plans()


def _read_planned(plan: _Plan, file: PthFile, limit: int, values: list[Any]) -> Any:
    if not plan.fits(file.records, limit):
        return _NOT_PLANNED
    try:
        return plan.read(file, values)
    except RecursionError:  # containers nest too deeply for the caller's stack; decoding does not recurse
        return _NOT_PLANNED


def _between(pickled: bytes, fields: Iterable[tuple[int, int]]) -> tuple[bytes, ...]:
    """Return the bytes before, between and after the fields."""
    found, position = [], 0
    for begin, end in fields:
        found.append(pickled[position:begin])
        position = end
    return (*found, pickled[position:])


def _marked(pickled: bytes, fields: list[tuple[int, int]]) -> bytes:
    """Return the pickle with a marker in place of each field: a text that `_Planner` replaces as if it named a storage."""
    first, *rest = _between(pickled, fields)
    opened = op.CODE[BINPERSID]
    return b"".join((first, *(op.write_text(f"{_MARKER}{i}") + opened + common for i, common in enumerate(rest))))


def _decode(pickled: bytes, records: dict[str, range], limit: int, num_markers: int) -> tuple[Any, _Planner] | None:
    """Return the object in a pickle with `_Place` in place of each marker, and the reader that decoded it.

    Return None if a marker or tensor is not a value in the object, or if the object contains anything but tensors, plain
    values, dicts, lists and tuples. Also return None after any error: decoding the file without a plan raises it again.
    """
    try:
        body = translate(pickled)
        planner = _Planner(records, len(body), limit)
        planned = planner.unpickle(body, {})
    except Exception:
        return None
    found = Counter[type]()
    for part, _ in walk(planned):
        if part.__class__ not in _PLANNED:
            return None
        if part.__class__ in DICTS and not all(key.__class__ in ATOMS for key in part):
            return None
        found[part.__class__] += 1
    is_whole = found[_Place] == num_markers and found[_Tensor] == planner.num_tensors
    return (planned, planner) if is_whole and planned.__class__ is not _Place else None
