"""Encoding of samples as two members, skeleton and tensors, and decoding.

A *member* is a file in the tar. Skeletons are pickles, but Python's own unpickler never reads them. `skeleton/reader.py`
interprets any skeleton, with the builders of `skeleton/types.py`. `skeleton/template.py` reads and writes skeletons faster, if
they differ from an earlier one only in plain values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from wds_tensorcache.codec.binding import (
    build_preamble,
    check_body,
    had_preamble,
    parse_preamble,
    sign_header,
    tensors_digest,
)
from wds_tensorcache.codec.header import Further, Layout, parse_header, plan_member, plan_small_member
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.codec.reference import ByteSource, MemorySource, Reference, check_named, resolve
from wds_tensorcache.codec.skeleton.reader import unpickle
from wds_tensorcache.codec.skeleton.template import MAX_ATTEMPTS, Template, Written, family_of, find_match, learn
from wds_tensorcache.codec.skeleton.types import Allowed, allow_table
from wds_tensorcache.codec.skeleton.writer import SkeletonWriter
from wds_tensorcache.codec.tree import further_names
from wds_tensorcache.errors import FormatError

_WIDTH = attrgetter("true.itemsize")
_MANY_TENSORS = 64  # headers with more tensors are not cached


@dataclass(slots=True)
class EncodedSample:
    """Both encoded members of a sample, before tensors are copied."""

    skeleton: bytes  # the member `KEY.skel.pyd`
    header: bytes  # the first part of the member `KEY.safetensors`; `buffers` follow
    buffers: list[Any]
    layout: Layout
    digest: int
    references: tuple[str, ...] | None  # in the order of the tensors' bytes; None if readers need `allow=`
    further: Further = ()


def encode_views(sample: Any, allow: Allowed, align: int = 64) -> EncodedSample:
    """Encode as `encode_sample` does, without joining the buffers. `allow` is the result of `allow_table`.

    Memory: `buffers` alias the tensors of `sample` that are contiguous and on the CPU.
    """
    family = None if allow else family_of(sample)
    further: Further = ()
    template = None if family is None else family.template
    written = None if template is None else template.write(sample, align)
    if written is None:
        writer = SkeletonWriter(allow)
        writer.save(sample)
        written = _plan(writer, align)
        if writer.shares_tensors and not writer.needs_allow:
            further = further_names(sample, writer.name_of)
        if family is not None:
            family.miss(sample, written[0])
    elif family is not None:
        family.num_misses = 0
    body, header, layout, buffers, references = written
    header, digest = sign_header(header, buffers)
    skeleton = build_preamble(layout.nbytes, digest, body) + body
    return EncodedSample(skeleton, header, buffers, layout, digest, references, further)


def _plan(writer: SkeletonWriter, align: int) -> Written:
    # Wide elements first, so that each tensor is aligned to its element without padding, which safetensors forbids.
    tensors = sorted(writer.tensors.values(), key=_WIDTH, reverse=True)
    entries = tuple([(t.name, t.true.stored, t.shape, len(t.flat)) for t in tensors])
    header, layout = (plan_small_member if len(tensors) <= _MANY_TENSORS else plan_member)(entries, align)
    references = None if writer.needs_allow else tuple([tensor.reference for tensor in tensors])
    return writer.body(), header, layout, [tensor.flat for tensor in tensors if len(tensor.flat)], references


def encode_sample(sample: Any, *, allow: Iterable[type] = (), align: int = 64) -> tuple[bytes, bytes]:
    """Encode a nested Python structure as the two members of a cache.

    Args:
        sample: Any nesting of containers, plain values, the types listed in FORMAT.md 2.5, tensors and arrays. Tensors that
            share memory are each stored in full. The bytes of lazy tensors are copied as they are.
        allow: Other classes that the sample may contain; readers must allow them, too.
        align: Alignment of the first tensor in its member in bytes, a multiple of 8.

    Returns:
        (skeleton, tensors): The bytes of `KEY.skel.pyd` and of `KEY.safetensors`. Equal samples that share their
        objects in the same way have the same bytes, in every process and on every Python version.

    Raises:
        EncodeError: A value cannot be written, a lazy tensor is damaged, or the sample exceeds a limit of FORMAT.md 2.6.
        RemoteError: The bytes of a remote lazy tensor cannot be read.
        TypeError: An item of `allow` is not a class, or `align` is not an int.
        ValueError: `align` is not a positive multiple of 8, or the header exceeds the limit of safetensors.

    Memory: newly allocated; each contiguous tensor on the CPU is copied once.
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
    """Rebuild a sample from the two members of a cache.

    Args:
        skeleton: Bytes of the member `KEY.skel.pyd`, or of a skeleton that stock pickle wrote (protocol 4 or 5).
        tensors: Bytes of the member `KEY.safetensors`, or of a file that stock safetensors wrote. A bytearray is accepted for
            both members, too.
        lazy: True returns `LazyTensor` and `LazyArray` objects; False loads the tensors.
        verify: True recomputes both digests and compares them with the stored digests.
        allow: Classes that the skeleton may instantiate; pass them only for files that you trust.

    Raises:
        UnsafeSkeletonError: The skeleton names code outside the format, which was not run, or is no pickle of protocol 4 or 5.
        FormatError: The members are damaged, unrelated, or of another version; with `verify`, a digest is wrong or missing.
            Or a class in `allow` raised an error.
        TypeError: A member is not bytes, bytearray or memoryview, or an item of `allow` is not a class.

    Memory: lazy tensors read `tensors` when they are loaded, and keep it alive, so do not change a bytearray. Each loaded
        tensor has its own newly allocated memory. A memoryview that is not contiguous is copied.
    """
    return decode_members(_member(skeleton), _member(tensors), lazy, verify, allow_table(allow))


