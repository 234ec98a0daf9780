"""`Cache`, the base class of all caches, with samples, batches and views; and `BatchInfo`, the record of a batch."""

from __future__ import annotations

import contextlib
import operator
import os
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

from wds_tensorcache.errors import InvalidKeyError, TensorCacheError, list_names
from wds_tensorcache.reading.batch.collate import Collate, Pad, PadValue, as_collate
from wds_tensorcache.reading.batch.request import columns_of
from wds_tensorcache.reading.choose import (
    Alternatives,
    Choices,
    Choose,
    Chooser,
    Randomness,
    choices_of_values,
    choose_tensors,
    place_in_samples,
    place_values,
)
from wds_tensorcache.reading.description import Contents, Description
from wds_tensorcache.reading.lookup.keys import KeysView, respelled
from wds_tensorcache.reading.lookup.positions import numbers_of, spread
from wds_tensorcache.reading.schema import Entry, TensorSchema, format_tensor, printable
from wds_tensorcache.shards.names import original_name, safe_key

if TYPE_CHECKING:
    from typing_extensions import Self, TypeVar

    _Sample = TypeVar("_Sample", covariant=True, default=Any)
else:
    from typing import TypeVar

    _Sample = TypeVar("_Sample", covariant=True)

__all__ = ["BatchInfo", "Cache"]

_Batch = TypeVar("_Batch")
Array = np.ndarray[Any, Any]
_NUM_NEIGHBORS = 4  # keys before and after the place of an unknown one that an error compares with it
_NUM_KEYS = 16  # keys, spread over the cache, that an error compares with an unknown one
_NUM_INDICES = 8  # indices that the repr of a BatchInfo shows
_SHOWN = 1000  # a repr examines at most this many samples, shards and tensors


