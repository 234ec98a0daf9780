"""An encoder for webdataset's writers, and a decoding stage for its pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from webdataset.autodecode import imagehandler
from webdataset.handlers import reraise_exception
from webdataset.writer import make_encoder

from wds_tensorcache.codec.header import is_bound
from wds_tensorcache.codec.sample import decode_members, encode_sample
from wds_tensorcache.codec.skeleton.types import allow_table
from wds_tensorcache.errors import FormatError, InvalidKeyError, TensorCacheError
from wds_tensorcache.integrations.safe_members import MemberDecoder
from wds_tensorcache.shards.expansion import MAX_EXPANDED_NBYTES, check_option
from wds_tensorcache.shards.names import (
    FIELD,
    SKELETON,
    TENSORS,
    cache_name,
    cache_of_field,
    check_key,
    check_suffixes,
    find_half,
    half_of,
    is_reserved,
    member_suffix,
)

Handler = Callable[[Exception], bool]
Encoder = Callable[[dict[str, Any]], dict[str, Any]]


def encoder(base: Any = True, *, allow: Iterable[type] = ()) -> Encoder:
    """Return an encoder for `wds.TarWriter` and `wds.ShardWriter`.

    The field `"tensorcache"`, or `"NAME.tensorcache"` for several caches in one sample, becomes the two members
    `[NAME.]skel.pyd` and `[NAME.]safetensors`. `base` encodes all other fields. With `mtime=0` in the writer, equal samples
    become equal shards, byte for byte.

    Args:
        base: As for the writer's own `encoder` argument: True for webdataset's encoding by extension, which is the default.
            False leaves all other fields as they are; they must be bytes then.
        allow: Classes to write besides the types that FORMAT.md lists.

    Raises:
        TypeError: `base` is a sample.
        ValueError: `base` is no encoder.

    Raises (when writing):
        TypeError: `allow` contains anything but classes.
        And the errors of `base`, such as ValueError for an unknown extension.
        EncodeError: A value cannot be represented.
        InvalidKeyError: Some reader of shards would misread a key, cache name or member name. A key that occurs twice is not
            detected, because an encoder does not know where shards begin.
    """
    if isinstance(base, dict) and "__key__" in base:
        raise TypeError("tc.encoder got a sample; pass it to the writer as encoder=tc.encoder()")
    return partial(_encode, make_encoder(base), tuple(allow))


def _encode(base: Encoder, allow: tuple[type, ...], sample: dict[str, Any]) -> dict[str, Any]:
    key = sample.get("__key__")
    check_key(key)
    ours: dict[str, bytes] = {}
    rest = {}
    for field, value in sample.items():
        name = cache_of_field(field)
        if name is None:
            rest[field] = value
            continue
        if name or field != FIELD:
            cache_name(name)
        skeleton, tensors = member_suffix(name, SKELETON), member_suffix(name, TENSORS)
        try:
            ours[skeleton], ours[tensors] = encode_sample(value, allow=allow)
        except TensorCacheError as exc:
            raise exc.at(f"sample {key!r}, field {field!r}") from exc
    check_suffixes(str(key), [*(field for field in rest if not field.startswith("_")), *ours])
    lowered = [*map(str.lower, rest), *ours]  # as webdataset reads the names
    clash = [field for field in rest if is_reserved(field) or lowered.count(field.lower()) > 1]
    if clash:
        raise InvalidKeyError(
            f"sample {key!r} has members {clash}, but these names are reserved for caches, or differ only in case; rename them"
        )
    return {**base(rest), **ours}


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

    The two members of a cache become the field `"tensorcache"` (or `"NAME.tensorcache"`) that was passed to `tc.encoder`. The
    stage decodes all other members as `wds.decode` does, with these exceptions. Pickles (`pyd`, `pickle`, `pkl`, `pth`) may
    contain plain values, and arrays and scalars of numbers, bools, bytes and texts. They may also contain dense tensors and
    parameters in host memory, and the types that FORMAT.md lists, except bytearray, deque, UUID and times of numpy. `cbor`,
    EPS and compressed FITS pictures are refused, because the cost of their decoders is unbounded. Your own handler may decode
    any of these first. An `.npy` member with further bytes after its array is refused. So is a JPEG picture of more than 100
    scans plus one for each 4,096 bytes. A `.safetensors` member that belongs to no cache is returned as bytes, and so is a
    member whose last extension has more than 100 characters.

    Args:
        handlers: As for `wds.decode`: `"pil"`, `"torchrgb"`, …, or functions of (extension, bytes).
        lazy: True leaves tensors unread until they are used.
        verify: True recomputes both digests of every cache. A cache that another tool wrote without digests is refused then.
        allow: Classes that skeletons and other pickles may build; only for shards that you trust.
        handler: Function that is called with the exception if a sample of a stream cannot be decoded. By default, it raises the
            exception. If it returns True, the stream continues without the sample, else it ends. In `.map`, which passes one
            sample, it is not called, and the exception is raised.
        max_expanded_nbytes: Limit in bytes for the expanded length of a compressed member (`gz`, `npz`); 64 MiB by default. It
            is also the limit for the total size of a pickle's tensors and arrays that share their elements. Members may always
            expand to 64 times their own length. A compressed pickle (`pkl.gz`) may expand only to 1/64 of this limit, or to 8
            times its length, because its objects take more memory. Compressed JSON or MessagePack may expand to 1/8 of this
            limit, or to 64 times its length. Pictures have Pillow's own limit, `PIL.Image.MAX_IMAGE_PIXELS`.
        decoder: The options `pre`, `post`, `only` and `partial` of `webdataset.autodecode.Decoder`.

    Raises:
        TypeError, ValueError, AssertionError: A handler or an option has a wrong type or value.

    Raises (when iterating):
        FormatError: One of the two members of a cache is missing, damaged, or belongs to a different sample. Or a member has
            the name of a decoded cache, such as `tensorcache`. Or webdataset's own decoders cannot read a member, or a decoded
            member would be too large. The message names shard, key and member; `__cause__` is the decoder's error. Errors of
            your functions come as webdataset raises them.
        UnsafeSkeletonError: A pickle or skeleton requires code outside the format; nothing was executed.
    """
    for step in handlers:
        if not isinstance(step, str) and not callable(step):
            problem = f"tc.decode got {type(step).__name__}, expected handlers, such as 'pil' or functions"
            raise TypeError(f"{problem}; as a stage of a pipeline, call it: tc.decode()")
    table = allow_table(allow)
    steps = [imagehandler(step) if isinstance(step, str) else step for step in handlers]
    members = MemberDecoder(steps, table, check_option(max_expanded_nbytes), **decoder)
    return Decode(members, lazy, verify, table, handler)


