"""Stages for webdataset's own writers and pipelines."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from webdataset.autodecode import imagehandler
from webdataset.handlers import reraise_exception
from webdataset.writer import make_encoder

from wds_tensorcache.codec.header import is_bound
from wds_tensorcache.codec.sample import decode_members, decode_plain_pickle, encode_sample
from wds_tensorcache.codec.skeleton.builders import allow_table
from wds_tensorcache.errors import FormatError, KeyRuleError, TensorCacheError
from wds_tensorcache.integrations.pth import decode_pth
from wds_tensorcache.integrations.webdataset_decoders import MAX_EXPANDED_NBYTES, MemberDecoder
from wds_tensorcache.shards.names import (
    APART,
    FIELD,
    SKELETON,
    TENSORS,
    cache_name,
    check_key,
    check_suffixes,
    is_cache_name,
)

__all__ = ["FIELD", "Decode", "decode", "encoder"]

Handler = Callable[[Exception], bool]


def encoder(base: Any = True, *, allow: Iterable[type] = ()) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return an encoder for `wds.TarWriter` and `wds.ShardWriter`.

    The field `"tensorcache"`, or `"NAME.tensorcache"` for several caches in one sample, becomes the two members
    `[NAME.]skel.pyd` and `[NAME.]safetensors`; every other field goes to `base`. Pass `mtime=0` to the writer, and the
    same samples give the same shard, byte for byte.

    Args:
        base: What the writer's own `encoder` argument would be: True for webdataset's encoding by extension.
        allow: Classes to write besides the listed types of FORMAT.md.

    Raises (when writing):
        EncodeError: A value cannot be represented.
        KeyRuleError: A key, cache name or member name that some reader gets wrong. Keys that occur twice in a shard
            are not seen here: an encoder is not told where shards begin.
    """
    return _Encode(make_encoder(base), tuple(allow))


class _Encode:
    def __init__(self, base: Callable[[dict[str, Any]], dict[str, Any]], allow: tuple[type, ...]) -> None:
        self._base = base
        self._allow = allow

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        key = sample.get("__key__")
        check_key(key)
        ours: dict[str, bytes] = {}
        rest = {}
        for field, value in sample.items():
            if field != FIELD and not field.endswith("." + FIELD):
                rest[field] = value
                continue
            prefix = "" if field == FIELD else cache_name(field[: -len(FIELD) - 1]) + "."
            try:
                ours[prefix + SKELETON], ours[prefix + TENSORS] = encode_sample(value, allow=self._allow)
            except TensorCacheError as exc:
                raise exc.at(f"sample {key!r}, field {field!r}") from exc
        check_suffixes(str(key), [field for field in rest if not field.startswith("_")])
        clash = [field for field in rest if field.lower().endswith((SKELETON, FIELD)) or field.lower() in ours]
        if clash:
            raise KeyRuleError(f"sample {key!r} has members {clash}, whose names only caches have; call them otherwise")
        check_suffixes(str(key), ours)
        return {**self._base(rest), **ours}


def decode(
    *handlers: Any,
    lazy: bool = True,
    verify: bool = False,
    allow: Iterable[type] = (),
    handler: Handler = reraise_exception,
    max_expanded_nbytes: int = MAX_EXPANDED_NBYTES,
    **decoder: Any,
) -> Decode:
    """Return a stage that decodes samples, for `wds.DataPipeline`, `.compose` and `.map`.

    The two members of a cache become the field `"tensorcache"` (or `"NAME.tensorcache"`): what `tc.encoder` was given.
    All other members are decoded as `wds.decode` does, but for pickles (`pyd`, `pickle`, `pkl`, `pth`), which are held
    to a safe subset: a `pth` has dense tensors, parameters, plain values and the listed types of FORMAT.md, all in host memory.
    `cbor`, EPS and compressed FITS pictures are refused, because their decoders have no bounds. A handler of yours that takes
    any of these comes first. `.safetensors` members that are not of a cache pass through as bytes.

    Args:
        handlers: As for `wds.decode`: `"pil"`, `"torchrgb"`, …, or functions of (extension, bytes).
        lazy: True leaves tensors unread until they are used.
        verify: Recompute both digests of every sample.
        allow: Classes that skeletons and other pickles may build; only for shards that you trust.
        handler: Called with the exception of a sample that cannot be decoded; re-raises by default.
        max_expanded_nbytes: What a compressed member (`gz`, `npz`), or the tensors of a `pth` that share their elements, may
            become; 64 times its own length, if that is more. Pictures have Pillow's own limit, `PIL.Image.MAX_IMAGE_PIXELS`.
        decoder: `pre`, `post`, `only` and `partial` of `webdataset.autodecode.Decoder`.

    Raises (when iterating):
        FormatError: A half is missing, damaged, or of another sample; or webdataset's own decoders cannot read a member, or it
            would become too large. The message names shard, key and member; `__cause__` is what the decoder raised. What
            functions of yours raise is not changed.
        UnsafeSkeletonError: A member asks for anything outside the format; nothing was executed.
    """
    return Decode(handlers, lazy, verify, tuple(allow), handler, max_expanded_nbytes, decoder)


