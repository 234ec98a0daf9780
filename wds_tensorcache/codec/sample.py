"""One sample to its two members and back: where skeleton, header and tensors meet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import xxhash

from wds_tensorcache.codec.binding import (
    build_preamble,
    had_preamble,
    is_damaged,
    parse_preamble,
    sign_header,
    tensors_digest,
)
from wds_tensorcache.codec.collector import LARGE_NBYTES, collector_paused
from wds_tensorcache.codec.header import parse_header, plan_member, plan_small_member
from wds_tensorcache.codec.layout import Layout
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor, read_array, read_tensor
from wds_tensorcache.codec.reference import (
    MemorySource,
    Reference,
    Source,
    check_named,
    named_by,
    resolve,
)
from wds_tensorcache.codec.skeleton.builders import allow_table
from wds_tensorcache.codec.skeleton.reader import unpickle
from wds_tensorcache.codec.skeleton.template import MAX_LEARNT, MISS, Template, learn
from wds_tensorcache.codec.skeleton.types import BUILDERS
from wds_tensorcache.codec.skeleton.writer import MANY_ITEMS, SkeletonWriter
from wds_tensorcache.errors import EncodeError, FormatError, UnsafeSkeletonError

__all__ = [
    "EncodedSample",
    "check_binding",
    "decode_body",
    "decode_members",
    "decode_plain_pickle",
    "decode_sample",
    "encode_sample",
    "encode_views",
    "list_references",
]


@dataclass(slots=True)
class EncodedSample:
    """Both members, the tensors' bytes not copied yet.

    Attributes:
        skeleton: The member `KEY.skel.pyd`.
        header, buffers: The member `KEY.safetensors` in its parts.
        layout, digest: What its header says.
        references: How the skeleton refers to the tensors, in the order of their bytes; None, as in every index, if it needs
            `allow=`.
    """

    skeleton: bytes
    header: bytes
    buffers: list[Any]
    layout: Layout
    digest: int
    references: tuple[str, ...] | None


_WIDTH = attrgetter("true.itemsize")
_MANY_TENSORS = 64  # the headers of so many are not kept


def encode_views(sample: Any, allow: Mapping[tuple[str, str], type], align: int = 64) -> EncodedSample:
    """Encode as `encode_sample` does, for a caller that encodes many: `allow` is `allow_table`'s result.

    Memory: `buffers` alias the tensors of `sample` that are contiguous on the CPU.
    """
    writer = SkeletonWriter(allow)
    try:
        writer.save(sample)
    except RecursionError as exc:
        raise EncodeError("the sample nests too deep for what is left of this interpreter's recursion limit") from exc
    # wide elements first: then each tensor is aligned to its own element without padding, which safetensors forbids
    tensors = sorted(writer.tensors.values(), key=_WIDTH, reverse=True)
    entries = tuple([(t.name, t.true.stored, t.shape, len(t.flat)) for t in tensors])
    if len(tensors) <= _MANY_TENSORS:
        header, layout = plan_small_member(entries, align)
    else:
        with collector_paused(len(tensors) > MANY_ITEMS):
            header, layout = plan_member(entries, align)
    buffers = [tensor.flat for tensor in tensors if len(tensor.flat)]
    digest = tensors_digest(header, buffers)
    body = writer.body()
    references = None if writer.needs_allow else tuple([tensor.reference for tensor in tensors])
    skeleton = build_preamble(layout.nbytes, digest, body) + body
    return EncodedSample(skeleton, sign_header(header, digest), buffers, layout, digest, references)


def encode_sample(sample: Any, *, allow: Iterable[type] = (), align: int = 64) -> tuple[bytes, bytes]:
    """Encode a nested Python structure as the two members of a shard.

    Args:
        sample: Containers, plain values, the listed types of FORMAT.md, and tensors or arrays anywhere in them; CUDA,
            `requires_grad`, non-contiguous, conjugated and expanded tensors are stored by value. Lazy tensors are copied
            without being decoded.
        allow: Classes to write besides the listed types; a reader must allow them too.
        align: The tensors' bytes begin at a multiple of this many bytes of the member; itself a multiple of 8.

    Returns:
        (skeleton, tensors): the bytes of `KEY.skel.pyd` and of `KEY.safetensors`. Equal samples, with the same of their
        objects being one, give equal bytes in every process and on every Python version.

    Raises:
        EncodeError: Something cannot be represented; the message names its path and the remedy.
        ValueError: `align` is not a positive multiple of 8, or the header is longer than safetensors allows.

    Memory: fresh bytes, each tensor copied once.
    """
    encoded = encode_views(sample, allow_table(allow), align)
    return encoded.skeleton, b"".join((encoded.header, *encoded.buffers))


def decode_sample(
    skeleton: bytes | memoryview,
    tensors: bytes | memoryview,
    *,
    lazy: bool = True,
    verify: bool = False,
    allow: Iterable[type] = (),
) -> Any:
    """Rebuild what `encode_sample` was given.

    Args:
        skeleton: The `KEY.skel.pyd` member; one that stock pickle wrote (protocol 4 or 5) is read too.
        tensors: The `KEY.safetensors` member; one that stock safetensors wrote is read too.
        lazy: True leaves `LazyTensor` and `LazyArray` in the tensors' places; False loads them.
        verify: Recompute both digests.
        allow: Classes that the skeleton may build; only for files that you trust.

    Raises:
        UnsafeSkeletonError: The skeleton asks for anything outside the format; nothing was executed.
        FormatError: Damaged bytes, members that do not belong together, or with `verify`, digests that do not match or
            are not there.
        TypeError: A member is not bytes.

    Memory: lazy tensors keep `tensors` alive; loaded ones are fresh and private, one allocation each.
    """
    return decode_members(_member(skeleton), _member(tensors), lazy, verify, allow_table(allow))


def _member(raw: Any) -> bytes | memoryview:
    if isinstance(raw, bytes):
        return raw
    if not isinstance(raw, (bytearray, memoryview)):
        raise TypeError(f"a member is bytes, bytearray or memoryview, got {type(raw).__name__}")
    view = memoryview(raw)
    return view.cast("B") if view.c_contiguous else view.tobytes()


def decode_members(
    skeleton: bytes | memoryview,
    tensors: bytes | memoryview,
    lazy: bool,
    verify: bool,
    allow: Mapping[tuple[str, str], type],
) -> Any:
    """Decode as `decode_sample` does, for a caller that decodes many: `allow` is `allow_table`'s result."""
    skeleton = bytes(skeleton)
    layout, digest = parse_header(tensors)
    begin, body_digest = check_binding(skeleton, layout.nbytes, digest)
    if verify:
        if digest is None or body_digest is None:
            raise FormatError("cannot be verified: a member written by other means has no digest")
        if tensors_digest(tensors) != digest:
            raise FormatError("the safetensors member is damaged: its digest does not match its bytes", kind="damaged")
        if xxhash.xxh3_64_intdigest(memoryview(skeleton)[begin:]) != body_digest:
            raise FormatError("the skeleton is damaged: its digest does not match its bytes", kind="damaged")
    return decode_body(skeleton, begin, layout, MemorySource(tensors), lazy, allow)