def _member(raw: Any) -> bytes | memoryview:
    if isinstance(raw, bytes):
        return raw
    if not isinstance(raw, (bytearray, memoryview)):
        raise TypeError(f"a member must be bytes, bytearray or memoryview, got {type(raw).__name__}")
    view = memoryview(raw)
    return view.cast("B") if view.c_contiguous else view.tobytes()


def decode_members(
    skeleton: bytes | memoryview,
    tensors: bytes | memoryview,
    lazy: bool,
    verify: bool,
    allow: Allowed,
) -> Any:
    """Decode a sample as `decode_sample` does. `allow` is the result of `allow_table`."""
    skeleton = bytes(skeleton)
    layout, digest = parse_header(tensors)
    begin, body_digest = check_binding(skeleton, layout.nbytes, digest)
    if verify:
        if digest is None or body_digest is None:
            raise FormatError("the sample cannot be verified: a member that another tool wrote has no digest")
        if tensors_digest(tensors) != digest:
            raise FormatError("the safetensors member is damaged: its digest does not match its bytes", kind="damaged")
        check_body(skeleton)
    return decode_body(skeleton, begin, layout, MemorySource(tensors), lazy, allow)


def check_binding(skeleton: bytes, nbytes: int, digest: int | None) -> tuple[int, int | None]:
    """Check that two members belong together; return body offset and digest.

    `nbytes` and `digest` are the length and the digest of the `.safetensors` member. A member that stores no digest has the
    digest None. Raises FormatError if the two members do not belong together, or if `parse_preamble` refuses the skeleton.
    """
    begin, expected_nbytes, expected_digest, body_digest = parse_preamble(skeleton)
    if expected_digest is None and digest is not None and had_preamble(skeleton, nbytes, digest):
        raise FormatError("the skeleton's preamble is damaged at its beginning")
    if (expected_digest != digest or expected_nbytes != nbytes) and None not in (expected_digest, digest):
        raise FormatError(
            "the two members do not belong together: the skeleton was written with a safetensors member of "
            f"{expected_nbytes} bytes and digest {expected_digest:016x}, but this one has {nbytes} bytes and digest "
            f"{digest:016x}",
            kind="damaged",
        )
    return begin, body_digest


