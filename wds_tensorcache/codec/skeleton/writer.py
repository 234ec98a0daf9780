"""A writer of skeletons (FORMAT.md 2). One walk names the tensors and writes the pickle.

Python's own pickler is unsuitable: its bytes depend on the identity of equal strings, on the hash seed, and on the Python
version. This writer produces the same bytes for the same sample everywhere, and only opcodes that `unpickle` reads.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import lru_cache
from itertools import chain, count
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.codec.reference import RESERVED, component, join_path, place, reference_text, short_component
from wds_tensorcache.codec.skeleton import opcodes as op
from wds_tensorcache.codec.skeleton.limits import (
    LONG_TEXT,
    MAX_DEFAULTDICTS,
    MAX_DEPTH,
    MAX_DEQUES,
    TEXTS,
    add_key_parts,
    call_budget,
    call_cost,
)
from wds_tensorcache.codec.skeleton.opcodes import CODE
from wds_tensorcache.codec.skeleton.types import (
    FACTORIES,
    LISTED,
    NUMPY_DTYPE,
    Allowed,
    Listed,
    reduction,
)
from wds_tensorcache.codec.storable import StorableTensor, describe_tensor
from wds_tensorcache.errors import EncodeError, FormatError

_FIRST = itemgetter(0)
_write_key = lru_cache(4096)(op.write_text)  # samples of one cache have the same keys


class SkeletonWriter:
    """A writer of the skeleton of one sample. `save` walks the sample; `body()` and `tensors` are the results."""

    def __init__(self, allow: Allowed) -> None:
        self.tensors: dict[str, StorableTensor] = {}  # name -> tensor, in the order of the walk
        self.shares_tensors = False  # whether a tensor occurs several times
        self.needs_allow = False  # whether a reader must allow classes
        self._allow = allow
        self._classes = {cls: key for key, cls in allow.items()}
        self._parts: list[bytes] = []  # opcodes; empty where `body` may put a MEMOIZE or a GET
        self._gets: dict[int, int] = {}  # index of a GET in `_parts` -> index of its MEMOIZE
        self._slots: dict[int, tuple[int, object]] = {}  # id -> (index of its MEMOIZE, object, kept for its id)
        self._names: dict[int, str] = {}  # id -> name of a tensor
        self._texts: dict[type, dict[Any, int]] = {str: {}, bytes: {}}  # value -> index of its MEMOIZE
        self._globals: dict[tuple[str, str], int] = {}
        self._canonicals: dict[int, tuple[object, tuple[bytes, bytes] | None]] = {}  # id -> (object, its sort keys)
        self._call_cost = self._num_deques = self._num_defaultdicts = self._num_key_parts = 0

    def body(self) -> bytes:
        """Return the pickle after the preamble. Raise EncodeError if its calls exceed a limit (FORMAT.md 2.6)."""
        parts, gets = self._parts, self._gets
        memo = {}
        for index, slot in enumerate(sorted(set(gets.values()))):
            parts[slot] = CODE[op.MEMOIZE]
            memo[slot] = op.write_get(index)
        for index, slot in gets.items():
            parts[index] = memo[slot]
        body = b"".join(parts) + CODE[op.STOP]
        if self._call_cost > call_budget(len(body)):
            raise EncodeError(
                f"the values take {self._call_cost} bytes to build, and most of them are shared; store their texts, or a tensor"
            )
        if self._num_deques > MAX_DEQUES or self._num_defaultdicts > MAX_DEFAULTDICTS:
            raise EncodeError(
                f"the sample has {self._num_deques} deques and {self._num_defaultdicts} defaultdicts, and at most {MAX_DEQUES} "
                f"and {MAX_DEFAULTDICTS} can be read; store list(x) and dict(x)"
            )
        return body

    def save(self, value: Any, path: str = "", opaque: Iterator[int] | None = None, depth: int = 1) -> None:
        """Write the value at `path`. Raise EncodeError if the format cannot represent it.

        Values in a set, a dict key or an allowed object have no paths; tensors there take their numbers from `opaque`.
        """
        cls = type(value)
        if (atom := op.ATOM_WRITERS.get(cls)) is not None:
            self._save_value(value, cls, atom)
            return
        slot = self._slots.get(id(value))
        if slot is not None:
            self._get(slot[0])
            self.shares_tensors |= id(value) in self._names
            return
        if depth > MAX_DEPTH and (cls in _NESTED or cls in self._classes):
            raise EncodeError(f"{place(path)}: containers nest more than {MAX_DEPTH} deep; flatten them")
        container = _CONTAINERS.get(cls)
        if container is not None:
            container(self, value, path, opaque, depth)
        elif cls in self._classes:
            self._save_object(value, path, depth)
        elif isinstance(value, (torch.Tensor, np.ndarray, LazyTensor, LazyArray)):
            self._save_tensor(value, path, opaque)
        elif cls is torch.dtype:
            self._global("torch", dtype_name(value))
        elif value is ...:
            self._global("builtins", "Ellipsis")
        elif isinstance(value, np.dtype):
            self._save_call(NUMPY_DTYPE, value, path, depth)
        else:
            raise EncodeError(f"{place(path)}: {_remedy(value)}")

    def name_of(self, value: object) -> str | None:
        return self._names.get(id(value))

    def _get(self, slot: int) -> None:
        self._gets[len(self._parts)] = slot
        self._parts.append(b"")

    def _remember(self, value: object) -> None:
        self._slots[id(value)] = (len(self._parts), value)
        self._parts.append(b"")

    def _save_value(self, value: Any, cls: type, write: Callable[[Any], bytes]) -> None:
        parts, texts = self._parts, self._texts.get(cls)
        if texts is None or len(value) < 2:  # a GET and its MEMOIZE would not be shorter
            parts.append(write(value))
            return
        slot = texts.setdefault(value, len(parts) + 1)
        if slot < len(parts):
            self._get(slot)
        else:
            parts += write(value), b""

    _save_text = _save_value  # for keys, references, and names of globals
    _describe = staticmethod(describe_tensor)

    def _save_container(self, value: Any, path: str, opaque: Iterator[int] | None, depth: int) -> None:
        """Write an empty container or a call, then the items."""
        cls = type(value)
        if cls in _EMPTY:
            self._parts.append(_EMPTY[cls])
        elif cls is defaultdict:
            self._num_defaultdicts += 1
            self._save_defaultdict(value.default_factory, path)
        else:
            self._num_deques += cls is deque
            self._save_call(LISTED[cls], value, path, depth)
        # before the items, because a container may contain itself
        self._remember(value)
        if isinstance(value, dict):
            self._save_pairs(value.items(), path, opaque, depth)
        elif cls is list or cls is deque:
            self._save_items(value, path, opaque, depth)
        elif cls is set and value:
            self._save_elements(value, path, depth)
            self._parts.append(CODE[op.ADDITEMS])

    def _save_each(self, values: Iterable[Any], path: str, opaque: Iterator[int] | None, depth: int) -> None:
        writers, save_value = op.ATOM_WRITERS, self._save_value
        for index, item in enumerate(values):
            if (atom := writers.get(type(item))) is not None:  # has no path
                save_value(item, type(item), atom)
            else:
                inside = path if opaque else f"{path}.{index}" if path else str(index)
                self.save(item, inside, opaque, depth + 1)

    def _save_items(self, values: Iterable[Any], path: str, opaque: Iterator[int] | None, depth: int) -> None:
        values = list(values)
        if values:
            self._parts.append(CODE[op.MARK])
            self._save_each(values, path, opaque, depth)
            self._parts.append(CODE[op.APPENDS])

    def _save_pairs(
        self, pairs: Iterable[tuple[Any, Any]], path: str, opaque: Iterator[int] | None, depth: int
    ) -> None:
        pairs = list(pairs)
        if not pairs:
            return
        keys = list(map(_FIRST, pairs))
        if not TEXTS.issuperset(map(type, keys)) or max(map(len, keys)) >= LONG_TEXT:
            self._count_keys(keys, path)
        self._parts.append(CODE[op.MARK])
        for index, (key, item) in enumerate(pairs):
            if type(key) is str:
                self._save_text(key, str, _write_key if len(key) < 64 else op.write_text)
            else:
                inside = path if opaque else join_path(path, component(key, index))
                self.save(key, inside, count(), depth + 1)
            if (atom := op.ATOM_WRITERS.get(type(item))) is not None:  # has no path
                self._save_value(item, type(item), atom)
            elif opaque:
                self.save(item, path, opaque, depth + 1)
            else:
                part = short_component(key) if type(key) is str and len(key) < 64 else component(key, index)
                self.save(item, f"{path}.{part}" if path else part, opaque, depth + 1)
        self._parts.append(CODE[op.SETITEMS])

    def _count_keys(self, keys: list[Any], path: str) -> None:
        try:
            self._num_key_parts = add_key_parts(self._num_key_parts, keys)
        except FormatError as exc:
            raise EncodeError(f"{place(path)}: {exc}; use texts as keys, a list of pairs, or a tensor") from exc

    def _save_tuple(self, value: tuple[Any, ...], path: str, opaque: Iterator[int] | None, depth: int) -> None:
        if len(value) not in op.SHORT_TUPLES:
            self._parts.append(CODE[op.MARK])
        self._save_each(value, path, opaque, depth)
        slot = self._slots.get(id(value))
        if slot is not None:  # an item that contains this tuple has already written it
            self._parts.append(CODE[op.POP] * len(value) if len(value) in op.SHORT_TUPLES else CODE[op.POP_MARK])
            self._get(slot[0])
            return
        self._parts.append(CODE[op.SHORT_TUPLES.get(len(value), op.TUPLE)])
        if value:
            self._remember(value)

    def _save_frozenset(self, value: frozenset[Any], path: str, opaque: Iterator[int] | None, depth: int) -> None:
        self._save_elements(value, path, depth)
        if id(value) in self._slots:
            raise EncodeError(f"{place(path)}: a frozenset contains itself; use a list")
        self._parts.append(CODE[op.FROZENSET])
        self._remember(value)

    def _save_elements(self, values: Iterable[Any], path: str, depth: int) -> None:
        self._parts.append(CODE[op.MARK])
        inside = count()  # elements have no paths, so tensors in them are numbered
        elements = sorted(values, key=lambda item: self._canonical(item, path, depth + 1))
        self._count_keys(elements, path)
        for item in elements:
            self.save(item, path, inside, depth + 1)

    def _canonical(self, value: Any, path: str, depth: int) -> tuple[bytes, bytes]:
        """Return the sort keys of an element of a set (FORMAT.md 2.8)."""
        atom = op.ATOM_WRITERS.get(type(value))
        if atom is not None:
            return atom(value), b""
        canonical = self._canonicals.get(id(value))
        if canonical is None:
            self._canonicals[id(value)] = (value, None)  # until its keys are known
            alone = SkeletonWriter(self._allow)
            alone._canonicals = self._canonicals
            alone.save(value, path, count(), depth)
            tensors = alone.tensors.values()
            content = alone.body() + b"".join(bytes(tensor.flat) for tensor in tensors)
            canonical = value, (content, b"".join(f"{t.true.stored}{list(t.shape)}".encode() for t in tensors))
            self._canonicals[id(value)] = canonical
        if canonical[1] is None:
            raise EncodeError(f"{place(path)}: a set is contained in one of its elements; use a list")
        return canonical[1]

    def _save_defaultdict(self, factory: Any, path: str) -> None:
        if factory is not None and factory not in FACTORIES:
            names = ", ".join(FACTORIES.values())
            raise EncodeError(f"{place(path)}: a defaultdict's factory must be None or one of {names}; store dict(x)")
        self._global("collections", "defaultdict")
        if factory is None:
            self._parts.append(CODE[op.EMPTY_TUPLE])
        else:
            self._call_cost += call_cost((factory,))
            self._global("builtins", FACTORIES[factory])
            self._parts.append(CODE[op.TUPLE1])
        self._parts.append(CODE[op.REDUCE])

    def _save_bytearray(self, value: bytearray, path: str, opaque: Iterator[int] | None, depth: int) -> None:
        self._parts += CODE[op.BYTEARRAY8], len(value).to_bytes(8, "little"), bytes(value)
        self._remember(value)

    def _save_call(self, listed: Listed, value: Any, path: str, depth: int) -> None:
        module, name, list_arguments = listed
        try:
            arguments = list_arguments(value)
        except (TypeError, ValueError) as exc:
            raise EncodeError(f"{place(path)}: {type(value).__name__} cannot be stored: {exc}") from exc
        self._global(module, name)
        if len(arguments) not in op.SHORT_TUPLES:
            self._parts.append(CODE[op.MARK])
        self._call_cost += call_cost(arguments)
        inside = count()
        for argument in arguments:
            self.save(argument, path, inside, depth)
        self._parts += CODE[op.SHORT_TUPLES.get(len(arguments), op.TUPLE)], CODE[op.REDUCE]

    def _global(self, module: str, name: str) -> None:
        slot = self._globals.get((module, name))
        if slot is not None:
            self._get(slot)
            return
        for text in (module, name):
            self._save_text(text, str, _write_key)
        self._parts += CODE[op.STACK_GLOBAL], b""
        self._globals[module, name] = len(self._parts) - 1

    def _save_tensor(self, value: Any, path: str, opaque: Iterator[int] | None) -> None:
        try:
            stored = self._describe(value)
        except ValueError as exc:
            raise EncodeError(f"{place(path)}: {exc}") from exc
        if opaque is not None or not path:
            path = join_path(path, f"@{next(opaque or count())}")
        if path in self.tensors or path == RESERVED:
            base = "%5F_metadata__" if path == RESERVED else path
            names = chain([base], (f"{base}~{index}" for index in count(2)))
            path = next(name for name in names if name not in self.tensors)
        stored.name, stored.reference = path, reference_text(stored.kind, path, stored.true.attribute)
        self.tensors[path] = stored
        self._global("builtins", "format")
        self._save_text(stored.reference, str, op.write_text)
        self._slots[id(value)] = (len(self._parts) + 1, value)
        self._names[id(value)] = path
        self._parts += CODE[op.TUPLE1] + CODE[op.REDUCE], b""

    def _save_object(self, value: Any, path: str, depth: int) -> None:
        """Write an instance of a class in `allow=` by its `__reduce_ex__`."""
        self.needs_allow = True
        module, name = self._classes[type(value)]
        if isinstance(value, Enum):  # the result of its `__reduce_ex__` depends on the Python version
            self._save_call((module, name, lambda member: (member.value,)), value, path, depth + 1)
            self._remember(value)
            return
        try:
            opcode, arguments, keywords, state, items, pairs = reduction(value)
        except ValueError as exc:
            raise EncodeError(f"{place(path)}: {exc}") from exc
        inside = count()
        self._global(module, name)
        self._parts.append(CODE[op.MARK])
        self._call_cost += call_cost(arguments) if opcode == op.REDUCE else 0  # NEWOBJ copies no arguments
        for argument in arguments:
            self.save(argument, path, inside, depth + 1)
        self._parts.append(CODE[op.TUPLE])
        if keywords is not None:
            self.save(keywords, path, inside, depth + 1)
        self._parts.append(CODE[opcode])
        self._remember(value)
        if items is not None:
            self._save_items(items, path, inside, depth)
        if pairs is not None:
            self._save_pairs(pairs, path, inside, depth)
        if state is not None:
            self.save(state, path, inside, depth + 1)
            self._parts.append(CODE[op.BUILD])


def _remedy(value: Any) -> str:
    cls = type(value)
    remedy = "store plain values, such as its name, path, list(x), dict(x) or str(x)"
    return f"{cls.__module__}.{cls.__qualname__} is not a type of the format; {remedy}, or pass allow=[{cls.__name__}]"


_EMPTY: dict[type, bytes] = {list: CODE[op.EMPTY_LIST], dict: CODE[op.EMPTY_DICT], set: CODE[op.EMPTY_SET]}
_CONTAINERS: dict[type, Callable[[SkeletonWriter, Any, str, Iterator[int] | None, int], None]] = {
    **dict.fromkeys((*LISTED, list, dict, set, defaultdict), SkeletonWriter._save_container),
    tuple: SkeletonWriter._save_tuple,
    frozenset: SkeletonWriter._save_frozenset,
    bytearray: SkeletonWriter._save_bytearray,
}
# an object of these types is one level of nesting
_NESTED = {list, dict, set, defaultdict, OrderedDict, deque, tuple, frozenset, torch.Size}