def check_binding(skeleton: bytes, nbytes: int, digest: int | None) -> tuple[int, int | None]:
    """Return where a skeleton's body begins, and the digest that it declares of that.

    Args:
        skeleton: The member, or at least its preamble.
        nbytes: Length of the `.safetensors` member that is beside it.
        digest: What that declares; None if it declares none.

    Raises:
        FormatError: The two members do not belong together.
    """
    begin, expected_nbytes, expected_digest, body_digest = parse_preamble(skeleton)
    if expected_digest is None and digest is not None and had_preamble(skeleton, nbytes, digest):
        raise FormatError("the preamble is damaged where it begins")
    if (expected_digest != digest or expected_nbytes != nbytes) and None not in (expected_digest, digest):
        raise FormatError(
            "the two members do not belong together: the skeleton was written with a safetensors member of "
            f"{expected_nbytes} bytes and digest {expected_digest:016x}, this one has {nbytes} and {digest:016x}",
            kind="damaged",
        )
    return begin, body_digest


def decode_body(
    skeleton: bytes, begin: int, layout: Layout, source: Source, lazy: bool, allow: Mapping[tuple[str, str], type]
) -> Any:
    """Return the object of a skeleton whose body begins at `begin`, its tensors at `source` as `layout` says."""
    form = layout.form
    template = form.template
    if template is not None:
        made = template.match(skeleton, begin)
        if made is not MISS:
            for found in resolve_template(layout, template):
                made.append(open_tensor(found, source, lazy))
            return template.build(made)
    return _interpret(skeleton, begin, layout, source, lazy, allow)[0]


