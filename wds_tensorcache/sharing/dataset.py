"""`SharedDataset`: the samples of any dataset, held once per machine."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from wds_tensorcache.arguments import as_int
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.skeleton.types import allow_table
from wds_tensorcache.codec.tree import flatten, project, realize
from wds_tensorcache.errors import TensorCacheError, unknown_name
from wds_tensorcache.reading.batch.request import Request
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.reading.description import NUM_EXAMINED, Contents
from wds_tensorcache.reading.positions import KeysView, spread
from wds_tensorcache.reading.schema import (
    Entry,
    Tensor,
    TensorSchema,
    as_patterns,
    find_unknown,
    format_tensor,
    make_entry,
    merge_shapes,
    name_matcher,
    with_trees,
)
from wds_tensorcache.reading.store import Store
from wds_tensorcache.sharing.batch import rows_of
from wds_tensorcache.sharing.folder import base_folder, fingerprint_of, open_folder
from wds_tensorcache.sharing.samples import Samples, SharedStats
from wds_tensorcache.storage.files import Files
from wds_tensorcache.storage.memory_pool import Pool
from wds_tensorcache.storage.system import num_cores
from wds_tensorcache.storage.threads import computed_once

if TYPE_CHECKING:
    from typing_extensions import Self

Array = np.ndarray[Any, Any]
Selections = tuple[tuple[str, ...], ...]  # the patterns of each `select`
_NUM_COUNTED = 1000  # samples that `describe` looks at
_SHOWN = 100  # samples that `repr` looks at, and tensors that it shows


class SharedDataset(Cache[Any]):
    """A map-style dataset whose samples all processes of this machine share.

    The first access to a sample, by any process, loads it from `dataset` and encodes it into shared memory. Every later access
    returns the sample from there, with lazy tensors and without a lock. Unless `persistent`, the memory is freed when the last
    process that holds it is gone, even if that process was killed. A SharedDataset is a `Cache`, with batches and views, and
    `tc.Loader` takes it. The key of a sample is its index in `dataset` as a string.

    A sample that the format cannot represent is loaded at each access, and returned as `dataset` made it. The first one in a
    process causes a UserWarning. Such a sample cannot be part of a batch.

    Args:
        dataset: A map-style dataset: it has `len()`, and `dataset[i]` returns a sample for each `i` in `range(len(dataset))`.
        name: Name of the shared memory, 1 to 128 bytes. Processes that pass the same name share it.
        max_nbytes: Maximum bytes of all samples in shared memory; None sets no limit. Samples beyond it are loaded at each
            access.
        directory: Existing folder for the files; by default shared memory, `/dev/shm`. Use a folder on a local file system.
        persistent: Keep the files after the last process is gone, for a later run. If one process passes it, the files stay
            until `tc.shared_clear`, whatever other processes pass.
        verify: Compare the digests of a sample with its bytes at every access.
        fingerprint: A string that describes the dataset, for example its version and transforms. All processes that share the
            memory must pass the same string. The types and lengths of their datasets, and of the datasets inside, must be
            equal. The indices of a `Subset`, the fingerprint and keys of a cache, and the fingerprints of Hugging Face's
            `datasets` must also be equal. Code and samples are not compared.
        allow: Classes that samples may contain beyond the classes of the format.
        lazy: True returns samples with lazy tensors. False loads the tensors for code that expects them, such as transforms of
            torchvision; each access copies all tensors of the sample. Batches and views work the same.

    Raises:
        InvalidKeyError: `name` is empty or too long, has other characters than letters, digits and `" .=+@_-"`, begins with one
            of `" .=+@"`, or contains `".."`.
        StaleCacheError: The name is in use for a dataset with another fingerprint; the message contains both.
        PermissionError: The files in `directory` belong to another user, or other users can access them.
        FormatError: The files are damaged. Access to a damaged sample raises it, too.
        OSError: `directory` does not exist, the file system is full, or another process holds its lock for a minute. Access to
            a sample that does not fit raises it, too.
        NotImplementedError: The system is not Linux.
        EncodeError: On reading a batch with a sample that the format cannot represent.
        TypeError, ValueError: The dataset is not map-style, or an option has a wrong type or value.
        RecursionError: On access, if the dataset reads the same sample from this SharedDataset to load it.

    Threads/fork/pickle: safe everywhere; a copy in another process shares the same memory.

    Memory: samples are in files in `directory`, mapped copy-on-write. `.load()` returns a private copy. `.load(copy=False)`
        returns a view: writing into it changes no other process, but later reads of this process, and of children forked
        later, see it. If the tensors of a sample have less than 64 KiB, each access copies them.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        *,
        max_nbytes: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        persistent: bool = False,
        verify: bool = False,
        fingerprint: str = "",
        allow: Iterable[type] = (),
        lazy: bool = True,
    ) -> None:
        if not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint={fingerprint!r:.100}, expected a string")
        max_nbytes = None if max_nbytes is None else as_int("max_nbytes", max_nbytes)
        if max_nbytes is not None and max_nbytes < 1:
            raise ValueError(f"max_nbytes={max_nbytes}, expected at least 1")
        if isinstance(dataset, str) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(f"expected a map-style dataset with len() and dataset[i], got {type(dataset).__name__}")
        self._options: dict[str, Any] = {
            "max_nbytes": max_nbytes,
            "directory": None if directory is None else os.path.abspath(directory),
            "persistent": persistent,
            "verify": verify,
            "fingerprint": fingerprint,
            "allow": tuple(allow),
            "lazy": lazy,
        }
        self._open(dataset, name, fingerprint_of(dataset, fingerprint))

    def _open(self, dataset: Any, name: str, fingerprint: dict[str, object]) -> None:
        """Open or create the shared memory with the options in `_options`."""
        self.name, self._fingerprint = name, fingerprint
        options, count = self._options, len(dataset)
        folder = open_folder(base_folder(options["directory"]), name, fingerprint, options["persistent"])
        pool = Pool()
        try:
            allow = allow_table(options["allow"])
            self._samples = Samples(dataset, folder, options["max_nbytes"], pool, options["verify"], allow)
        except BaseException:
            folder.leave()
            raise
        weakref.finalize(self._samples, folder.leave)
        self._store = Store((), Files(), pool, min(4, num_cores()), {})
        self._narrow(np.arange(count), ())

    def _narrow(self, indices: Array, selections: Selections) -> None:
        """Narrow this object to `indices`, int64 `[n]`, and to selected tensors."""
        self._indices, self._selections = indices, selections
        self.__dict__.pop("_first_positions", None)
        matchers = list(map(name_matcher, selections))
        self._narrow_to((lambda name: all(matches(name) for matches in matchers)) if matchers else None)

    def _view(self, indices: Array, selections: Selections, store: Store) -> Self:
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._store = store
        view._narrow(indices, selections)
        return view

    def __getstate__(self) -> dict[str, Any]:
        # The fingerprint stays the same, although the dataset may have changed since, for example by opening a file.
        return {name: value for name, value in vars(self).items() if name not in _OPENED} | {"_dataset": self.dataset}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dataset = state.pop("_dataset")
        self.__dict__.update(state)
        self._open(dataset, self.name, self._fingerprint)
        self._narrow(self._indices, self._selections)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at `indices` as a list. This waits last for samples that another thread or process is loading."""
        return list(map(self._finish, self._samples.get_many(self._indices[self._numbers(indices)].tolist())))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._position(key) is not None

    def keys(self) -> KeysView:
        return _Indices(self)

    @property
    def schema(self) -> dict[str, TensorSchema]:
        """Properties of each tensor by name, in samples in shared memory.

        Only samples and selected tensors of this view count.

        Cost: parses each of these samples. If none is in shared memory, this loads and describes the view's first sample.
        """
        present = self._find_present()
        return self._schema_of(present if len(present) else self._indices[:1])

    def _find_present(self) -> Array:
        """Return this view's sample indices in shared memory, int64, ascending."""
        is_selected = np.zeros_like(present := self._samples.find_present())
        is_selected[self._indices] = True
        return np.flatnonzero(is_selected & present)

    def _schema_of(self, indices: Array) -> dict[str, TensorSchema]:
        return merge_shapes(chain.from_iterable(map(_shapes_in, map(self._tensors_of, indices.tolist()))))

    def _tensors_of(self, number: int) -> dict[str, Any]:
        """Return a sample's selected tensors; `{}` if it cannot be encoded."""
        sample = self._samples.peek(number)
        tensors = flatten(self._samples.get(number) if sample is None else sample)
        wanted = self._wanted
        return {
            name: lazy for name, lazy in tensors.items() if isinstance(lazy, Lazy) and (wanted is None or wanted(name))
        }

    @property
    def fingerprint(self) -> dict[str, object]:
        """Description of the dataset, equal for all datasets of this name. See the argument `fingerprint`."""
        return dict(self._fingerprint)

    @property
    def num_shards(self) -> int:
        return 1

    @property
    def dataset(self) -> Any:
        """The dataset whose samples are shared."""
        return self._samples.dataset

    def __repr__(self) -> str:
        """Return a summary: number of samples, tensors, and the fingerprint. No sample is loaded."""
        name = f"{type(self).__name__} {self.name!r}: {len(self):,} samples"
        try:
            present = self._find_present()
            lines = [f"{name}, {len(present):,} of them in shared memory"]
            schema = self._schema_of(present[:_SHOWN])
            lines += [f"  {name}: {format_tensor(tensor)}" for name, tensor in islice(schema.items(), _SHOWN)]
        except (TensorCacheError, OSError, ValueError) as exc:  # closed or damaged
            lines = [name, f"  tensors unknown: {exc}"]
        return "\n".join([*lines, f"  fingerprint: {self.fingerprint!r:.1000}"])

    def stats(self) -> SharedStats:
        """Return this process's counts, and the shared memory's size and holders.

        Raises:
            ValueError: This SharedDataset is closed.
        """
        return self._samples.stats()

    def select(self, patterns: str | Iterable[str]) -> Self:
        """Return a view of the tensors whose names match `patterns`, like `Cache.select`.

        Names are known only for loaded samples. So a pattern that matches no known name raises KeyError only if all samples
        of this view are in shared memory. No sample is loaded. A batch has a selected tensor only if one of its samples has
        the tensor, or None in its place.

        Cost: if all samples are in shared memory, parses samples until each pattern has matched.
        """
        patterns = as_patterns(patterns)
        if len(self) and self._samples.find_present()[self._indices].all():
            numbers, names = iter(self._indices.tolist()), dict[str, None]()
            while (unknown := find_unknown(patterns, names)) is not None:
                if (number := next(numbers, None)) is None:
                    raise KeyError(unknown_name("tensor", unknown, list(names)))
                names |= dict.fromkeys(self._tensors_of(number))
        return self._view(self._indices, (*self._selections, with_trees(patterns)), self._store)

    def close(self) -> None:
        """Stop holding the shared memory. Unless persistent, it is freed when no process holds it and no tensor aliases it.

        Closing a view also closes the dataset and all its other views. Lazy tensors of samples can still be loaded.

        Raises:
            IsADirectoryError: Another program has made a folder in the folder of the shared memory, which then remains.
        """
        self._store.close()
        self._samples.close()

    def _request(self, indices: Any, *, collate: Any = None) -> Request:
        if isinstance(indices, Request):
            return indices.in_view(self._store, self._structures)
        numbers = self._indices[self._numbers(indices)].tolist()
        return Request(self._store, rows_of(self._samples, numbers), self._structures, ())

    def _sample(self, number: int) -> Any:
        return self._finish(self._samples.get(self._indices.item(number)))

    def _finish(self, sample: Any) -> Any:
        """Return a sample with the selected tensors, loaded unless samples are lazy."""
        selected = sample if self._wanted is None else project(sample, self._wanted)
        return selected if self._options["lazy"] else realize(selected)

    def _position(self, key: str) -> int | None:
        if not key.isascii() or not key.isdecimal() or len(key) > 18 or str(int(key)) != key:
            return None
        index = int(key)
        indices, positions = self._first_positions
        at = np.searchsorted(indices, index)
        return positions.item(at) if at < len(indices) and indices.item(at) == index else None

    @computed_once
    def _first_positions(self) -> tuple[Array, Array]:
        """This view's distinct indices, ascending, and their first positions."""
        return np.unique(self._indices, return_index=True)

    def _find(self, key: str) -> int:
        position = self._position(key)
        if position is None:
            keys = "the keys are indices of the dataset as strings"
            raise KeyError(f"no sample {key!r:.100}; {keys}: {self._near_keys(key)}")
        return position

    def _take(self, numbers: slice | Array) -> Self:
        return self._view(self._indices[numbers], self._selections, self._store)

    def _single_threaded(self) -> Self:
        return self._view(self._indices, self._selections, self._store.single_threaded())

    def _entries(self) -> Iterator[Entry]:
        for number in self._indices.tolist():
            tensors = flatten(self._samples.get(number))
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            yield make_entry(str(number), sum(tensor.nbytes for tensor in tensors.values()), shapes)

    def _collect(self, contents: Contents, prefix: str = "") -> None:
        present = self._find_present()
        numbers = [present.item(at) for at in spread(len(present), _NUM_COUNTED)]
        samples = list(map(self._samples.peek, numbers))
        contents.num_counted = min(contents.num_counted, len(samples))
        wanted = self._wanted or (lambda name: True)
        for sample in samples:
            contents.add_tensors(prefix, (tensor for tensor in _shapes_in(flatten(sample)) if wanted(tensor[0])))
        contents.add_values(prefix, (samples[at] for at in spread(len(samples), NUM_EXAMINED)))

    def _having(self) -> dict[str, Array]:
        return {}

    def _find_members(self, request: Any, suffix: str, wanted: Iterable[int]) -> dict[int, bytes]:
        return {}

    def _paths(self) -> Iterator[str]:
        return iter(())


class _Indices(KeysView):
    """The keys of a SharedDataset: the indices of the dataset as strings."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Indices(self._cache[index])
        return str(self._cache._indices[range(len(self))[index]])

    def __iter__(self) -> Iterator[str]:
        return map(str, self._cache._indices.tolist())


def _shapes_in(tensors: Mapping[str, Any]) -> Iterator[Tensor]:
    for name, lazy in tensors.items():
        yield name, lazy._reference, np.array([lazy.shape], np.int64).reshape(1, -1), np.ones(1, np.int64)


# the attributes that `_open` and `_narrow` make in each process
_OPENED = frozenset({"_samples", "_store", "_wanted", "_optional", "_structures", "_read_batch", "_first_positions"})
