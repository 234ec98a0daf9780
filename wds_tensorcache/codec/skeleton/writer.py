"""Objects to skeleton bytes: one walk that names the tensors and writes the pickle (FORMAT.md 2).

Python's own pickler is not used: its bytes depend on which equal strings are one object, on the hash seed and on the
Python version. This one writes the same bytes for the same sample everywhere, and only opcodes that `unpickle` reads.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from enum import Enum
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.collector import collector_paused
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.codec.reference import reference_text
from wds_tensorcache.codec.skeleton import opcodes as op
from wds_tensorcache.codec.skeleton.builders import MAX_DEQUES, reduction
from wds_tensorcache.codec.skeleton.calls import CALLS_OF_ANY, PER_BYTE, call_budget, call_cost
from wds_tensorcache.codec.skeleton.hashing import comparison_budget, work_of_keys
from wds_tensorcache.codec.skeleton.key_costs import ONLY_COMPARED, are_few_texts, hash_cost
from wds_tensorcache.codec.skeleton.opcodes import CODE
from wds_tensorcache.codec.skeleton.paths import RESERVED, Counter, component, join, short_component, unique
from wds_tensorcache.codec.skeleton.refusals import at, checked_arguments, remedy
from wds_tensorcache.codec.skeleton.types import FACTORIES, LISTED, numpy_dtype_arguments, torch_dtype_name
from wds_tensorcache.codec.storable import StorableTensor, describe_tensor
from wds_tensorcache.codec.tree import MAX_DEPTH
from wds_tensorcache.errors import EncodeError, FormatError

__all__ = ["MANY_ITEMS", "SkeletonWriter"]

MANY_ITEMS = 1000  # in one container

_NO_CLASSES: dict[type, tuple[str, str]] = {}
_TEXTS = frozenset({str})
_FIRST = itemgetter(0)
_RUNNING = nullcontext()  # leaves the garbage collector as it is
_write_key = lru_cache(4096)(op.write_text)  # the keys of dicts are the same in every sample


class SkeletonWriter:
    """One walk over one sample; `body()` and `tensors` are its results."""

    def __init__(self, allow: Mapping[tuple[str, str], type]) -> None:
        self.tensors: dict[str, StorableTensor] = {}  # by name, in the order of the walk
        self._allow = allow
        self._classes = {cls: key for key, cls in allow.items()} if allow else _NO_CLASSES
        self._parts: list[bytes] = []  # what to write; empty where a MEMOIZE or a GET may come
        self._gets: dict[int, int] = {}  # which of these is a GET, and the MEMOIZE of what it gets
        self._fetched: list[tuple[int, Any]] = []  # which of these get the argument of a call, and what it is
        self._call_cost = 0
        self._slots: dict[int, tuple[int, object]] = {}  # by id; holds the object, so that its id is not reused
        self._texts: dict[type, dict[Any, int]] = {str: {}, bytes: {}}  # by value
        self._globals: dict[tuple[str, str], int] = {}
        self._canonicals: dict[int, tuple[object, bytes | None]] = {}  # by id, as above
        self._hash_cost = self._comparisons = 0
        self.needs_allow = False  # whether a reader must allow classes
        self._num_deques = 0

    def body(self) -> bytes:
        """Return the pickle behind the preamble."""
        body = self._join()
        if self._call_cost > CALLS_OF_ANY:
            body = self._write_arguments_anew(body)
        if self._hash_cost > 1000 + 10 * len(body):
            raise EncodeError(f"{self._hash_cost} parts in keys and set elements, most of them shared; use a list")
        if self._comparisons and self._comparisons > comparison_budget(len(body)):
            raise EncodeError(
                "keys or set elements that share hashes and are long, or shared by many dicts; use a list"
            )
        if self._num_deques > MAX_DEQUES:
            raise EncodeError(f"{self._num_deques} deques, and at most {MAX_DEQUES} are read back; store list(x)")
        return body

    def _join(self) -> bytes:
        """Return the parts, with a MEMOIZE for everything that is fetched, numbered in their order."""
        parts, gets = self._parts, self._gets
        if gets:
            memo = {}
            for number, slot in enumerate(sorted(set(gets.values()))):
                parts[slot] = CODE[op.MEMOIZE]
                memo[slot] = op.GETS[number] if number < len(op.GETS) else op.write_get(number)
            for index, slot in gets.items():
                parts[index] = memo[slot]
        parts.append(CODE[op.STOP])
        body = b"".join(parts)
        parts.pop()
        return body

    def _write_arguments_anew(self, body: bytes) -> bytes:
        """Return a body that is long enough for what its calls are given, as its readers demand.

        As many arguments as that needs, the last first, are written instead of being fetched.
        """
        while (missing := self._call_cost - call_budget(len(body))) > 0:
            if not self._fetched:
                raise EncodeError(
                    f"values that take {self._call_cost} bytes to build, most of them shared; use a tensor"
                )
            for slot in set(self._gets.values()):
                self._parts[slot] = b""
            while self._fetched and missing > 0:
                index, value = self._fetched.pop()
                self._parts[index] = op.ATOM_WRITERS[type(value)](value)
                del self._gets[index]
                missing -= PER_BYTE * (len(self._parts[index]) - op.LONGEST_GET)
            body = self._join()
        return body

    def save(self, value: Any, path: str = "", opaque: Counter | None = None, depth: int = 1) -> None:
        """Write `value`, which lies at `path`; `opaque` counts the tensors of an object that has no paths inside."""
        cls = type(value)
        if (atom := op.ATOM_WRITERS.get(cls)) is not None:
            self._save_atom(value, cls, atom)
            return
        known = self._slots.get(id(value))
        if known is not None:
            self._get(known[0])
            return
        if depth > MAX_DEPTH and (cls in _NESTED or cls in self._classes):
            raise EncodeError(f"{at(path)}: containers nest more than {MAX_DEPTH} deep; flatten them")
        container = _CONTAINERS.get(cls)
        if container is not None:
            container(self, value, path, opaque, depth)
        elif cls in LISTED:
            self._save_listed(value, path, opaque, depth)
        elif cls in self._classes:
            self._save_object(value, path, depth)
        elif isinstance(value, (torch.Tensor, np.ndarray, LazyTensor, LazyArray)):
            self._save_tensor(value, path, opaque)
        elif cls is torch.dtype:
            self._global("torch", torch_dtype_name(value))
        elif value is ...:
            self._global("builtins", "Ellipsis")
        elif isinstance(value, np.dtype):
            self._save_call("numpy", "dtype", checked_arguments(numpy_dtype_arguments, value, path), path)
        else:
            raise EncodeError(f"{at(path)}: {remedy(value)}")

    def _get(self, slot: int) -> None:
        self._gets[len(self._parts)] = slot
        self._parts.append(b"")

    def _remember(self, value: object) -> None:
        self._slots[id(value)] = (len(self._parts), value)
        self._parts.append(b"")

    def _save_atom(self, value: Any, cls: type, atom: Callable[[Any], bytes]) -> None:
        parts, known = self._parts, self._texts.get(cls)
        if known is None or len(value) < 2:  # a GET and its MEMOIZE are no shorter than what they save
            parts.append(atom(value))
            return
        slot = known.setdefault(value, len(parts) + 1)
        if slot < len(parts):
            self._get(slot)
        else:
            parts += atom(value), b""

    def _save_item(self, item: Any, path: str, part: object, opaque: Counter | None, depth: int) -> None:
        """Write what lies at `part` of `path`."""
        if (atom := op.ATOM_WRITERS.get(type(item))) is not None:  # has no path
            self._save_atom(item, type(item), atom)
            return
        if not opaque:
            path = f"{path}.{part}" if path else str(part)
        self.save(item, path, opaque, depth + 1)

    def _save_list(self, value: list[Any], path: str, opaque: Counter | None, depth: int) -> None:
        self._parts.append(CODE[op.EMPTY_LIST])
        self._remember(value)
        self._save_items(value, path, opaque, depth)

    def _save_items(self, values: Iterable[Any], path: str, opaque: Counter | None, depth: int) -> None:
        values = list(values)
        if values:
            self._parts.append(CODE[op.MARK])
            with collector_paused(True) if len(values) > MANY_ITEMS else _RUNNING:
                for index, item in enumerate(values):
                    if (atom := op.ATOM_WRITERS.get(type(item))) is not None:
                        self._save_atom(item, type(item), atom)
                    else:
                        self._save_item(item, path, index, opaque, depth)
            self._parts.append(CODE[op.APPENDS])

    def _save_dict(self, value: dict[Any, Any], path: str, opaque: Counter | None, depth: int) -> None:
        self._parts.append(CODE[op.EMPTY_DICT])
        self._remember(value)
        self._save_pairs(value.items(), path, opaque, depth)

    def _save_pairs(self, pairs: Iterable[tuple[Any, Any]], path: str, opaque: Counter | None, depth: int) -> None:
        pairs = list(pairs)
        if not pairs:
            return
        keys = list(map(_FIRST, pairs))
        if len(keys) > ONLY_COMPARED or not _TEXTS.issuperset(map(type, keys)):
            self._check_keys(keys, path)
        self._parts.append(CODE[op.MARK])
        with collector_paused(True) if len(pairs) > MANY_ITEMS else _RUNNING:
            for index, (key, item) in enumerate(pairs):
                if type(key) is not str:
                    inside = path if opaque else join(path, component(key, index))
                    self.save(key, inside, Counter(), depth + 1)
                else:
                    self._save_atom(key, str, _write_key if len(key) < 64 else op.write_text)
                if (atom := op.ATOM_WRITERS.get(type(item))) is not None:  # has no path
                    self._save_atom(item, type(item), atom)
                else:
                    part = short_component(key) if type(key) is str and len(key) < 64 else component(key, index)
                    self._save_item(item, path, part, opaque, depth)
        self._parts.append(CODE[op.SETITEMS])

    def _check_keys(self, keys: list[Any], path: str, *, is_set: bool = False) -> None:
        """Refuse keys that a reader would refuse, and count what they cost it."""
        if are_few_texts(keys, 0):
            return
        try:
            self._hash_cost += hash_cost(keys, sys.maxsize)
            self._comparisons += work_of_keys(keys, is_set)
        except FormatError as exc:
            raise EncodeError(f"{at(path)}: {exc}; use other keys, or a list") from exc

    def _save_tuple(self, value: tuple[Any, ...], path: str, opaque: Counter | None, depth: int) -> None:
        if len(value) not in op.SHORT_TUPLES:
            self._parts.append(CODE[op.MARK])
        for index, item in enumerate(value):
            self._save_item(item, path, index, opaque, depth)
        known = self._slots.get(id(value))
        if known is not None:  # one of the items holds this tuple, and has written it
            self._parts.append(CODE[op.POP] * len(value) if len(value) in op.SHORT_TUPLES else CODE[op.POP_MARK])
            self._get(known[0])
            return
        self._parts.append(CODE[op.SHORT_TUPLES.get(len(value), op.TUPLE)])
        if value:
            self._remember(value)

    def _save_set(self, value: set[Any], path: str, opaque: Counter | None, depth: int) -> None:
        self._parts.append(CODE[op.EMPTY_SET])
        self._remember(value)
        if value:
            self._save_elements(value, path, depth)
            self._parts.append(CODE[op.ADDITEMS])

    def _save_frozenset(self, value: frozenset[Any], path: str, opaque: Counter | None, depth: int) -> None:
        self._save_elements(value, path, depth)
        if id(value) in self._slots:
            raise EncodeError(f"{at(path)}: a frozenset that holds itself; use a list")
        self._parts.append(CODE[op.FROZENSET])
        self._remember(value)

    def _save_elements(self, values: Iterable[Any], path: str, depth: int) -> None:
        self._parts.append(CODE[op.MARK])
        inside = Counter()  # elements have no names: tensors in them are counted
        elements = sorted(values, key=lambda item: self._canonical(item, path, depth + 1))
        self._check_keys(elements, path, is_set=True)
        for item in elements:
            self.save(item, path, inside, depth + 1)

    def _canonical(self, value: Any, path: str, depth: int) -> bytes:
        """Return bytes that depend on nothing but the value, to sort the elements of a set by."""
        atom = op.ATOM_WRITERS.get(type(value))
        if atom is not None:
            return atom(value)
        known = self._canonicals.get(id(value))
        if known is None:
            self._canonicals[id(value)] = (value, None)  # begun
            alone = SkeletonWriter(self._allow)
            alone._canonicals = self._canonicals
            alone.save(value, path, Counter(), depth)
            known = value, alone.body() + b"".join(bytes(tensor.flat) for tensor in alone.tensors.values())
            self._canonicals[id(value)] = known
        if known[1] is None:
            raise EncodeError(f"{at(path)}: a set that one of its elements holds; use a list")
        return known[1]

    def _save_deque(self, value: deque[Any], path: str, opaque: Counter | None, depth: int) -> None:
        self._num_deques += 1
        self._save_listed(value, path, opaque, depth)
        self._save_items(value, path, opaque, depth)

    def _save_ordered_dict(self, value: OrderedDict[Any, Any], path: str, opaque: Counter | None, depth: int) -> None:
        self._save_listed(value, path, opaque, depth)
        self._save_pairs(value.items(), path, opaque, depth)

    def _save_defaultdict(self, value: defaultdict[Any, Any], path: str, opaque: Counter | None, depth: int) -> None:
        factory = value.default_factory
        if factory is not None and factory not in FACTORIES:
            names = ", ".join(FACTORIES.values())
            raise EncodeError(f"{at(path)}: a defaultdict's factory must be None or one of {names}; store dict(x)")
        self._global("collections", "defaultdict")
        if factory is None:
            self._parts.append(CODE[op.EMPTY_TUPLE])
        else:
            self._global("builtins", FACTORIES[factory])
            self._parts.append(CODE[op.TUPLE1])
        self._parts.append(CODE[op.REDUCE])
        self._remember(value)
        self._save_pairs(value.items(), path, opaque, depth)

    def _save_bytearray(self, value: bytearray, path: str, opaque: Counter | None, depth: int) -> None:
        self._parts.append(op.write_bytearray(value))
        self._remember(value)

    def _save_listed(self, value: Any, path: str, opaque: Counter | None, depth: int) -> None:
        listed = LISTED[type(value)]
        self._save_call(listed.module, listed.name, checked_arguments(listed.arguments, value, path), path, depth)
        self._remember(value)

    def _save_call(self, module: str, name: str, arguments: tuple[Any, ...], path: str, depth: int = 1) -> None:
        """Write `module.name(*arguments)`; the arguments are plain, so no tensor and no path is in them."""
        self._global(module, name)
        if len(arguments) not in op.SHORT_TUPLES:
            self._parts.append(CODE[op.MARK])
        self._save_arguments(arguments, path, Counter(), depth)
        self._parts.append(CODE[op.SHORT_TUPLES.get(len(arguments), op.TUPLE)])
        self._parts.append(CODE[op.REDUCE])

    def _save_arguments(self, arguments: tuple[Any, ...], path: str, inside: Counter, depth: int) -> None:
        self._call_cost += call_cost(arguments)
        for argument in arguments:
            num_gets = len(self._gets)
            self.save(argument, path, inside, depth)
            if type(argument) in self._texts and len(self._gets) > num_gets:
                self._fetched.append((len(self._parts) - 1, argument))

    def _global(self, module: str, name: str) -> None:
        slot = self._globals.get((module, name))
        if slot is not None:
            self._get(slot)
            return
        for text in (module, name):
            self._save_atom(text, str, _write_key)
        self._parts += CODE[op.STACK_GLOBAL], b""
        self._globals[module, name] = len(self._parts) - 1

    def _save_tensor(self, value: Any, path: str, opaque: Counter | None) -> None:
        try:
            stored = describe_tensor(value)
        except ValueError as exc:
            raise EncodeError(f"{at(path)}: {exc}") from exc
        if opaque is not None or not path:
            path = join(path, f"@{(opaque or Counter()).next()}")
        if path in self.tensors or path == RESERVED:
            path = unique(path, self.tensors)
        stored.name, stored.reference = path, reference_text(stored.kind, path, stored.true.attribute)
        self.tensors[path] = stored
        self._global("builtins", "format")
        self._save_atom(stored.reference, str, op.write_text)
        self._slots[id(value)] = (len(self._parts) + 1, value)
        self._parts += CODE[op.TUPLE1] + CODE[op.REDUCE], b""

    def _save_object(self, value: Any, path: str, depth: int) -> None:
        """Write an instance of a class in allow= as its `__reduce_ex__` describes it."""
        self.needs_allow = True
        cls = type(value)
        inside = Counter()
        if isinstance(value, Enum):  # what Enum reduces to depends on the Python version
            self._global(*self._classes[cls])
            self._save_arguments((value.value,), path, inside, depth + 1)
            self._parts.append(CODE[op.TUPLE1] + CODE[op.REDUCE])
            self._remember(value)
            return
        opcode, arguments, keywords, state, items, pairs = reduction(value, path)
        self._global(*self._classes[cls])
        self._parts.append(CODE[op.MARK])
        if opcode == op.REDUCE:
            self._save_arguments(arguments, path, inside, depth + 1)
        else:  # copies nothing
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


_CONTAINERS: dict[type, Callable[[SkeletonWriter, Any, str, Counter | None, int], None]] = {
    list: SkeletonWriter._save_list,
    dict: SkeletonWriter._save_dict,
    tuple: SkeletonWriter._save_tuple,
    set: SkeletonWriter._save_set,
    frozenset: SkeletonWriter._save_frozenset,
    deque: SkeletonWriter._save_deque,
    OrderedDict: SkeletonWriter._save_ordered_dict,
    defaultdict: SkeletonWriter._save_defaultdict,
    bytearray: SkeletonWriter._save_bytearray,
}
_NESTED = {*_CONTAINERS, torch.Size} - {bytearray}  # what counts as one level of nesting
