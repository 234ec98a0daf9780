"""`Cache`, the base class of all caches, and `TensorCache`, for shards."""

from __future__ import annotations

import contextlib
import glob
import operator
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch.utils.data import Dataset

from wds_tensorcache.codec.reference import resolve
from wds_tensorcache.codec.tree import Wanted
from wds_tensorcache.errors import (
    NUM_COMPARED,
    FormatError,
    InvalidKeyError,
    TensorCacheError,
    format_count,
    list_names,
    plain,
    unknown_name,
)
from wds_tensorcache.reading.collate import TENSOR_WAYS, Collate, Pad, PadValue
from wds_tensorcache.reading.positions import (
    KeysView,
    Positions,
    as_array,
    numbers_of,
    spread,
    take,
)
from wds_tensorcache.reading.schema import (
    Entry,
    TensorSchema,
    as_patterns,
    entries,
    find_unknown,
    format_tensor,
    members_of,
    name_matcher,
    schema_of,
    stored_shapes,
    whole_schema,
    with_trees,
)
from wds_tensorcache.reading.store import Store
from wds_tensorcache.shards.names import original_name
from wds_tensorcache.storage.threads import computed_once
from wds_tensorcache.storage.urls import is_url

if TYPE_CHECKING:
    from typing_extensions import Self, TypeVar

    from wds_tensorcache.reading.batch.request import Request, Structures
    from wds_tensorcache.reading.batch_info import BatchInfo
    from wds_tensorcache.reading.choose import Alternatives, Choose, Chooser, Randomness
    from wds_tensorcache.reading.description import Contents, Description

    _Sample = TypeVar("_Sample", covariant=True, default=Any)
else:
    from typing import TypeVar

    _Sample = TypeVar("_Sample", covariant=True)

Array = np.ndarray[Any, Any]
_SHOWN = 1000  # a repr examines at most this many samples, shards and tensors
_NUM_PATHS = 4  # shards that an error about a repeated key lists


