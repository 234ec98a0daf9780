"""`tc.join`: several caches as one, joined by key. For example, it adds new text states to unchanged latents."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from operator import eq
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from wds_tensorcache.codec.header import keep_bounded
from wds_tensorcache.codec.reference import component
from wds_tensorcache.errors import BatchError, list_names, unknown_name
from wds_tensorcache.reading.cache import Cache, TensorCache, _Sample
from wds_tensorcache.reading.choose import Alternatives, Choices, Chooser, ChosenRequest, Group
from wds_tensorcache.reading.collate import WAYS, Collate, PadValue, as_collate
from wds_tensorcache.reading.description import Contents
from wds_tensorcache.reading.find_shards import CachePaths
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.reading.positions import KeysView
from wds_tensorcache.reading.schema import (
    Entry,
    TensorSchema,
    as_patterns,
    find_unknown,
    make_entry,
    name_matcher,
    with_trees,
)
from wds_tensorcache.shards.fingerprint import common_fields
from wds_tensorcache.storage.threads import computed_once
from wds_tensorcache.storage.urls import shown as shown_url

Array = np.ndarray[Any, Any]
KeyMap: TypeAlias = "Mapping[str, str] | Callable[[str], str | None]"
_NUM_SHOWN = 5  # number of missing keys in a message
_JOIN_A_DICT = "join a dict of caches, as tc.join({'a': …, 'b': …})"


def join(
    caches: Sequence[Cache | CachePaths] | Mapping[str, Cache | CachePaths],
    *,
    how: Literal["exact", "inner"] = "exact",
    keys: Mapping[str, KeyMap] | Mapping[int, KeyMap] | None = None,
) -> JoinedCache:
    """Join caches by key. Each sample combines the samples of all caches that have the same key.

    Args:
        caches: Caches, or sources, which `tc.open` opens with its defaults. With a list, samples must be dicts, and samples
            with the same key are merged into one dict. With a dict, a joined sample maps each cache's name to that cache's
            sample. The first cache determines the keys, indices and order of the joined samples.
        how: `"exact"` requires the same keys in all caches, or with `keys`, a match for each key. `"inner"` keeps the samples
            that all caches have.
        keys: For each cache after the first whose keys differ, a function or mapping, by the cache's name or its position in
            the list. It maps a key of the first cache to a key of that cache, or to None if there is no match. Many samples may
            map to one key, so that a repeated caption is stored once: `keys={"text": caption_of.get}`.

    Raises:
        KeyError: With `"exact"`, keys are missing in one of the caches; the message lists some of these keys. Or a key occurs
            twice in a later cache that has an entry in `keys`, or whose keys or their order differ from the first cache's.
        TypeError: `caches` is neither a list nor a dict, a name is not a string, or `keys` is not a dict of functions or
            mappings.
        ValueError: There are no caches, `how` is unknown, or `keys` names the first cache, or a cache that does not exist.
        BatchError: The first samples of a list of caches are not dicts, or have names in common.
        Errors of `tc.open`: A path among `caches` cannot be opened.

    Memory: at most 8 bytes per sample and cache. During the call, also a copy of all keys, or about 150 bytes per key if
        the keys or their order differ.
    """
    if isinstance(caches, (str, bytes, os.PathLike, Cache)) or not isinstance(caches, (Sequence, Mapping)):
        raise TypeError(f"tc.join needs a list or a dict of caches or paths, got {caches!r:.200}")
    if how not in ("exact", "inner"):
        raise ValueError(f"how={how!r}, expected 'exact' or 'inner'")
    is_named = isinstance(caches, Mapping)
    names: Sequence[Any] = list(caches) if is_named else range(len(caches))
    if not names:
        raise ValueError("nothing to join: expected at least one cache")
    if is_named and not all(isinstance(name, str) for name in names):
        raise TypeError(f"tc.join needs strings as names of caches, got {names!r:.200}")
    if not isinstance(keys, (Mapping, type(None))):
        raise TypeError(
            f"keys={keys!r:.200}, expected a dict of functions or mappings by cache: {{'text': caption_of.get}}"
        )
    maps: Mapping[Any, KeyMap] = keys or {}
    for name in maps:
        if name not in names[1:]:
            shown = list_names(names[1:], name)
            raise ValueError(f"keys has an entry for {name!r:.100}, expected names of caches after the first: {shown}")
    with ExitStack() as opened:  # closes caches that were opened here after an error
        parts: list[Any] = []
        for cache in caches.values() if isinstance(caches, Mapping) else caches:
            parts.append(cache if isinstance(cache, Cache) else opened.enter_context(open(cache)))
        joined: JoinedCache = JoinedCache(_match(parts, names, how, maps), tuple(names) if is_named else None)
        if not is_named and len(parts) > 1 and len(joined):
            joined._sample(0)  # raises BatchError if the caches have names in common
        opened.pop_all()
    return joined


def _match(parts: list[Any], names: Sequence[Any], how: str, maps: Mapping[Any, KeyMap]) -> list[Any]:
    """Return views of the caches in which joined samples share an index."""
    first, rows_of_parts = _with_keys(parts[0]), []
    for name, other in zip(names[1:], parts[1:], strict=True):
        rows, others_keys = _match_keys(first, _with_keys(other), maps.get(name))
        missing = np.flatnonzero(rows < 0) if rows is not None else np.empty(0, np.int64)
        rows_of_parts.append(rows)
        if how == "exact" and (len(missing) or others_keys):
            keys, where, count = sorted(others_keys)[:_NUM_SHOWN], names[0], len(others_keys)
            if len(missing):
                keys, where, count = [first.keys()[at] for at in missing[:_NUM_SHOWN].tolist()], name, len(missing)
            hint = "keys= maps different keys, and how='inner' keeps only the samples that all caches have"
            raise KeyError(
                f"cache {names[0]!r} with {len(first)} samples and cache {name!r} with {len(other)}: {where!r} lacks "
                f"{count} key{'s' * (count > 1)}: {list_names(keys, count=count)}; {hint}"
            )
    lacking = [rows < 0 for rows in rows_of_parts if rows is not None]
    kept: Any = slice(None)
    if lacking and (lacks_any := np.logical_or.reduce(lacking)).any():
        kept = np.flatnonzero(~lacks_any)
    return [
        part._take(kept if rows is None else rows[kept])
        for part, rows in zip(parts, [None, *rows_of_parts], strict=True)
    ]


def _match_keys(first: Any, other: Any, key_map: KeyMap | None) -> tuple[Array | None, list[str]]:
    """Return each sample's index in `other`, or -1, and `other`'s further keys.

    The indices are None if both caches have the same keys in the same order.
    """
    if key_map is None and _are_equal(first, other):
        return None, []
    places = {key: at for at, key in enumerate(other.keys())}
    if len(places) != len(other):
        twice = next(key for at, key in enumerate(other.keys()) if places[key] != at)
        raise KeyError(f"key {twice!r} occurs twice in a joined cache with {len(other)} samples, expected unique keys")
    get = key_map.get if isinstance(key_map, Mapping) else key_map
    # a generator, in which a StopIteration of the function is an error and does not end the keys
    keys = first.keys()
    wanted = keys if get is None else (get(key) for key in keys)
    rows = np.fromiter((places.get(key, -1) for key in wanted), np.int64, len(first))
    is_matched = np.zeros(len(other), np.bool_)
    is_matched[rows[rows >= 0]] = True
    # with a `key_map`, `other` may have keys without a match
    return rows, [] if key_map is not None else [key for key, done in zip(places, is_matched, strict=True) if not done]


def _are_equal(first: Any, other: Any) -> bool:
    if len(first) != len(other):
        return False
    if isinstance(first, TensorCache) and isinstance(other, TensorCache):
        where, other_where = first._where, other._where
        if first._store is other._store and (
            where is other_where or (type(where) is type(other_where) is range and where == other_where)
        ):
            return True  # views of the same samples, whose keys need not be read
        if first._order is None and other._order is None:
            keys, others_keys = first._store.all_keys(), other._store.all_keys()
            if keys is not None and others_keys is not None:
                return all(map(np.array_equal, keys, others_keys))  # 50 times faster than one by one
    return all(map(eq, first.keys(), other.keys()))


def _with_keys(cache: Any) -> Any:
    """Return the cache that determines the keys of `cache`."""
    while isinstance(cache, JoinedCache):
        cache = cache._caches[0]
    return cache


@dataclass(frozen=True, slots=True)
class _JoinedRequest:
    """The samples of a batch, as a request for each cache."""

    parts: Sequence[Any]
    prefixes: Sequence[str]  # of the tensors' names

    def __len__(self) -> int:
        return len(self.parts[0])

    def key(self, i: int) -> str:
        return self.parts[0].key(i)  # type: ignore[no-any-return]

    def named_choices(self) -> Choices:
        choices, chosen = {}, {}
        for prefix, part in zip(self.prefixes, self.parts, strict=True):
            if isinstance(part, (ChosenRequest, _JoinedRequest)):
                own = part.named_choices()
                for name in own:
                    choices[prefix + name] = own[name]
                    chosen[prefix + name] = [alternative and prefix + alternative for alternative in own.chosen(name)]
        return Choices(choices, chosen)


def _chosen_names(request: Any) -> list[str]:
    if isinstance(request, _JoinedRequest):
        parts = zip(request.prefixes, request.parts, strict=True)
        return [prefix + name for prefix, part in parts for name in _chosen_names(part)]
    return request.alternatives.names if isinstance(request, ChosenRequest) else []


class JoinedCache(Cache[_Sample]):
    """Caches joined by key; made by `tc.join`.

    Keys, indices and order come from the first cache. If the caches have names, a tensor's name is `CACHE.TENSOR`. `close`
    closes all caches that are joined, even those that the caller opened.
    """

    def __init__(self, caches: Sequence[Any], names: tuple[str, ...] | None = None) -> None:
        self._caches = list(caches)
        self._names = names
        self._alternatives: dict[Alternatives, dict[int, Alternatives]] = {}  # results of `_owners`
        # for each cache, the prefix of its tensors' names
        self._prefixes = [f"{component(name, 0)}." for name in names] if names is not None else [""] * len(self._caches)

    def __reduce__(self) -> Any:
        return JoinedCache, (self._caches, self._names)

    def __len__(self) -> int:
        return len(self._caches[0])

    def __contains__(self, key: object) -> bool:
        return key in self._caches[0]

    def keys(self) -> KeysView:
        keys: KeysView = self._caches[0].keys()
        return keys

    @property
    def schema(self) -> dict[str, TensorSchema]:
        named = ((prefix + name, tensor) for prefix, cache in self._prefixed() for name, tensor in cache.schema.items())
        return {name: replace(tensor, name=name) for name, tensor in named}

    @property
    def fingerprint(self) -> dict[str, object]:
        """Description of how the caches were made. It has the fields that are equal in all caches."""
        return common_fields(cache.fingerprint for cache in self._caches)

    @property
    def num_shards(self) -> int:
        return sum(cache.num_shards for cache in self._caches)

    def select(self, patterns: str | Iterable[str]) -> JoinedCache[_Sample]:
        patterns = as_patterns(patterns)
        whole = [[prefix + name for name in cache.schema] for prefix, cache in self._prefixed()]
        all_names = list(chain.from_iterable(whole))
        if all_names and (unknown := find_unknown(patterns, all_names)) is not None:
            raise KeyError(unknown_name("tensor", unknown, all_names))
        views, matches = [], name_matcher(with_trees(patterns))
        for (prefix, cache), names in zip(self._prefixed(), whole, strict=True):
            views.append(cache.select([glob.escape(name[len(prefix) :]) for name in filter(matches, names)]))
        return JoinedCache(views, self._names)

    def nest(self, indices: Iterable[int | str], tensors: Mapping[str, Any]) -> Any:
        request = self._request(indices)
        parts, rest = [], dict(tensors)
        for (prefix, cache, part), names in zip(self._parts(request), self._tensor_names, strict=True):
            own = {prefix + name: name for name in [*names, *_chosen_names(part)] if prefix + name in rest}
            parts.append(cache.nest(part, {name: rest.pop(whole) for whole, name in own.items()}))
        if rest:
            raise KeyError(unknown_name("tensor", next(iter(rest)), self._batch_names()))
        return self._merge(parts)

    def close(self) -> None:
        for cache in self._caches:
            cache.close()

    def _read_batch(
        self,
        request: _JoinedRequest,
        device: Any,
        pin: bool,
        collate: Any,
        pad_value: PadValue,
        allowed: tuple[str, ...] = WAYS,
    ) -> Any:
        ways = None if callable(collate) and allowed is WAYS else self._ways(collate, pad_value, allowed, request)
        parts = [
            cache._read_batch(part, device, pin, list if ways is None else ways.with_prefix(prefix), 0, allowed)
            for prefix, cache, part in self._parts(request)
        ]
        if ways is None:
            return collate([self._merge(samples) for samples in zip(*parts, strict=True)])
        if allowed is WAYS:
            return self._merge(parts)
        named = zip(self._prefixes, parts, strict=True)
        return {prefix + name: tensor for prefix, tensors in named for name, tensor in tensors.items()}

    def _ways(self, collate: Any, pad_value: PadValue, allowed: tuple[str, ...], request: _JoinedRequest) -> Any:
        ways = as_collate(collate, pad_value, allowed)
        if ways is not collate and (isinstance(collate, Mapping) or isinstance(pad_value, Mapping)):
            ways.check_names([*self._batch_names(), *_chosen_names(request)])
        return ways

    @computed_once
    def _tensor_names(self) -> list[list[str]]:
        return [cache._batch_names() for cache in self._caches]

    def _prefixed(self) -> Iterator[tuple[str, Any]]:
        return zip(self._prefixes, self._caches, strict=True)

    def _parts(self, request: _JoinedRequest) -> Iterator[tuple[str, Any, Any]]:
        return zip(self._prefixes, self._caches, request.parts, strict=True)

    def _batch_names(self) -> list[str]:
        named = zip(self._prefixes, self._tensor_names, strict=True)
        return list(dict.fromkeys(prefix + name for prefix, names in named for name in names))

    def _stored_names(self) -> list[str]:
        return [prefix + name for prefix, cache in self._prefixed() for name in cache._stored_names()]

    def _request(self, indices: Any, *, collate: Any = None) -> _JoinedRequest:
        if isinstance(indices, _JoinedRequest):
            parts = [cache._request(part) for cache, part in zip(self._caches, indices.parts, strict=True)]
        else:
            numbers = self._numbers(indices)
            if isinstance(collate, Mapping):
                collate = Collate(collate)
            ways = [
                collate.with_prefix(prefix) if isinstance(collate, Collate) else collate for prefix in self._prefixes
            ]
            parts = [cache._request(numbers, collate=way) for cache, way in zip(self._caches, ways, strict=True)]
        return _JoinedRequest(parts, self._prefixes)

    def _choose(self, request: _JoinedRequest, alternatives: Alternatives, chooser: Chooser) -> _JoinedRequest:
        owners = self._alternatives.get(alternatives)
        if owners is None:
            owners = self._owners(alternatives)
            keep_bounded(self._alternatives, alternatives, owners)
        parts = list(request.parts)
        for number, own in owners.items():
            parts[number] = self._caches[number]._choose(parts[number], own, chooser)
        return _JoinedRequest(parts, self._prefixes)

    def _owners(self, alternatives: Alternatives) -> dict[int, Alternatives]:
        """Return the alternatives by the position of the cache that has them."""
        groups_of_caches: dict[int, list[Group]] = {}
        for group in alternatives.groups:
            parts = [(number, group.without(prefix)) for number, prefix in enumerate(self._prefixes)]
            owners = [(number, part) for number, part in parts if part is not None]
            if len(owners) > 1:  # caches without names
                owners = [(n, part) for n, part in owners if part.is_in(self._caches[n])] or owners[:1]
            if len(owners) != 1:
                expected = "names and alternatives of one of the joined caches"
                if self._names is not None:
                    expected += f", which begin with {list_names(self._prefixes)}"
                raise ValueError(f"choose={{{group.names[0]!r:.100}: …}}: expected {expected}")
            for number, part in owners:
                groups_of_caches.setdefault(number, []).append(part)
        return {number: Alternatives(tuple(groups)) for number, groups in groups_of_caches.items()}

    def _shapes(self, request: _JoinedRequest) -> dict[str, torch.Tensor | None]:
        parts = self._parts(request)
        return {prefix + name: shapes for prefix, cache, part in parts for name, shapes in cache._shapes(part).items()}

    def _collect(self, contents: Contents, prefix: str = "") -> None:
        for own, cache in self._prefixed():
            cache._collect(contents, prefix + own)

    def _having(self) -> dict[str, Array]:
        result: dict[str, Array] = {}
        for cache in self._caches:
            for suffix, having in cache._having().items():
                result[suffix] = result[suffix] | having if suffix in result else having
        return result

    def _find_members(self, request: _JoinedRequest, suffix: str, wanted: Iterable[int]) -> dict[int, bytes]:
        """Return each wanted sample's member, from the first cache that has it."""
        members: dict[int, bytes] = {}
        for cache, part in zip(self._caches, request.parts, strict=True):
            members |= cache._find_members(part, suffix, [i for i in wanted if i not in members])
        return members

    def _merge(self, parts: Sequence[Any]) -> Any:
        if self._names is not None:
            return dict(zip(self._names, parts, strict=True))
        merged: dict[Any, Any] = {}
        for number, part in enumerate(parts):
            if type(part) is not dict:
                shown = self._show(number)
                raise BatchError(f"{shown} has a {type(part).__name__}, not a dict; {_JOIN_A_DICT}")
            twice = merged.keys() & part.keys()
            if twice:
                earlier = next(i for i, other in enumerate(parts) if not twice.isdisjoint(other))
                raise BatchError(
                    f"{self._show(earlier)} and {self._show(number)} both have {list_names(sorted(twice, key=str))} at the "
                    f"top level; {_JOIN_A_DICT}, or, if they are tensors, leave them out of one cache by cache.select([…])"
                )
            merged.update(part)
        return merged

    def _show(self, number: int) -> str:
        path = next(self._caches[number]._paths(), None)
        return f"cache {number}" if path is None else f"cache {number} ({shown_url(path)})"

    def _sample(self, number: int) -> Any:
        return self._merge([cache._sample(number) for cache in self._caches])

    def _find(self, key: str) -> int:
        return self._caches[0]._find(key)  # type: ignore[no-any-return]

    def _stored_name(self, number: int) -> str | None:
        key, names = self.keys()[number], ((cache, cache._stored_name(number)) for cache in self._caches)
        # with `keys=`, other caches have other keys
        return next((name for cache, name in names if name is not None and cache.keys()[number] == key), None)

    def _entries(self) -> Iterator[Entry]:
        for parts in zip(*(cache._entries() for cache in self._caches), strict=True):
            named = zip(self._prefixes, parts, strict=True)
            shapes = {prefix + name: shape for prefix, part in named for name, shape in part.shapes.items()}
            yield make_entry(parts[0].key, sum(part.nbytes for part in parts), shapes)

    def _check_complete(self) -> None:
        for cache in self._caches:
            cache._check_complete()

    def _paths(self) -> Iterator[str]:
        return chain.from_iterable(cache._paths() for cache in self._caches)

    def _take(self, numbers: slice | Array) -> JoinedCache[_Sample]:
        return JoinedCache([cache._take(numbers) for cache in self._caches], self._names)

    def _single_threaded(self) -> JoinedCache[_Sample]:
        return JoinedCache([cache._single_threaded() for cache in self._caches], self._names)