def _interpret(
    skeleton: bytes, begin: int, layout: Layout, source: Source, lazy: bool, allow: Mapping[tuple[str, str], type]
) -> tuple[Any, Iterable[str]]:
    """Return the object of a skeleton, and the texts of its references."""
    met: dict[str, Any] = {}

    def reference(text: str) -> Any:
        value = met.get(text)
        if value is None:
            value = met[text] = open_tensor(resolve(layout, text), source, lazy)
        return value

    try:
        with collector_paused(len(skeleton) > LARGE_NBYTES):
            sample = unpickle(skeleton, begin, reference, BUILDERS, allow)
    except FormatError as exc:
        if is_damaged(skeleton):
            what = "the skeleton is damaged: its digest does not match its bytes"
            if isinstance(exc, UnsafeSkeletonError):  # `allow=` mends no damage
                what += f"; they name {exc.needs!r}" if exc.needs else ""
            else:
                what += f"; {exc.reason}"
            raise type(exc)(what, offset=exc.offset, kind="damaged") from exc
        raise
    check_named(layout, met)
    form = layout.form
    form.num_interpreted += 1
    if 1 < form.num_interpreted <= MAX_LEARNT:  # not for a form that one sample has, nor again and again
        form.template = learn(skeleton, begin)
    return sample, met


def list_references(skeleton: bytes, begin: int, layout: Layout) -> tuple[str, ...]:
    """Return how a skeleton, whose body begins at `begin`, refers to each tensor, in the order of their bytes.

    Raises:
        UnsafeSkeletonError, FormatError: It cannot be read without `allow=`, or not at all.
    """
    template = layout.form.template
    if template is not None and template.match(skeleton, begin) is not MISS:
        resolve_template(layout, template)  # raises where these shapes cannot be
        return layout.resolved[2]  # type: ignore[no-any-return]
    return _in_order(layout, _interpret(skeleton, begin, layout, _NOWHERE, True, {})[1])


def _in_order(layout: Layout, texts: Iterable[str]) -> tuple[str, ...]:
    by_name = {named_by(text)[1]: text for text in texts}
    return tuple(by_name[name] for name in layout.tensors)


_NOWHERE = MemorySource(b"")


def resolve_template(layout: Layout, template: Template) -> tuple[Reference, ...]:
    """Return what the references of a template, learnt from another sample of the form, are in this layout."""
    known, references, _ = layout.resolved
    if known is not template:
        references = tuple(resolve(layout, text) for text in template.references)
        layout.resolved = template, references, _in_order(layout, template.references)
    return references  # type: ignore[no-any-return]


def open_tensor(reference: Reference, source: Source, lazy: bool) -> Any:
    """Return the tensor or array at `reference`, lazy or loaded."""
    if reference.kind == "tensor":
        if lazy:
            return LazyTensor(reference, source)
        return read_tensor(source, reference.begin, reference.end, reference.dtype, reference.shape)
    if lazy:
        return LazyArray(reference, source)
    return read_array(source, reference.begin, reference.end, reference.dtype, reference.shape)


def decode_plain_pickle(pickled: bytes, allow: Mapping[tuple[str, str], type]) -> Any:
    """Return what a pickle of plain values and listed types holds.

    Raises:
        UnsafeSkeletonError: It needs anything else; nothing was executed.
        FormatError: It is damaged, or a skeleton that lacks its tensors.
    """

    def reference(text: str) -> Any:
        raise FormatError(f"a skeleton, which refers to {text!r:.100}, under a name that is no cache's")

    begin, *_ = parse_preamble(pickled)
    return unpickle(pickled, begin, reference, BUILDERS, allow)