@dataclass(frozen=True, slots=True)
class Decode:
    """The stage that `decode` returns. Call it with an iterable of samples, or with one sample.

    Threads/fork/pickle: stateless; pickles if its handlers and classes do.
    """

    members: MemberDecoder
    lazy: bool
    verify: bool
    table: Mapping[tuple[str, str], type]
    handler: Handler

    def __call__(self, samples: Any, *data: bytes) -> Any:
        if data:
            raise TypeError("tc.decode() is a stage, not a handler: pass .compose(tc.decode()) in place of .decode(…)")
        return self._decode(samples) if isinstance(samples, dict) else self._iterate(samples)

    def _iterate(self, samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        try:
            for sample in samples:
                try:
                    decoded = self._decode(sample)
                except Exception as exc:  # the handler decides, as in all stages of webdataset
                    if self.handler(exc):
                        continue
                    break
                # free this sample before the next sample is read, for less memory and warm CPU caches
                del sample
                yield decoded
                del decoded
        finally:
            # webdataset's handlers keep an error in a cycle with this frame, which would keep the shard open
            del samples

    def _decode(self, sample: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        other_members: dict[str, Any] = {}
        try:
            for field, value in sample.items():
                if field[:2] == "__":
                    result[field] = value
                    continue
                half = half_of(field)
                if half is None or half.other not in sample:
                    _check_other(sample, field, value)
                    other_members[field] = value
                elif half.is_skeleton:
                    result[half.field] = self._decode_cache(sample, field, half.other)
            if other_members:
                result.update(self.members(other_members))
        except Exception as exc:  # newer webdataset releases wrap the error of a handler
            cause = exc if isinstance(exc, TensorCacheError) else exc.__cause__
            if isinstance(cause, TensorCacheError):
                where = f"{sample.get('__url__', 'a shard')}: sample {sample.get('__key__')!r}"
                raise cause.at(where) from cause.__cause__ or cause
            raise
        return result

    def _decode_cache(self, sample: dict[str, Any], first: str, second: str) -> Any:
        skeleton, tensors = sample[first], sample[second]
        if not (isinstance(skeleton, (bytes, memoryview)) and isinstance(tensors, (bytes, memoryview))):
            raise FormatError("the members of a cache are decoded already; use tc.decode() instead of wds.decode()")
        try:
            return decode_members(skeleton, tensors, self.lazy, self.verify, self.table)
        except TensorCacheError as exc:
            raise exc.at(f"members {first!r} and {second!r}") from exc


def _check_other(sample: dict[str, Any], field: str, value: Any) -> None:
    """Refuse half of a cache, and the name of a decoded cache."""
    if cache_of_field(field) is not None:
        raise FormatError(f"the name of member {field!r} is reserved for decoded caches; rename it")
    half = find_half(field, sample, partial(is_bound, value))
    if half is None and field.endswith(TENSORS) and is_bound(value):
        problem = f"member {field!r} contains the tensors of a cache, but its name contains no valid cache name"
        raise FormatError(problem, kind="missing")