def decode_body(skeleton: bytes, begin: int, layout: Layout, source: ByteSource, lazy: bool, allow: Allowed) -> Any:
    """Rebuild a sample from a skeleton whose body starts at byte `begin`. `source` contains the tensors in `layout`."""
    matched = match_body(skeleton, begin, layout, source, lazy)
    if matched is None:
        return _interpret(skeleton, begin, layout, source, lazy, allow)[0]
    template, parts = matched
    return template.build(parts)


def match_body(
    skeleton: bytes, begin: int, layout: Layout, source: ByteSource, lazy: bool = True
) -> tuple[Template, list[Any]] | None:
    """Return a skeleton's template and the list for `Template.build`, if any.

    `build` changes the list, so pass it a copy to build several samples. If `lazy` is True, these samples share only
    immutable objects.
    """
    template, parts = find_match(layout.form.templates, skeleton, begin)
    if template is None:
        return None
    for reference in _resolve_template(layout, template)[0]:
        parts.append(open_tensor(reference, source, lazy))
    return template, parts


def _interpret(
    skeleton: bytes, begin: int, layout: Layout, source: ByteSource, lazy: bool, allow: Allowed
) -> tuple[Any, Iterable[str]]:
    """Rebuild a sample without a template; return it and its references' strings."""
    tensors: dict[str, Any] = {}

    def reference(text: str) -> Any:
        tensor = tensors.get(text)
        if tensor is None:
            tensor = tensors[text] = open_tensor(resolve(layout, text), source, lazy)
        return tensor

    try:
        sample = unpickle(skeleton, begin, reference, allow)
    except FormatError:
        check_body(skeleton)  # the names in a damaged skeleton may be damaged, so `allow=` would be no remedy
        raise
    check_named(layout, tensors)
    form = layout.form
    form.num_interpreted += 1
    # Learning takes time. So it skips the first sample of a form, which may be the only sample, and ends after some attempts.
    if form.num_interpreted <= MAX_ATTEMPTS and form.num_interpreted % 2 == 0:
        template = learn(sample, skeleton[begin:])
        if template is not None:
            form.templates.append(template)
    return sample, tensors


def list_references(skeleton: bytes, begin: int, layout: Layout) -> tuple[tuple[str, ...], Further]:
    """Return a skeleton's reference strings, and its tensors' further names.

    The body of the skeleton starts at byte `begin`. The strings are in the order of the tensors' bytes. Raises FormatError if
    the skeleton needs `allow=`, or is damaged.
    """
    form = layout.form
    template, values = find_match(form.templates, skeleton, begin)
    if template is None:
        sample, texts = _interpret(skeleton, begin, layout, _NOWHERE, True, {})
        return _in_order(layout, texts), further_names(sample)
    references, texts = _resolve_template(layout, template)
    names = form.names.get(template)
    if names is None:
        tensors = [open_tensor(reference, _NOWHERE, True) for reference in references]
        names = form.names[template] = further_names(template.build([*values, *tensors]))
    return texts, names


_NOWHERE = MemorySource(b"")


def _in_order(layout: Layout, texts: Iterable[str]) -> tuple[str, ...]:
    by_name = {resolve(layout, text).name: text for text in texts}
    return tuple(by_name[name] for name in layout.tensors)


def _resolve_template(layout: Layout, template: Template) -> tuple[tuple[Reference, ...], tuple[str, ...]]:
    """Return `Layout.resolved` for a template, perhaps of another layout."""
    resolved = layout.resolved.get(template)
    if resolved is None:
        references = tuple(resolve(layout, text) for text in template.references)
        resolved = layout.resolved[template] = references, _in_order(layout, template.references)
    return resolved


def open_tensor(reference: Reference, source: ByteSource, lazy: bool) -> Any:
    cls = LazyTensor if reference.kind == "tensor" else LazyArray
    if lazy:
        return cls(reference, source)
    return cls.view_buffer(source.read(reference.begin, reference.end), reference.dtype, reference.shape)