class Cache(Sequence[_Sample], Dataset[_Sample]):
    """Sequence of samples, each read on access by index or by key. The base class of all caches.

    `cache[i]` returns the nested sample that was written, with lazy tensors: it reads only the skeleton, which contains the
    sample's structure and small values. `cache[a:b]`, `cache[[…]]`, `select` and `filter` return views, which share files
    and memory with the cache. A cache is also a map-style dataset for torch's `DataLoader`.

    Threads/fork/pickle: safe everywhere. A copy in another process opens the shards again, and raises FormatError for a
        shard that was changed or replaced. `close`, or the end of a `with` block, closes the files and threads of the cache and
        all its views. After that, reads raise ValueError, also those by lazy tensors and batches of shards.
        A pickle contains no query, user name or password of a url, unless it is sent to a worker that this process starts.
    """

    @overload
    def __getitem__(self, index: int | str | np.integer[Any]) -> _Sample: ...
    @overload
    def __getitem__(
        self, index: slice | list[int] | list[str] | list[int | str] | list[bool] | Array | torch.Tensor
    ) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        """Return the sample with an index or key. A slice, a mask, or a list or array of indices or keys gives a view.

        Raises:
            IndexError: An index is not in `[-len, len)`.
            TypeError: The index has any other type, or is a mask whose length differs from the length of the cache.
            KeyError: No sample has the key, or samples of several shards have it.
            ValueError: The cache is closed.
            FormatError: The shard is damaged, or does not match its index. Or the sample needs a class that is not in `allow=`.
            RemoteError: A request to the server of the shard failed.
        """
        if type(index) is not int:
            if isinstance(index, slice):
                return self._take(index)
            if isinstance(index, str):
                return self._sample(self._find(index))
            if isinstance(index, list) or getattr(index, "ndim", 0) == 1:
                return self._take(self._numbers(index))
            is_bool = isinstance(index, bool) or getattr(index, "dtype", None) is torch.bool
            if is_bool or not hasattr(index, "__index__"):
                raise TypeError(f"expected the index or the key of a sample, got {index!r:.100}")
            index = operator.index(index)
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"index {index} out of range [0, {count})")
        return self._sample(index)

    def __iter__(self) -> Iterator[_Sample]:
        for number in range(len(self)):
            yield self._sample(number)

    def __getitems__(self, indices: Sequence[int]) -> list[_Sample]:
        """Return the samples at `indices`. torch's DataLoader calls this to fetch a batch."""
        return [self._sample(number) for number in self._numbers(indices).tolist()]

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Return whether there is a sample with this key."""

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the index of the first sample whose key is `value`. See `KeysView.index`."""
        return self.keys().index(value, start, stop)

    def count(self, value: Any) -> int:
        """Return the number of samples whose key is `value`."""
        return self.keys().count(value)

    @abstractmethod
    def keys(self) -> KeysView:
        """Return the keys in sample order, each decoded on access."""

    def original_name(self, key: str) -> str:
        """Return the name from which `tc.safe_key` made a key. The key may contain only its hash.

        Raises:
            InvalidKeyError: `tc.safe_key` did not make the key. Or the key contains a hash, and the index of the shard lacks
                the name, for example because another tool wrote the index.
            KeyError: No sample has the key, or samples of several shards have it.
        """
        stored = self._stored_name(self._find(key))
        return original_name(key) if stored is None else stored

    def _name_at(self, number: int, key: str) -> str | None:
        stored = self._stored_name(number)
        with contextlib.suppress(InvalidKeyError):
            return original_name(key) if stored is None else stored
        return None

    @property
    @abstractmethod
    def schema(self) -> dict[str, TensorSchema]:
        """Dtype, shapes, bytes and number of samples of each tensor, by name.

        A view describes its own samples and selected tensors. A `SharedDataset` knows only samples in shared memory.

        Cost: loads the indexes of the shards that contain these samples. No tensor is read.
        """

    @property
    @abstractmethod
    def fingerprint(self) -> dict[str, object]:
        """Description of how the cache was made. It has the fields that are equal in all shards."""

    @property
    @abstractmethod
    def num_shards(self) -> int:
        """Number of shards of the cache.

        A view counts the shards of the whole cache. A joined cache counts those of all its caches. A `SharedDataset` has one.
        """

    @property
    def members(self) -> dict[str, int]:
        """Number of samples with a member `KEY.suffix` outside all caches, by suffix. For example, `{"jpg": 100}`."""
        return {suffix: int(np.count_nonzero(having)) for suffix, having in self._having().items()}

    def describe(self) -> Description:
        """Return a description of tensors, small values and members. Its repr has a bounded length.

        Tensors and members of all samples are counted in the indexes. Values come from at most 64 samples, spread over the
        cache. A `SharedDataset` loads no sample: it describes at most 1,000 of the samples that are in shared memory.

        Raises:
            FormatError: A shard is damaged, or does not match its index; or a sample needs a class that is not in `allow=`.
            RemoteError: A request for a remote shard failed.
            ValueError: The cache is closed.

        Cost: loads the index of every shard, takes a few numpy operations per shard and tensor, and reads at most 64 skeletons
            of each cache. No tensor is read.
        """
        from wds_tensorcache.reading.description import Contents

        contents = Contents(len(self))
        self._collect(contents)
        return contents.description(len(self), self.num_shards, self.members, self.fingerprint)

    @abstractmethod
    def select(self, patterns: str | Iterable[str]) -> Self:
        """Return a view of the tensors whose names match `patterns`.

        Patterns such as `"cond.*"` have the syntax of `fnmatch`; the name of a container selects all tensors in it. Every batch
        of the view has all selected tensors, even a tensor that all its samples lack. At urls, that holds for the tensors of a
        pattern or container only if the first sample has them. Other tensors are not read. Dicts lose these tensors, and None
        in their places; in lists, tuples and deques, None replaces a tensor. Small values keep their places in samples and
        batches. Tensors in sets, in keys of dicts, and in objects of `allow=` classes also remain.

        Raises:
            KeyError: A pattern matches no tensor's name, although the view has tensors.
            TypeError: A pattern is not a string.
            ValueError: The cache was closed before its indexes were loaded.
            FormatError, RemoteError: The index of a shard is damaged, or a request for it failed.
        """

    def filter(self, predicate: Callable[[Entry], object]) -> Self:
        """Return a view of the samples for which `predicate` returns true.

        No tensor is read. But a `SharedDataset` loads all samples of the view.

        Args:
            predicate: Function of an entry, which has `.key`, `.nbytes` (bytes of the sample's tensors) and `.shapes` (shape
                by tensor name). An entry has all tensors of its sample, even those that `select` left out.

        Raises:
            KeyError: `predicate` looked up the shape of a tensor that a sample lacks; `entry.shapes.get` returns None instead.
            TypeError: `predicate` is not a function.
            ValueError: The cache was closed before its indexes were loaded.
            FormatError, RemoteError: The index of a shard is damaged, or a request for it failed.
        """
        if not callable(predicate):
            raise TypeError(
                f"filter takes a function of an entry, got {predicate!r:.100}; select takes names of tensors"
            )
        kept = (number for number, entry in enumerate(self._entries()) if predicate(entry))
        return self._take(np.fromiter(kept, np.int64))

    def read_batch(
        self,
        indices: Iterable[int | str],
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
        collate: str | Pad | Mapping[str, str | Pad] | Callable[[list[_Sample]], Any] = "stack",
        pad_value: PadValue = 0,
        choose: Choose | None = None,
        choices: Mapping[str, Any] | None = None,
    ) -> Any:
        """Read samples as one batch, without decoding each sample.

        Args:
            indices: Indices or keys of samples, in any order; repetitions and negative indices are allowed. Or a mask, with a
                bool for each sample of the cache.
            device: Device of the tensors; the CPU by default. Tensors reach a GPU in one transfer from pinned memory. Numpy
                arrays stay in host memory.
            pin_memory: Put the tensors into pinned memory.
            collate: `"stack"` returns tensors `[B, …]`. `"list"` returns lists of B tensors, with None for each sample that
                lacks the tensor. `"pad"`, or `tc.pad(to=…, value=…)`, returns tensors `[B, longest, …]`, padded only in their
                first dimension; the row of a sample that lacks the tensor is padding. A dict chooses by tensor name or
                `fnmatch` pattern: `{"text": tc.pad(to=512), "cond.*": "list"}`; tensors that match no pattern are
                stacked. A function receives the list of B samples with tensors loaded on `device`, and returns the batch.
            pad_value: Fill value for `"pad"`, or a dict of fill values by tensor name or pattern. `tc.pad(…)` has its own fill
                value; texts and dates are filled with zero bytes.
            choose: Alternative tensors, by the name of the chosen tensor in the batch:
                `{"latent": ["latent", "latent_flipped"], "text": "captions.*"}`. Samples may have different numbers of
                alternatives. Only the chosen tensor is read, and appears in the batch. A tuple of names is chosen together:
                `{("latent", "mask"): [("latent", "mask"), ("latent_flipped", "mask_flipped")]}`. Alternatives may be values,
                for example a list of captions as strings. They are decoded and chosen on first use. Tensors and values can be
                chosen together: `{("text", "caption"): ("texts.*", "captions.*")}` pairs `texts.a` and `captions.a`, by the
                text that `*` matches. In a joined cache, a name, names chosen with it, and all their alternatives must be
                in one of its caches. A dict gives weights, by which loaders choose:
                `{"text": {"captions.0": 2, "captions.*": 1}}`. The weight of a pattern counts for each name that it matches. A
                name has the sum of the weights of all entries that match it. Entries of a list have the weight 1.
            choices: Index of the chosen alternative among the alternatives of each sample, integers `[B]`, by name in `choose`;
                0 by default.

        Returns:
            The samples' structure, with a batched tensor in place of each tensor, and a numpy array in place of each array.
            Dicts keep their keys. Lists and tuples that contain a tensor, selected or not, are kept. Every other value
            becomes a list-like object of B values, decoded on first use; torch computes with numbers in it. Use values
            before the cache is closed. A sample lacks a tensor, or a container of tensors, if it has None in its place, or
            if a dict has no such key. The batch has every tensor that occurs in one of its samples, that `select` selected,
            that `collate` pads, or that a dict as `collate` lists.

        Raises:
            IndexError: An index or a choice is out of range.
            KeyError: No sample has one of the keys, or samples of several shards have it.
            TypeError: `indices` is neither a sequence of indices and keys, nor a mask of the cache's length. Or a key of a dict
                for `collate` or `pad_value` is not a string.
            ValueError: `indices` is empty, `collate` is unknown, or `choose` and `choices` do not fit each other. An
                alternative is a container of tensors, or in a joined cache, belongs to another cache. Or the cache is closed.
            BatchError: Structures or dtypes differ between samples; the message names two keys. With `"stack"`, shapes differ,
                or samples lack a tensor. With `"pad"`, shapes differ beyond the first dimension, or a tensor is longer than
                `to`, or its dtype cannot represent the fill value. A name in `collate` or `pad_value` matches no tensor. A
                sample has none of the alternatives in `choose`, for example because a name there is misspelled. Samples have
                another value at a name in `choose`. Names that are chosen together cannot be paired. Or the shards have no
                cache, only other members.
            EncodeError: A sample of a `SharedDataset` cannot be encoded.
            FormatError, RemoteError: A shard is damaged, or does not match its index; or a request to its server failed.
            RuntimeError: `device` is not available, or there is no GPU to pin memory for.

        Memory: one block of recycled memory per batch, reused after the batch's last tensor is freed. The cache keeps at most
            `pool_nbytes` of idle blocks (see `tc.open`). One small tensor keeps its whole block alive, so clone a tensor that
            outlives its batch.
        """
        if choose is None and choices is None:
            return self._read_batch(self._request(indices, collate=collate), device, pin_memory, collate, pad_value)
        from wds_tensorcache.reading.choose import Randomness

        numbers, randomness = self._numbers(indices), Randomness.of(choose, choices)
        return self._read_chosen(numbers, randomness, device, pin_memory, collate, pad_value)

    def read_batch_with_info(
        self,
        indices: Iterable[int | str],
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
        collate: str | Pad | Mapping[str, str | Pad] | Callable[[list[_Sample]], Any] = "stack",
        pad_value: PadValue = 0,
        choose: Choose | None = None,
        choices: Mapping[str, Any] | None = None,
    ) -> tuple[Any, BatchInfo]:
        """Read a batch as `read_batch` does, together with its `BatchInfo`."""
        from wds_tensorcache.reading.batch_info import BatchInfo
        from wds_tensorcache.reading.choose import Randomness

        numbers, randomness = self._numbers(indices), Randomness.of(choose, choices)
        batch = self._read_chosen(numbers, randomness, device, pin_memory, collate, pad_value)
        is_padding = torch.zeros(len(numbers), dtype=torch.bool, device="cpu" if device is None else device)
        return batch, BatchInfo(numbers, is_padding, cache=self, collate=collate, randomness=randomness)

    def read_tensors(
        self,
        indices: Iterable[int | str],
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = False,
        collate: str | Pad | Mapping[str, str | Pad] = "stack",
        pad_value: PadValue = 0,
    ) -> dict[str, Any]:
        """Return the tensors of a batch by name, without its other values. Arguments and errors are as for `read_batch`.

        Args:
            collate: As in `read_batch`, but a function raises ValueError. `"auto"` stacks each tensor that all samples of the
                batch have in one shape. Any other tensor becomes a list, as with `"list"`.
        """
        request = self._request(indices, collate=collate)
        tensors: dict[str, Any] = self._read_batch(request, device, pin_memory, collate, pad_value, TENSOR_WAYS)
        return tensors

    def nest(self, indices: Iterable[int | str], tensors: Mapping[str, Any]) -> Any:
        """Nest the given tensors in the batch of these samples.

        The batch has the structure that `read_batch` returns, with tensors from the dict `tensors`, by name. Tensors that are
        not given are left out, as with `select`: in lists, tuples and deques, B times None replaces such a tensor. Other values
        are decoded on first use.

        Raises:
            KeyError: The cache, or this view of it, has no tensor with one of these names.
            IndexError, TypeError, ValueError, BatchError, EncodeError, FormatError, RemoteError: As for `read_batch`.
        """
        from wds_tensorcache.reading.batch.assemble import nest_tensors

        return nest_tensors(self._request(indices), tensors)

    def read_members(self, indices: Iterable[int | str], suffix: str) -> list[bytes]:
        """Return the unchanged bytes of each sample's member `KEY.suffix`.

        A joined cache returns the member from the first of its caches that has it.

        Args:
            indices: As in `read_batch`, but may be empty.
            suffix: Suffix of the member, as in `members`. Upper case and a dot at the beginning make no difference.

        Raises:
            IndexError, KeyError: The cache lacks a sample, or a sample has no member with this suffix.
            ValueError: The cache is closed.
            TypeError, EncodeError, FormatError, RemoteError: As for `read_batch`.
        """
        request = self._request(indices)
        by_row = self._find_members(request, suffix, range(len(request)))
        for i in range(len(request)):
            if i not in by_row:
                count = (members := self.members).get(suffix)
                has = f"there are {list_names(members, suffix)}" if count is None else f"{count:,} samples have one"
                raise KeyError(f"sample {request.key(i)!r} has no member {suffix!r:.100}; {has}")
        return [by_row[i] for i in range(len(request))]

    @abstractmethod
    def close(self) -> None:
        """Close the files and threads of this cache and its views.

        Closing a view also closes the whole cache. Closing a joined cache closes all its caches.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return a summary: counts, bytes, tensors and fingerprint."""
        counts = f"{format_count(len(self), 'sample')} in {format_count(self.num_shards, 'shard')}"
        lines = [f"{type(self).__name__}: {counts}"]
        with contextlib.suppress(OSError, ValueError):
            nbytes = sum(map(self._file_nbytes, islice(self._paths(), _SHOWN)))
            lines[0] += f" of {'at least ' if self.num_shards > _SHOWN else ''}{nbytes:,} bytes"
        try:
            schema = self[:_SHOWN].schema
            lines += [f"  {plain(name)}: {format_tensor(one)}" for name, one in islice(schema.items(), _SHOWN)]
            if len(self) > _SHOWN:
                lines.append(f"  (tensors of the first {_SHOWN:,} samples)")
        except (TensorCacheError, OSError, ValueError) as exc:  # the cache is closed or damaged
            lines.append(f"  tensors unknown: {exc}")
        return "\n".join([*lines, *([f"  fingerprint: {self.fingerprint!r:.1000}"] if self.fingerprint else [])])

    def _file_nbytes(self, path: str) -> int:
        """Return the length of a shard; raise OSError if it is unknown."""
        return os.path.getsize(path)

    def _numbers(self, indices: Any) -> Array:
        return numbers_of(indices, len(self), self._find)

    def _near_keys(self, key: str) -> str:
        """Return original names of samples for a message, similar names first."""
        keys = list(islice(self.keys(), NUM_COMPARED))
        names = dict.fromkeys(self._name_at(index, stored_key) or stored_key for index, stored_key in enumerate(keys))
        hint = "" if list(names) == keys else "; tc.safe_key(name) is the key of such a name"
        if key in names:
            hint = f"; pass tc.safe_key({key!r:.100})"
        return list_names(names, key, len(self)) + hint

    @abstractmethod
    def _sample(self, number: int) -> _Sample: ...

    @abstractmethod
    def _find(self, key: str) -> int: ...

    def _stored_name(self, number: int) -> str | None:
        """Return a sample's original name if the index contains it."""
        return None

    @abstractmethod
    def _take(self, numbers: slice | Array) -> Self: ...

    def _batch_names(self) -> list[str]:
        """Return the names of all tensors that a batch may have. The samples of this view may lack a tensor."""
        return list(self.schema)

    def _stored_names(self) -> list[str]:
        """Return the names of all tensors of the whole cache."""
        return list(self.schema)

    @abstractmethod
    def _request(self, indices: Any, *, collate: Any = None) -> Any:
        """Return a request for samples by index, key or another view's request. `collate` may add tensors to the batch."""

    def _request_chosen(self, numbers: Array, randomness: Randomness, *, collate: Any = None) -> Any:
        """Return a request for samples with the alternatives that `randomness` chooses."""
        request = self._request(numbers, collate=collate)
        if not randomness.alternatives.groups:
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
        request = self._request_chosen(numbers, randomness, collate=collate)
        return self._read_batch(request, device, pin_memory, collate, pad_value)

    def _choose(self, request: Any, alternatives: Alternatives, chooser: Chooser) -> Any:
        from wds_tensorcache.reading.choose import choose_alternatives

        return choose_alternatives(request, alternatives, chooser)

    def _shapes(self, request: Any) -> dict[str, torch.Tensor | None]:
        """Return shapes by tensor name, int64 `[B, ndim]`; None where `ndim` differs. Rows without the tensor are zeros."""
        from wds_tensorcache.reading.batch.columns import with_chosen

        layouts, wanted = request.layouts(), request.structures.wanted
        by_layout: list[dict[str, tuple[int, ...]]] = [
            {name: resolve(layout, text).shape for name, text in layout.named_texts.items()} for layout in layouts.items
        ]
        by_layout = with_chosen(by_layout, layouts)
        chosen = layouts.chosen[0] if layouts.chosen else ()
        result: dict[str, torch.Tensor | None] = {}
        for name in dict.fromkeys(chain.from_iterable(by_layout)):
            if wanted is None or wanted(name) or name in chosen:
                ndims = {len(shapes[name]) for shapes in by_layout if name in shapes}
                result[name] = None
                if len(ndims) == 1:
                    lacking = (0,) * ndims.pop()
                    rows = np.array([shapes.get(name, lacking) for shapes in by_layout], np.int64)
                    result[name] = torch.from_numpy(rows.reshape(len(rows), -1)[layouts.which])
        return result

    @abstractmethod
    def _entries(self) -> Iterator[Entry]:
        """Yield each sample's `Entry`, with the shapes of all its tensors."""

    @abstractmethod
    def _collect(self, contents: Contents, prefix: str = "") -> None:
        """Add tensors and values to `contents`, with `prefix` before their names."""

    @abstractmethod
    def _having(self) -> dict[str, Array]:
        """Return masks of samples with a member `KEY.suffix`, by suffix, bool `[len]`."""

    @abstractmethod
    def _find_members(self, request: Any, suffix: str, wanted: Iterable[int]) -> dict[int, bytes]:
        """Return the members `KEY.suffix` of wanted samples, by position in the batch."""

    def _check_complete(self) -> None:
        """Raise FormatError if readers do not see all shards and members."""

    @abstractmethod
    def _paths(self) -> Iterator[str]: ...

    @abstractmethod
    def _single_threaded(self) -> Self: ...

    def _narrow_to(self, wanted: Wanted | None, optional: Iterable[str] = ()) -> None:
        """Select tensors; see `Structures` for the arguments."""
        self._wanted, self._optional = wanted, tuple(optional)
        self.__dict__.pop("_structures", None)

    # These modules are imported on first use: only batches need them, and they are half of the modules that a cache needs.

    @computed_once
    def _structures(self) -> Structures:
        from wds_tensorcache.reading.batch.request import Structures

        return Structures(self._wanted, self._optional)

    @computed_once
    def _read_batch(self) -> Callable[..., Any]:
        from wds_tensorcache.reading.batch.assemble import read_batch

        return read_batch