class Cache(Sequence[_Sample], Dataset[_Sample]):
    """Sequence of samples, each read on access by index or by key. The base class of `TensorCache` and `JoinedCache`.

    `cache[i]` returns the nested sample that was written, with lazy tensors: it reads only the skeleton, which contains the
    sample's structure and small values. `cache[a:b]`, `cache[[…]]`, `select` and `filter` return views, which share files
    and memory with the cache. A cache is also a map-style dataset for torch's `DataLoader`.

    Threads/fork/pickle: safe everywhere. A copy in another process opens the shards again, and raises FormatError for a
        shard that was changed or replaced. `close`, or the end of a `with` block, closes the files and threads of the cache
        and all its views; lazy tensors that were not loaded can then no longer be read.
    """

    @overload
    def __getitem__(self, index: int | str | np.integer[Any]) -> _Sample: ...
    @overload
    def __getitem__(
        self, index: slice | list[int] | list[str] | list[int | str] | list[bool] | Array | torch.Tensor
    ) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        """Return a sample for an index or key, or a view for a slice, a mask, or a list or array of indices or keys.

        Raises:
            IndexError: The index is not in `[-len, len)`.
            TypeError: The index has any other type, or is a mask whose length is not that of the cache.
            KeyError: No sample has the key, or samples of several shards have it.
            FormatError: The shard is damaged, or does not match its index.
        """
        if isinstance(index, slice):
            return self._take(index)
        if isinstance(index, str):
            return self._sample(self._find(index))
        if isinstance(index, list) or getattr(index, "ndim", 0) == 1:
            return self._take(self._numbers(index))
        count = len(self)
        if not hasattr(index, "__index__"):
            raise TypeError(f"expected the index or the key of a sample, got {index!r:.100}")
        number = operator.index(index)
        if not -count <= number < count:
            raise IndexError(f"index {number} out of range [0, {count})")
        return self._sample(number)

    def __iter__(self) -> Iterator[_Sample]:
        for number in range(len(self)):
            yield self._sample(number)

    def __getitems__(self, indices: Sequence[int]) -> list[_Sample]:
        """Return the samples at `indices` as a list; torch's DataLoader calls this to fetch a batch."""
        return self._samples_at(self._numbers(indices).tolist())

    def _samples_at(self, numbers: Sequence[int]) -> list[_Sample]:
        """Return the samples with these indices, all in `[0, len)`."""
        return list(map(self._sample, numbers))

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Return whether there is a sample with this key."""

    @abstractmethod
    def keys(self) -> KeysView:
        """Return the keys in order, as a sequence that decodes each key on access."""

    def original_name(self, key: str) -> str:
        """Return the name from which `tc.safe_key` made the key of a sample, also if the key has only a hash of it.

        Raises:
            InvalidKeyError: `tc.safe_key` did not make the key; or the key has a hash, and the index of the shard no longer has
                the name, for example because another tool wrote the index.
            KeyError: There is no such sample.
        """
        stored = self._stored_name(self._find(key))
        return original_name(key) if stored is None else stored

    def _name_at(self, number: int, key: str) -> str | None:
        """Return the original name of sample `number`, which has this key; None if it is unknown, or if there is none."""
        stored = self._stored_name(number)
        with contextlib.suppress(InvalidKeyError):
            return original_name(key) if stored is None else stored
        return None

    @property
    @abstractmethod
    def schema(self) -> dict[str, TensorSchema]:
        """Properties of each tensor by name: dtype, shape or range of shapes, bytes, and number of samples that have it."""

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, object]:
        """Description of how the cache was made: the fields that have the same value in all shards."""

    @property
    @abstractmethod
    def num_shards(self) -> int:
        """Number of shards of the cache; a view counts the shards of the whole cache."""

    @property
    def members(self) -> dict[str, int]:
        """Number of samples that have a member `KEY.suffix` outside all caches, by suffix: `{"jpg": 100, "json": 100}`."""
        return {suffix: int(np.count_nonzero(having)) for suffix, having in self._having().items()}

    def describe(self) -> Description:
        """Return a description of the tensors, small values and members, whose repr is a summary of bounded length.

        Tensors and members of all samples are counted in the indexes. Values are those of at most 64 samples, spread over the
        cache. A `SharedDataset` loads no sample: it describes at most 1,000 of the samples that are in shared memory.

        Raises:
            FormatError: A shard is damaged, or does not match its index; or a sample needs a class that is not in `allow=`.

        Cost: loads the index of every shard; a few numpy operations per shard and tensor; and reads at most 64 skeletons of
            each cache. No tensor is read.
        """
        contents = Contents(len(self))
        self._collect(contents)
        return contents.description(len(self), self.num_shards, self.members, self.fingerprint)

    @abstractmethod
    def select(self, patterns: str | Iterable[str]) -> Self:
        """Return a view of the tensors whose names match `patterns`, for example `"cond.*"`.

        Patterns are those of `fnmatch`; the name of a container selects all tensors in it. Every batch of the view has all of
        its tensors, also one that all samples of the batch lack. Other tensors are removed from dicts, and replaced by None in
        lists, tuples and deques; they are not read. Small values remain, in the same places of samples and batches. So do
        tensors in sets, in keys of dicts, and in objects of `allow=` classes.

        Raises:
            KeyError: A pattern matches no tensor's name.
            TypeError: A pattern is not a string.
        """

    def filter(self, predicate: Callable[[Entry], object]) -> Self:
        """Return a view of the samples for which `predicate` returns true. No tensor is read.

        Args:
            predicate: Function of an entry, which has `.key`, `.nbytes` (bytes of the sample's tensors) and `.shapes` (shape
                by tensor name).

        Raises:
            KeyError: `predicate` looked up the shape of a tensor that a sample lacks; `entry.shapes.get` returns None instead.
            TypeError: `predicate` is not a function.
        """
        if not callable(predicate):
            raise TypeError(
                f"filter takes a function of an entry, got {predicate!r:.100}; select takes names of tensors"
            )
        kept = (number for number, entry in enumerate(self._entries()) if predicate(entry))
        return self._take(np.fromiter(kept, np.int64))

    @overload
    def read_batch(
        self,
        indices: Iterable[int | str],
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
        collate: Callable[[list[_Sample]], _Batch],
        pad_value: PadValue = 0,
        choose: Choose | None = None,
        choices: Mapping[str, Any] | None = None,
        return_info: Literal[False] = False,
    ) -> _Batch: ...
    @overload
    def read_batch(
        self,
        indices: Iterable[int | str],
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
        collate: Callable[[list[_Sample]], _Batch],
        pad_value: PadValue = 0,
        choose: Choose | None = None,
        choices: Mapping[str, Any] | None = None,
        return_info: Literal[True],
    ) -> tuple[_Batch, BatchInfo]: ...
    @overload
    def read_batch(
        self,
        indices: Iterable[int | str],
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
        collate: str | Pad | Mapping[str, str | Pad] = "stack",
        pad_value: PadValue = 0,
        choose: Choose | None = None,
        choices: Mapping[str, Any] | None = None,
        return_info: Literal[False] = False,
    ) -> Any: ...
    @overload
    def read_batch(
        self,
        indices: Iterable[int | str],
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
        collate: str | Pad | Mapping[str, str | Pad] = "stack",
        pad_value: PadValue = 0,
        choose: Choose | None = None,
        choices: Mapping[str, Any] | None = None,
        return_info: Literal[True],
    ) -> tuple[Any, BatchInfo]: ...
    def read_batch(
        self,
        indices: Any,
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
        collate: Any = "stack",
        pad_value: PadValue = 0,
        choose: Choose | None = None,
        choices: Mapping[str, Any] | None = None,
        return_info: bool = False,
    ) -> Any:
        """Read samples as one batch, without decoding each sample.

        Args:
            indices: Indices or keys of samples, in any order; repetitions are allowed.
            device: Device of the tensors; the CPU by default. Tensors reach a GPU in one transfer from pinned memory.
            pin_memory: Put the tensors into pinned memory.
            collate: `"stack"` returns tensors `[B, …]`. `"list"` returns lists of B tensors, with None for each sample that
                lacks the tensor. `"pad"`, or `tc.pad(to=…, value=…)`, returns tensors `[B, longest, …]`, padded only in their
                first dimension; the row of a sample that lacks the tensor is padding. A dict
                chooses by tensor name or pattern, as in `select`: `{"text": tc.pad(to=512), "cond.*": "list"}`; tensors
                that match no pattern are stacked. A function receives the list of B samples with loaded tensors, and
                returns the batch.
            pad_value: Fill value for `"pad"`, or a dict of fill values by tensor name. `tc.pad(…)` has its own fill value;
                texts and dates are filled with zero bytes.
            choose: Tensors that are alternatives of each other, by the name under which the batch has the chosen one:
                `{"latent": ["latent", "latent_flipped"], "text": "captions.*"}`. Samples may have different numbers of
                alternatives. Only the chosen one is read, and is in the batch. A tuple of names is chosen together:
                `{("latent", "mask"): [("latent", "mask"), ("latent_flipped", "mask_flipped")]}`.
                If no tensor has these names, values do, for example a list of captions as strings. They are decoded and
                chosen on first use. Tensors and values can be chosen together:
                `{("text", "caption"): ("texts.*", "captions.*")}`.
            choices: Choice of each sample, integers `[B]`, by name in `choose`: the number of one of the alternatives that the
                sample has. By default 0, the first one.
            return_info: Return a pair of the batch and its `BatchInfo`, which contains the shapes before padding.

        Returns:
            The samples' structure, with a batched tensor in place of each tensor, and a numpy array in place of each array.
            Dicts keep their keys. Lists and tuples that contain a tensor, selected or not, are kept. Every other value becomes
            a list-like object of B values, decoded on first use; torch computes with numbers in it. A sample lacks a tensor, or
            a container of tensors, if it has None in its place, or if a dict has no such key. The batch has the tensors that
            any of its samples has, and those that are selected, or that `collate` pads or lists.

        Raises:
            IndexError, KeyError: An index is out of range, or no sample has a key.
            ValueError: `indices` is empty, `collate` is unknown, `choose` and `choices` do not fit each other, or an
                alternative is a container of tensors.
            BatchError: Structures or dtypes differ between samples; with `"stack"`, shapes differ, or samples lack a
                tensor; with `"pad"`, shapes differ beyond the first dimension, or a tensor is longer than `to`; or a name in
                `collate` or `pad_value` matches no tensor. If samples differ, the message names two keys. Or a sample has none
                of the alternatives in `choose`, for example because a name there is misspelled.
            FormatError: A shard is damaged, or does not match its index.
            RuntimeError: `device` is not available, or there is no GPU to pin memory for.

        Memory: one block of recycled memory per batch, reused after the batch's last tensor is freed; the cache keeps at
            most `pool_nbytes` of idle blocks (see `tc.open`). One small tensor keeps its whole block alive, so clone a
            tensor that outlives its batch.
        """
        if choose is None and choices is not None:
            raise ValueError("choices without choose=, which says what the alternatives are")
        if not return_info and choose is None:
            request = self._request(indices, collate=collate)
            return self._read_batch(request, device, pin_memory, collate, pad_value)
        numbers = self._numbers(indices)
        randomness = Randomness()
        if choose is not None:
            randomness = Randomness(alternatives=Alternatives.of(choose), given={} if choices is None else choices)
            randomness.check_given()
        batch = self._read_chosen(numbers, randomness, device, pin_memory, collate, pad_value)
        if not return_info:
            return batch
        is_padding = torch.zeros(len(numbers), dtype=torch.bool, device="cpu" if device is None else device)
        return batch, BatchInfo(numbers, is_padding, 0, 0, None, self, _collate=collate, randomness=randomness)

    def read_tensors(
        self,
        indices: Iterable[int | str],
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
        collate: str | Pad | Mapping[str, str | Pad] = "stack",
        pad_value: PadValue = 0,
    ) -> dict[str, Any]:
        """Return the tensors of a batch by name, without its other values. Arguments and errors are those of `read_batch`.

        Args:
            collate: As in `read_batch`, but not a function. `"auto"` stacks each tensor that has one shape in all samples, and
                returns a list for any other tensor.
        """
        request = self._request(indices, collate=collate)
        return self._read_tensors(request, device, pin_memory, collate, pad_value)

    @abstractmethod
    def nest(self, indices: Iterable[int | str], tensors: Mapping[str, Any]) -> Any:
        """Return the batch that `read_batch` returns for these samples, but with tensors from the dict `tensors`, by name.

        Tensors that are not given are left out, as with `select`. Other values are decoded on first use.

        Raises:
            KeyError: No sample of the batch, or of its shards, has a tensor with one of these names.
        """

    def read_members(self, indices: Iterable[int | str], suffix: str) -> list[bytes]:
        """Return the unchanged bytes of each sample's member `KEY.suffix`.

        Raises:
            IndexError, KeyError: The cache lacks a sample, or a sample has no member with this suffix.
            FormatError: A shard does not match its index.
        """
        request = self._request(indices)
        found = self._find_members(request, suffix, range(len(request)))
        for i in range(len(request)):
            if i not in found:
                count = (members := self.members).get(suffix)
                has = f"there are {list_names(members, suffix)}" if count is None else f"{count:,} samples have one"
                raise KeyError(f"sample {request.key(i)!r} has no member {suffix!r:.100}; {has}")
        return [found[i] for i in range(len(request))]

    @abstractmethod
    def close(self) -> None:
        """Close the files and threads of this cache and its views."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return a summary: counts, bytes, tensors and fingerprint.

        Only the first 1,000 samples are searched for tensors, and bytes are summed over only the first 1,000 shards.
        """
        counts = (
            f"{len(self):,} sample{'s' * (len(self) != 1)} in {self.num_shards:,} shard{'s' * (self.num_shards != 1)}"
        )
        lines = [f"{type(self).__name__}: {counts}{self._shown_nbytes()}"]
        try:
            schema = self[:_SHOWN].schema
            lines += [
                f"  {printable(name)}: {format_tensor(tensor)}" for name, tensor in islice(schema.items(), _SHOWN)
            ]
            if len(self) > _SHOWN:
                lines.append(f"  (tensors of the first {_SHOWN:,} samples)")
        except (TensorCacheError, OSError, ValueError) as exc:  # the cache is closed or damaged
            lines.append(f"  tensors unknown: {exc}")
        return "\n".join([*lines, *([f"  fingerprint: {self.fingerprint!r:.1000}"] if self.fingerprint else [])])

    def _shown_nbytes(self) -> str:
        try:
            nbytes = sum(map(self._file_nbytes, islice(self._paths(), _SHOWN)))
        except OSError:
            return ""
        return f" of {'at least ' if self.num_shards > _SHOWN else ''}{nbytes:,} bytes"

    def _file_nbytes(self, path: str) -> int:
        """Return the length of a shard; raise OSError if it cannot be found, or is unknown."""
        return os.path.getsize(path)

    def _numbers(self, indices: Any) -> Array:
        """Return sample indices, int64 `[B]`, for indices, keys or a mask."""
        return numbers_of(indices, len(self), self._find)

    def _near_keys(self, key: str) -> str:
        """Return a list of keys for a message: other spellings of `key` that exist, or else some keys, similar ones first."""
        keys = self.keys()
        known = [other for other in respelled(key, len(keys[0]) if len(keys) else 0) if other in self]
        if not known:
            # if the keys ascend, the keys next to this place are similar
            place = bisect_left(keys, key)
            near = keys[max(0, place - _NUM_NEIGHBORS) : place + _NUM_NEIGHBORS]
            known = [*near, *(keys[number] for number in spread(len(self), _NUM_KEYS))]
        safe = safe_key(key)
        if safe != key and safe in self:
            return f"{safe!r}, the key that tc.safe_key makes of this name; use cache[tc.safe_key(…)]"
        return list_names(known, key, len(self))

    def _shapes(self, numbers: Array) -> dict[str, torch.Tensor]:
        """Return `BatchInfo.shapes` of samples."""
        found = [entry.shapes for entry in self._take(numbers)._entries(selected=True)]
        result = {}
        for name, first in dict(chain.from_iterable(each.items() for each in reversed(found))).items():
            shapes = [each.get(name, (0,) * len(first)) for each in found]
            if all(len(shape) == len(first) for shape in shapes):
                result[name] = torch.from_numpy(np.array(shapes, np.int64).reshape(len(found), -1))
        return result

    @abstractmethod
    def _sample(self, number: int) -> _Sample: ...

    @abstractmethod
    def _find(self, key: str) -> int: ...

    def _stored_name(self, number: int) -> str | None:
        """Return the original name of a sample in the index of its shard; None if the key holds the name, or there is none."""
        return None

    @abstractmethod
    def _take(self, numbers: slice | Array) -> Self: ...

    def _batch_names(self) -> list[str]:
        """Return the names of all tensors that a batch may have, also those that no sample of this view has."""
        return list(self.schema)

    @abstractmethod
    def _request(self, indices: Any, *, collate: Any = None) -> Any:
        """Return a request for samples.

        Args:
            indices: Indices or keys, or a request of another view of the same cache.
            collate: As in `read_batch`. The batch has all tensors that it pads or lists, also if all samples lack one.
        """

    def _request_chosen(self, numbers: Array, randomness: Randomness, *, collate: Any = None) -> Any:
        """Return a request for samples by index, with the alternatives that `randomness` chooses, if it has any."""
        request = self._request(numbers, collate=collate)
        if randomness.alternatives is None:
            return request
        return self._choose(request, randomness.alternatives, randomness.chooser(numbers))

    def _read_chosen(
        self,
        numbers: Array,
        randomness: Randomness,
        device: Any = None,
        pin_memory: bool = False,
        collate: Any = "stack",
        pad_value: PadValue = 0,
    ) -> Any:
        """Return the batch of samples by index, with the chosen alternatives; see `read_batch`."""
        request = self._request_chosen(numbers, randomness, collate=collate)
        if randomness.alternatives is None or not request.values:
            return self._read_batch(request, device, pin_memory, collate, pad_value)
        chooser = randomness.chooser(numbers)
        keys = [request.key(i) for i in range(len(request))]
        if callable(collate):
            return self._read_batch(
                request,
                device,
                pin_memory,
                lambda samples: collate(place_in_samples(samples, request, chooser, keys)),
                pad_value,
            )
        return place_values(self._read_batch(request, device, pin_memory, collate, pad_value), request, chooser, keys)

    def _choices(self, numbers: Array, randomness: Randomness) -> Choices:
        """Return the choices of a batch; decodes values that are alternatives."""
        request = self._request_chosen(numbers, randomness)
        found: Choices = request.named_choices()
        if not request.values:
            return found
        keys = [request.key(i) for i in range(len(request))]
        return found._with_more(
            choices_of_values(self.nest(request, {}), request, randomness.chooser(numbers), keys), ""
        )

    def _choose(self, request: Any, alternatives: Alternatives, chooser: Chooser) -> Any:
        """Return a request with one of the alternatives for each sample."""
        return choose_tensors(request, alternatives, chooser)

    def _request_shapes(self, request: Any) -> dict[str, torch.Tensor]:
        """Return shapes by tensor name, int64 `[B, ndim]`, of the tensors of a request; see `_shapes`."""
        layouts = request.layouts()
        columns = columns_of(request, layouts)
        found: dict[str, torch.Tensor] = {}
        for name, references in zip(columns.names, columns.references, strict=True):
            dimensions = {len(reference.shape) for reference in references if reference is not None}
            if len(dimensions) == 1:
                (ndim,) = dimensions
                shapes = [(0,) * ndim if reference is None else reference.shape for reference in references]
                found[name] = torch.from_numpy(np.array(shapes, np.int64).reshape(len(shapes), -1)[layouts.which])
        return found

    @abstractmethod
    def _read_batch(self, request: Any, device: Any, pin: bool, collate: Any, pad_value: PadValue) -> Any: ...

    @abstractmethod
    def _read_tensors(
        self, request: Any, device: Any, pin: bool, collate: Any, pad_value: PadValue
    ) -> dict[str, Any]: ...

    @abstractmethod
    def _entries(self, *, selected: bool = False) -> Iterator[Entry]:
        """Yield an `Entry` for each sample; `selected` leaves out the shapes of tensors that are not selected."""

    @abstractmethod
    def _collect(self, contents: Contents, prefix: str = "") -> None:
        """Add tensors and values to `contents`, with `prefix` before their names."""

    @abstractmethod
    def _having(self) -> dict[str, Array]:
        """Return masks by suffix: True for each sample that has a member `KEY.suffix` outside all caches; bool `[len]`."""

    @abstractmethod
    def _find_members(self, request: Any, suffix: str, wanted: Iterable[int]) -> dict[int, bytes]:
        """Return the member `KEY.suffix` of each sample in `wanted` that has one. Samples are positions in the batch."""

    @property
    def _left_out(self) -> str | None:
        """Message about shards that the cache lacks, since the manifest of their folder does not list them."""
        return None

    @abstractmethod
    def _paths(self) -> Iterator[str]: ...

    @abstractmethod
    def _single_threaded(self) -> Self: ...


class BatchInfo:
    """Immutable record of a batch's samples, epoch and step.

    The class is not a dataclass: to move a dataclass to a device, trainers rebuild it field by field, and cannot do so with an
    immutable one. They move this record by calling its `to` method, as they move a tensor.

    Attributes:
        indices: Sample indices in the cache, int64 `[B]`, read-only.
        is_padding: True for each row that is padding, bool `[B]`, on the batch's device. Training should ignore these rows.
        epoch, step: Epoch and step of a loader's batch; steps are numbered through all epochs. With `read_batch`, both are 0.
        source: Name of the batch's cache in `mix`, or value of its bucket in `bucket_by`; with both, a tuple of name and value;
            None without these options.
        cache: Cache of the samples; None in a pickled copy, which has keys, shapes and choices.

    Threads/fork/pickle: immutable, safe everywhere; a copy has keys, shapes and choices in place of the cache.
        Records are equal if everything but the cache is equal.
    """

    __slots__ = (
        "_collate",
        "_edits",
        "_randomness",
        "_sent",
        "cache",
        "epoch",
        "indices",
        "is_padding",
        "source",
        "step",
    )

    indices: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    is_padding: torch.Tensor
    epoch: int
    step: int
    source: object
    cache: Cache | None
    _collate: Collate | None  # None if the batch was collated by a function
    _edits: list[Any]  # transforms that have run and changed shapes, in order
    _randomness: Randomness
    _sent: tuple[tuple[str, ...], dict[str, Array], Choices, dict[str, int]] | None

    def __init__(
        self,
        indices: Array,
        is_padding: torch.Tensor,
        epoch: int,
        step: int,
        source: object,
        cache: Cache | None,
        _sent: Any = None,
        _collate: Any = None,
        *,
        randomness: Randomness | None = None,
        edits: Iterable[Any] = (),
    ) -> None:
        _collate = None if _collate is None or callable(_collate) else as_collate(_collate, 0)
        randomness = randomness or Randomness(epochs=epoch)
        values = (_collate, list(edits), randomness, _sent, cache, epoch, _read_only(indices), is_padding, source, step)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a BatchInfo is immutable")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a BatchInfo is immutable")

    @property
    def keys(self) -> list[str]:
        """Keys of the samples."""
        if self.cache is None:
            return list(self._sent[0]) if self._sent is not None else []
        keys = self.cache.keys()
        return [keys[index] for index in self.indices.tolist()]

    @property
    def shapes(self) -> dict[str, torch.Tensor]:
        """Shapes before padding by tensor name, int64 `[B, ndim]`, of tensors that have one number of dimensions in the batch.

        The shape of a tensor that a sample lacks is zeros. Tensors that all samples of the batch lack are left out. After
        `tc.drop_text` and `tc.sample_moments`, the shapes are those of what the batch holds.
        """
        return self._held()[0]

    def _held(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Return `shapes`, and the padded lengths of the tensors whose shapes transforms have changed."""
        shapes, lengths = self._stored_shapes(), {} if self._sent is None else dict(self._sent[3])
        for transform in self._edits:
            transform.edit_shapes(shapes, lengths, self)
        return shapes, lengths

    def _stored_shapes(self) -> dict[str, torch.Tensor]:
        if self.cache is None:
            return {
                name: torch.from_numpy(shapes.copy()) for name, shapes in (self._sent[1] if self._sent else {}).items()
            }
        if self._randomness.alternatives is not None:
            return self.cache._request_shapes(self.cache._request_chosen(self.indices, self._randomness))
        return self.cache._shapes(self.indices)

    @property
    def seeds(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """A random seed for each row, int64 `[B]`, in `[0, 2^63)`.

        A seed is a pure function of the loader's seed, the epoch and the sample index, so it does not depend on the batch
        size, the ranks or the position in the batch. With `repeats`, and with weights in `mix`, the number of the pass over
        the sample's cache takes the place of the epoch, so a sample has another seed in each pass. A sample that `weights`
        draw twice in an epoch has the same seed twice; in a mix with weights of samples, as many draws as the cache or bucket
        has samples count as one pass. A row that fills an epoch's last step has the seed of the row that it
        repeats.
        """
        return self._randomness.seeds(self.indices)

    @property
    def choices(self) -> Choices:
        """The choices among the alternatives of `choose=`, by name, int64 `[B]`; see `Choices`.

        Empty without `choose`.
        """
        if self.cache is None:
            return self._sent[2] if self._sent is not None else Choices({}, {})
        if self._randomness.alternatives is None:
            return Choices({}, {})
        return self.cache._choices(self.indices, self._randomness)

    def mask(self, name: str) -> torch.Tensor:
        """Return the mask of a padded tensor: bool `[B, T]`, on the batch's device, True for data and False for padding.

        T is the length of the rows: as `tc.pad(to=…)` says, otherwise that of the longest row. A sample that lacks the tensor
        has no data. After `tc.drop_text`, this is the mask of the texts that the batch holds. Any other transform that changes
        lengths must make its own mask.

        Raises:
            KeyError: No tensor has this name, or samples differ in its number of dimensions. In a pickled copy, also if no
                sample of the batch has the tensor.
            ValueError: The tensor has no dimensions.
        """
        shapes, held_lengths = self._held()
        if name not in shapes and self._is_lacking(name):
            shapes = {name: torch.zeros((len(self.indices), 1), dtype=torch.int64, device="cpu")}  # no sample has it
        if name not in shapes:
            raise KeyError(f"no tensor {name!r:.100} of one number of dimensions; there are {list_names(shapes, name)}")
        if not shapes[name].shape[1]:
            raise ValueError(f"tensor {name!r} has no dimensions, so it is not padded and has no mask")
        lengths = shapes[name][:, :1]
        length = held_lengths[name] if name in held_lengths else self._length(name, lengths)
        mask = torch.arange(length, device=lengths.device) < lengths
        return _moved(mask, self.is_padding.device)

    def _length(self, name: str, lengths: torch.Tensor) -> int:
        """Return the padded length of a tensor's rows, whose lengths before padding are `lengths`."""
        way = None if self._collate is None else self._collate.ways_for([name])[0]
        longest = int(lengths.max())
        return way.length(longest) if isinstance(way, Pad) else longest

    def _is_list(self, name: str) -> bool:
        """Return whether the rows of a tensor are a list, so that they have no padding."""
        return self._collate is not None and self._collate.ways_for([name])[0] == "list"

    def _is_lacking(self, name: str) -> bool:
        """Return whether the cache has a tensor that no sample of the batch has."""
        if self.cache is None or name not in self.cache._batch_names():
            return False
        return not any(name in entry.shapes for entry in self.cache._take(self.indices)._entries(selected=True))

    def to(self, device: torch.device | str | None = None, non_blocking: bool = False) -> BatchInfo:
        """Return a record whose `is_padding` is on `device`. Lightning and accelerate call this when they move a batch."""
        is_padding = _moved(self.is_padding, device, non_blocking)
        at = self.epoch, self.step, self.source
        return BatchInfo(
            self.indices,
            is_padding,
            *at,
            self.cache,
            self._sent,
            self._collate,
            randomness=self._randomness,
            edits=self._edits,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchInfo):
            return NotImplemented
        return (
            (self.epoch, self.step, self.source, self.keys) == (other.epoch, other.step, other.source, other.keys)
            and np.array_equal(self.indices, other.indices)
            and torch.equal(self.is_padding.cpu(), other.is_padding.cpu())
            and np.array_equal(self.seeds, other.seeds)
            and self.choices == other.choices
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return a summary of bounded length: it shows the first 8 indices, and counts the rows that are padding."""
        indices = ", ".join(map(str, self.indices[:_NUM_INDICES].tolist())) + ", …" * (len(self.indices) > _NUM_INDICES)
        cache = "None" if self.cache is None else f"{type(self.cache).__name__} of {len(self.cache):,} samples"
        return (
            f"BatchInfo({len(self.indices):,} samples, {int(self.is_padding.sum()):,} of them padding, indices=[{indices}], "
            f"epoch={self.epoch}, step={self.step}, source={self.source!r:.100}, cache={cache})"
        )

    def __reduce__(self) -> Any:
        # arrays, because torch would send a file descriptor for each tensor
        shapes, lengths = self._held()
        sent = tuple(self.keys), {name: each.numpy() for name, each in shapes.items()}, self.choices, lengths
        at, randomness = (self.epoch, self.step, self.source), (self._randomness.seed, self._randomness.epochs)
        return _received, (self.indices, self.is_padding.cpu().numpy(), *at, sent, self._collate, randomness)


def _received(
    indices: Array, padding: Array, epoch: int, step: int, source: object, sent: Any, collate: Any, randomness: Any
) -> BatchInfo:
    is_padding = torch.from_numpy(padding)
    return BatchInfo(indices, is_padding, epoch, step, source, None, sent, collate, randomness=Randomness(*randomness))


def _read_only(array: Array) -> Array:
    """Return a copy that cannot be written."""
    copied: Array = array.copy()
    copied.flags.writeable = False
    return copied


def _moved(mask: torch.Tensor, device: torch.device | str | None, non_blocking: bool = False) -> torch.Tensor:
    """Return a mask on a device."""
    if device is not None and torch.device(device).type == "cuda" and mask.device.type == "cpu":
        # Hazard: a copy from pageable memory would wait for all work that is queued on the GPU.
        mask, non_blocking = mask.pin_memory(), True
    return mask.to(device, non_blocking=non_blocking)


def _collate_infos(batch: list[Any], *, collate_fn_map: Any = None) -> list[Any]:
    return list(batch)


default_collate_fn_map.setdefault(BatchInfo, _collate_infos)