class Decode:
    """The stage that `decode` returns; a call takes an iterable of samples, or one sample.

    Threads/fork/pickle: stateless; pickles if its handlers and classes do.
    """

    def __init__(
        self,
        handlers: tuple[Any, ...],
        lazy: bool,
        verify: bool,
        allow: tuple[type, ...],
        handler: Handler,
        max_expanded_nbytes: int,
        decoder: dict[str, Any],
    ) -> None:
        if operator.index(max_expanded_nbytes) < 0:
            raise ValueError(f"max_expanded_nbytes={max_expanded_nbytes}, expected 0 or more")
        self._lazy = lazy
        self._verify = verify
        self._allow = allow_table(allow)
        self._handler = handler
        steps = [imagehandler(step) if isinstance(step, str) else step for step in handlers]
        self._decoder = MemberDecoder(steps, self._pickle_decoder, max_expanded_nbytes, **decoder)

    def __call__(self, samples: Any) -> Any:
        return self._decode(samples) if isinstance(samples, dict) else self._iterate(samples)

    def _iterate(self, samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for sample in samples:
            try:
                decoded = self._decode(sample)
            except Exception as exc:  # the handler decides, as in every stage of webdataset
                if self._handler(exc):
                    continue
                break
            del sample
            yield decoded
            del decoded  # else one sample more would be in memory while the next is read, and its cache lines cold

    def _decode(self, sample: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for field, value in sample.items():
            if field[:2] == "__":
                result[field] = value
                continue
            if field == TENSORS and SKELETON in sample:
                continue
            prefix = "" if field == SKELETON else _prefix(field, SKELETON)
            if prefix is not None:
                result[prefix + FIELD] = self._decode_cache(sample, prefix)
                continue
            if field == FIELD or field.endswith("." + FIELD):
                raise FormatError(
                    f"{_where(sample)}: a member is called {field!r}, which is what caches are decoded to"
                )
            prefix = _prefix(field, TENSORS)
            if prefix is None or prefix + SKELETON not in sample:
                if field.endswith(TENSORS) and is_bound(value):
                    missing = "a valid cache name" if prefix is None else f"member {prefix + SKELETON!r}"
                    raise FormatError(f"{missing} is missing beside {field!r}{APART}", kind="missing").at(
                        _where(sample)
                    )
                others[field] = value
        if others:
            result.update(self._decode_others(sample, others))
        return result

    def _decode_cache(self, sample: dict[str, Any], prefix: str) -> Any:
        skeleton, tensors = sample[prefix + SKELETON], sample.get(prefix + TENSORS)
        if tensors is None:
            what = f"member {prefix + TENSORS!r} is missing beside {prefix + SKELETON!r}{APART}"
            raise FormatError(what, kind="missing").at(_where(sample))
        if not (isinstance(skeleton, (bytes, memoryview)) and isinstance(tensors, (bytes, memoryview))):
            raise FormatError(
                f"{_where(sample)}: the members are decoded already; use tc.decode() instead of wds.decode()"
            )
        try:
            return decode_members(skeleton, tensors, self._lazy, self._verify, self._allow)
        except TensorCacheError as exc:
            raise exc.at(f"{_where(sample)}, members {prefix + SKELETON!r} and {prefix + TENSORS!r}") from exc

    def _decode_others(self, sample: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._decoder(others)
        except Exception as exc:  # newer webdataset releases wrap what a handler raises
            cause = exc if isinstance(exc, TensorCacheError) else exc.__cause__
            if isinstance(cause, TensorCacheError):
                raise cause.at(_where(sample)) from cause.__cause__ or cause
            raise

    def _pickle_decoder(self, extension: str) -> Callable[[bytes, int], Any] | None:
        """Take the extensions that webdataset would hand to an unpickler which runs anything."""
        kind = extension.rpartition(".")[2]
        if kind == "pth":
            return lambda raw, limit: decode_pth(raw, limit, self._allow)
        if kind in ("pyd", "pickle", "pkl"):
            return lambda raw, limit: decode_plain_pickle(raw, self._allow)
        return None


def _prefix(field: str, suffix: str) -> str | None:
    """Return what stands before `suffix` in the field of a cache: "" or "NAME."; None if it is not of a cache."""
    if field == suffix:
        return ""
    if not field.endswith(suffix):
        return None
    prefix = field[: -len(suffix)]
    return prefix if prefix[-1] == "." and is_cache_name(prefix[:-1]) else None


def _where(sample: dict[str, Any]) -> str:
    return f"{sample.get('__url__', 'a shard')}: sample {sample.get('__key__')!r}"