class TensorCache(Cache[_Sample]):
    """The samples of one or many shards; opened by `tc.open`.

    Memory: about 22 bytes per sample, plus its key. The first look-up by key adds 8 bytes per sample, and another 8 bytes in a
        view that is not a slice.
    """

    def __init__(
        self,
        store: Store,
        order: Positions | None = None,
        patterns: tuple[str, ...] | None = None,
        names: tuple[str, ...] = (),
        optional: tuple[str, ...] = (),
    ) -> None:
        self._store = store
        self._names = names  # of tensors that have a place in every batch, selected or not
        everything = range(len(store))
        self._order = None if isinstance(order, range) and order == everything else order  # None for all samples
        self._where: Positions = everything if self._order is None else self._order
        # indices of this view by their positions in the store, after a look-up by key
        self._ascending: Array | None = None
        self._patterns = patterns
        self._narrow_to(name_matcher(patterns) if patterns is not None else None, optional)
        # the ways of an argument `collate`, and the result of `_fixed_by`
        self._last_fixed: tuple[Any, tuple[str, ...]] | None = None

    def __reduce__(self) -> Any:
        return TensorCache, (self._store, self._order, *self._selection)

    @property
    def _selection(self) -> tuple[tuple[str, ...] | None, tuple[str, ...], tuple[str, ...]]:
        return self._patterns, self._names, self._optional

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self._find_all(key))

    def keys(self) -> KeysView:
        return KeysView(self)

    @property
    def schema(self) -> dict[str, TensorSchema]:
        schema = schema_of(self._store, self._where)
        return schema if self._wanted is None else {name: schema[name] for name in filter(self._wanted, schema)}

    @property
    def fingerprint(self) -> dict[str, object]:
        return dict(self._store.fingerprint)

    @property
    def num_shards(self) -> int:
        return len(self._store.shards)

    def select(self, patterns: str | Iterable[str]) -> TensorCache[_Sample]:
        patterns = as_patterns(patterns)
        first = self._where[:1] if self._store.has_remote and self._patterns is None and len(self) else self._where
        schema = schema_of(self._store, first)  # at urls, the names in all shards would cost a request for each shard
        if len(first) < len(self) and find_unknown(patterns, schema) is not None:
            first, schema = self._where, schema_of(self._store, self._where)
        names = list(filter(self._wanted, schema))
        if names and (unknown := find_unknown(patterns, names)) is not None:
            if self._store.find_names():
                return self.select(patterns)
            raise KeyError(unknown_name("tensor", unknown, names))
        patterns = with_trees(patterns)
        is_selected = name_matcher(patterns)
        is_first = len(first) < len(self)
        hidden = [n for n in names if not is_selected(n) and (is_first or schema[n].num_samples < len(self))]
        if self._patterns is not None:
            patterns = tuple(map(glob.escape, filter(is_selected, names)))
        return TensorCache(self._store, self._order, patterns, self._names or tuple(names), (*self._optional, *hidden))

    def close(self) -> None:
        self._store.close()

    def _request(self, indices: Any, *, collate: Any = None) -> Request:
        if hasattr(indices, "in_view"):  # a request
            request: Request = indices.in_view(self._store, self._structures, self._names)
            return request
        numbers = numbers_of(indices, len(self._where), self._find)
        positions = numbers if self._order is None else as_array(take(self._where, numbers))
        fixed = self._names if collate is None or collate == "stack" else self._fixed_by(collate)
        return self._structures.request(self._store, positions, fixed)

    def _fixed_by(self, collate: Any) -> tuple[str, ...]:
        """Return the tensors that the view or `collate` puts into every batch."""
        is_named = isinstance(collate, (Collate, Mapping, Pad)) or (isinstance(collate, str) and collate == "pad")
        if not is_named:
            return self._names
        by_name = collate if isinstance(collate, Mapping) else {"*": collate}
        ways = collate if isinstance(collate, Collate) else Collate(by_name)  # checked when the batch is read
        key = (ways.prefix, *ways.ways.items())  # the first pattern that matches counts, so the order matters
        last = self._last_fixed  # read once, because another thread may replace it
        if last is None or last[0] != key:
            padded_or_listed = [name for name in self._batch_names() if ways.way(name) not in ("stack", "auto")]
            fixed = tuple(dict.fromkeys([*self._names, *padded_or_listed]))
            last = self._last_fixed = key, fixed
        return last[1]

    def _batch_names(self) -> list[str]:
        return list(filter(self._wanted, self._stored_names()))

    def _stored_names(self) -> list[str]:
        return list(whole_schema(self._store))

    def _take(self, numbers: slice | Array) -> TensorCache[_Sample]:
        return TensorCache(self._store, take(self._where, numbers), *self._selection)

    def _single_threaded(self) -> TensorCache[_Sample]:
        return TensorCache(self._store.single_threaded(), self._order, *self._selection)

    def _entries(self) -> Iterator[Entry]:
        return entries(self._store, self._where)

    def _collect(self, contents: Contents, prefix: str = "") -> None:
        from wds_tensorcache.reading.description import NUM_EXAMINED

        tensors = stored_shapes(self._store, self._where)
        contents.add_tensors(prefix, (tensor for tensor in tensors if self._wanted is None or self._wanted(tensor[0])))
        contents.add_values(prefix, self._whole_samples(spread(len(self), NUM_EXAMINED)))

    def _having(self) -> dict[str, Array]:
        return members_of(self._store, self._where)

    def _find_members(self, request: Request, suffix: str, wanted: Iterable[int]) -> dict[int, bytes]:
        rows = request.rows
        suffix = suffix.lower().removeprefix(".")  # the index and webdataset have suffixes in lower case
        numbers = np.empty(len(rows), np.int64)
        for number, at, shard_rows in rows.by_shard:
            numbers[at] = self._store.shards[number].find_members(shard_rows, suffix)
        remote, members = dict[int, Any](), dict[int, bytes]()
        for i in wanted:
            if (number := numbers.item(i)) >= 0:
                shard = self._store.shards[rows.number.item(i)]
                if shard.is_remote:
                    remote[i] = shard.file, *shard.member_extent(suffix, number)
                else:
                    members[i] = shard.member(suffix, number)
        if remote:
            from wds_tensorcache.reading.remote_batches import fetch

            members.update(fetch(remote))
        return members

    def _check_complete(self) -> None:
        if self._store.left_out is not None:
            raise FormatError(self._store.left_out, kind="index")
        self._store.load_indexes()
        for shard in self._store.shards:
            if (unseen := shard.find_unseen(shard.index)) is not None:
                raise unseen

    def _paths(self) -> Iterator[str]:
        return (shard.path for shard in self._store.shards)

    def _file_nbytes(self, path: str) -> int:
        if not self._store.has_remote or not is_url(path):
            return super()._file_nbytes(path)
        return self._store.files.get(path).nbytes

    def _at(self, number: int) -> int:
        return self._where[number] if isinstance(self._where, range) else self._where.item(number)

    def _whole_samples(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Yield samples with all their tensors. Samples in remote shards are fetched together."""
        if not self._store.has_remote:
            located = (self._store.locate(self._at(number)) for number in numbers)
            yield from (shard.sample(row) for shard, row in located)
            return
        from wds_tensorcache.reading.batch.rows import locate

        rows = locate(self._store, np.array([self._at(number) for number in numbers], np.int64))
        rows.fetch_skeletons(range(len(rows)))
        yield from map(rows.sample, range(len(rows)))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if not self._store.has_remote:
            return super().__getitems__(indices)
        samples = self._whole_samples(self._numbers(indices).tolist())
        return list(map(self._structures.selected, samples))

    def _sample(self, number: int) -> Any:
        shard, row = self._store.locate(self._at(number))
        sample = shard.sample(row)
        return sample if self._wanted is None else self._structures.selected(sample)

    def _find_all(self, key: str) -> list[int]:
        positions, order = self._store.find(key), self._order
        if order is None or not positions:
            return positions
        if isinstance(order, range):
            return [order.index(position) for position in positions if position in order]
        if self._ascending is None:
            self._ascending = np.argsort(order, kind="stable")
        first, last = (order.searchsorted(positions, side, self._ascending).tolist() for side in ("left", "right"))
        return [number for at, end in zip(first, last, strict=True) for number in self._ascending[at:end].tolist()]

    def _stored_name(self, number: int) -> str | None:
        shard, row = self._store.locate(self._at(number))
        return shard.index.origin(shard.sample_row(row))[1]

    def _find(self, key: str) -> int:
        numbers = self._find_all(key)
        if not numbers:
            raise KeyError(f"no sample {key!r:.100} among the {len(self)} samples; there are {self._near_keys(key)}")
        if len({self._at(number) for number in numbers}) > 1:
            raise KeyError(f"sample {key!r} is in several shards, {self._places(key)}; use the sample's index instead")
        return numbers[0]

    def _places(self, key: str) -> str:
        """Return the paths of the shards that contain a key, as text."""
        numbers = self._find_all(key)
        paths = [self._store.locate(self._at(number))[0].path for number in numbers[:_NUM_PATHS]]
        return ", ".join(paths) + ", …" * (len(numbers) > _NUM_PATHS)
