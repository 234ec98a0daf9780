"""Headers of `.safetensors` members, which contain a sample's tensors (FORMAT.md 3.1).

A *layout* is a parsed header: the names, dtypes, shapes and byte ranges of the tensors in a member. A *form* is a layout
without its shapes: names, dtypes and numbers of dimensions. The samples of a cache often share a few forms and layouts, so
both are kept in tables. Parsing validates the whole header, so later code only slices.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any, NoReturn, TypeAlias

from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.errors import FormatError

FORMAT_VERSION = 1
_PREFIX = b'{"__metadata__":{"tensorcache":"1 '
DIGITS_BEGIN = 8 + len(_PREFIX)
DIGITS_END = DIGITS_BEGIN + 16
MAX_HEADER_NBYTES = 100_000_000  # the limit of the safetensors specification
MAX_NDIM = 64  # the limit of numpy
_MAX_SIZE = (1 << 63) - 1
_SURROGATE = re.compile("[\ud800-\udfff]")
_METADATA = re.compile(r"([1-9]\d{0,8}) [0-9a-f]{16}", re.ASCII)
_MAX_LAYOUTS = 1024  # beyond them, equal layouts may be different objects, and the templates of forms are lost
_MAX_CACHED_NBYTES = 1 << 16
Further: TypeAlias = tuple[tuple[str, str], ...]  # further names of tensors, each with the tensor's name


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a header. Its byte range counts from the first byte of the member, the start of the header."""

    name: str
    dtype: str  # stored dtype, a key of `STORED`
    shape: tuple[int, ...]  # in elements of `dtype`
    begin: int
    end: int


@dataclass(slots=True, eq=False)
class Form:
    """Names, dtypes and numbers of dimensions of the tensors in a layout. Layouts that differ only in shapes may share one."""

    entries: tuple[tuple[str, str, int], ...]  # name, stored dtype, number of dimensions, in the order of the bytes
    templates: list[Any] = field(default_factory=list)  # `Template`s of earlier skeletons of this form
    num_interpreted: int = 0  # skeletons that were read without a template
    names: dict[Any, Further] = field(default_factory=dict)  # by template, the further names in samples that match it


@dataclass(slots=True)
class Layout:
    """The contents of a header. Members with equal headers share it, unless the header is long or the table was cleared."""

    tensors: dict[str, StoredTensor]  # by name, in the order of their bytes, which have no holes
    data_begin: int  # offset of the first tensor's bytes in the member
    nbytes: int  # length of the whole member
    form: Form = field(compare=False, repr=False)
    # string of the reference to each tensor, in the same order; None if unknown, as after `parse_header`
    texts: tuple[str, ...] | None = field(default=None, compare=False)
    further: Further = field(default=(), compare=False)
    named: dict[str, StoredTensor] = field(init=False, compare=False, repr=False)  # tensors by all their names
    references: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # by string, see `resolve`
    # by template: its references in its own order, and their strings in the order of the tensors
    resolved: dict[Any, tuple[Any, Any]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.named = self.tensors
        if self.further:
            self.named = self.tensors | {further: self.tensors[name] for further, name in self.further}

    @property
    def named_texts(self) -> dict[str, str]:
        """Strings of the references to tensors, by name. `texts` must not be None.

        A tensor with further names has an item for each name.
        """
        assert self.texts is not None
        texts = dict(zip(self.tensors, self.texts, strict=True))
        return texts | {further: texts[name] for further, name in self.further}


# Layouts by all bytes of their header after its digest, or by the arguments of `make_layout`.
_LAYOUTS: dict[Any, Layout] = {}
_FORMS: dict[tuple[tuple[str, str, int], ...], Form] = {}


def keep_bounded(table: dict[Any, Any], key: Any, value: Any, most: int = 64) -> Any:
    """Return `table[key]`, after adding `value` if the key is missing. A table of `most` entries is cleared first."""
    # Keys come from files, so without a limit a hostile file could fill memory.
    if len(table) >= most:
        table.clear()
    return table.setdefault(key, value)


def form_of(entries: tuple[tuple[str, str, int], ...]) -> Form:
    """Return the form with these entries.

    Calls with equal entries return the same object, unless the entries are long or the table was cleared.
    """
    form: Form | None = _FORMS.get(entries)
    if form is None:
        form = Form(entries)
        if _is_small(form):
            form = keep_bounded(_FORMS, entries, form, _MAX_LAYOUTS)
    return form


def _is_small(form: Form) -> bool:
    return sum(len(name) + 64 for name, *_ in form.entries) <= _MAX_CACHED_NBYTES


def make_layout(
    form: Form, dims: Sequence[int], data_begin: int, texts: tuple[str, ...] | None = None, further: Further = ()
) -> Layout:
    """Return the layout with this form and these shapes.

    `dims` contains the dimensions of all shapes, in order. The caller has validated them.
    """
    # The author of an index can choose integers whose hashes collide; the hashes of bytes have a secret seed.
    contents = (form, array("Q", dims).tobytes(), data_begin, texts, further)
    layout = _LAYOUTS.get(contents)
    if layout is not None:
        return layout
    tensors = {}
    begin, first = data_begin, 0
    for name, dtype, ndim in form.entries:
        shape = tuple(dims[first : first + ndim])
        end = begin + math.prod(shape) * STORED[dtype][0]
        tensors[name] = StoredTensor(name, dtype, shape, begin, end)
        begin, first = end, first + ndim
    layout = Layout(tensors, data_begin, begin, form, texts, further)
    return keep_bounded(_LAYOUTS, contents, layout, _MAX_LAYOUTS) if _is_small(form) else layout


def is_bound(member: Any) -> bool:
    """Return whether `member` begins like a cache's `.safetensors` member of any version."""
    return isinstance(member, (bytes, memoryview)) and member[8 : len(_PREFIX) + 6] == _PREFIX[:-2]


def build_safetensors_header(tensors: Sequence[tuple[str, str, tuple[int, ...], int]], align: int) -> bytes:
    """Build the header of a `.safetensors` member, with zeros as its digest.

    The header begins with its length field; `sign_header` sets the digest. `tensors` contains (name, stored dtype, shape in
    stored elements, number of bytes) in the order of the bytes. The length of the header is a multiple of `align`. Raises
    ValueError if `align` is not a positive multiple of 8, or if the header exceeds `MAX_HEADER_NBYTES`.
    """
    if align <= 0 or align % 8:
        raise ValueError(f"align={align}, expected a positive multiple of 8")
    # json.dumps would take twice as long: it needs a dict and two tuples per tensor, which trigger garbage collections.
    entries = [f'"__metadata__":{{"tensorcache":"{FORMAT_VERSION} {0:016x}"}}']
    begin = 0
    for name, dtype, shape, nbytes in tensors:
        end = begin + nbytes
        dims = ",".join(map(str, shape))
        entries.append(
            f'{encode_basestring(name)}:{{"dtype":"{dtype}","shape":[{dims}],"data_offsets":[{begin},{end}]}}'
        )
        begin = end
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-(8 + len(text)) % align)
    if len(text) > MAX_HEADER_NBYTES:
        raise ValueError(
            f"{len(tensors)} tensors need a header of {len(text)} bytes; the limit is {MAX_HEADER_NBYTES}: split the sample"
        )
    return len(text).to_bytes(8, "little") + text


def plan_member(tensors: tuple[tuple[str, str, tuple[int, ...], int], ...], align: int) -> tuple[bytes, Layout]:
    header = build_safetensors_header(tensors, align)
    form = form_of(tuple((name, dtype, len(shape)) for name, dtype, shape, _ in tensors))
    return header, make_layout(form, [dim for _, _, shape, _ in tensors for dim in shape], len(header))


plan_small_member = lru_cache(256)(plan_member)  # samples whose tensors have equal shapes share a header


def parse_header(member: bytes | memoryview, member_nbytes: int | None = None) -> tuple[Layout, int | None]:
    """Validate the header of a `.safetensors` member; return layout and digest.

    The digest is None if the header has none. `member` may be only the beginning of a member of `member_nbytes` bytes. Raises
    FormatError if the header breaks a rule of FORMAT.md 3.1, is not completely in `member`, or does not match the length.
    """
    nbytes = len(member) if member_nbytes is None else member_nbytes
    end = 8 + int.from_bytes(member[:8], "little")
    if end > nbytes or nbytes < 8:
        raise FormatError(f"the safetensors member has {nbytes} bytes, but its header needs {max(end, 8)}")
    if end - 8 > MAX_HEADER_NBYTES:
        raise FormatError(f"the header has {end - 8} bytes; the limit is {MAX_HEADER_NBYTES}")
    if end > len(member):
        raise FormatError(f"the header ends at byte {end}, but only the first {len(member)} bytes were read")
    digest = None
    if member[8:DIGITS_BEGIN] != _PREFIX or end < DIGITS_END:
        layout = _parse_tensors(bytes(member[8:end]), end)
    else:
        key = bytes(member[DIGITS_END:end])
        layout = _LAYOUTS.get(key)  # type: ignore[assignment]
        if layout is None:
            layout = _parse_tensors(bytes(member[8:end]), end)
            if len(key) <= _MAX_CACHED_NBYTES:
                layout = keep_bounded(_LAYOUTS, key, layout, _MAX_LAYOUTS)
        digits = bytes(member[DIGITS_BEGIN:DIGITS_END])
        if digits.strip(b"0123456789abcdef"):
            raise FormatError(f"the digest {digits!r} is not 16 hexadecimal digits in lower case")
        digest = int(digits, 16)
    if layout.nbytes != nbytes:
        raise FormatError(f"the tensors end at byte {layout.nbytes}, but the member has {nbytes} bytes")
    return layout, digest


def _parse_tensors(text: bytes, data_begin: int) -> Layout:
    if not text.startswith(b"{"):
        raise FormatError(f"the header begins with {text[:1]!r}, not with '{{'")
    try:
        entries = parse_json(text)
        "".join(entries).encode()  # raises if a name has a surrogate, from an escape in the JSON
    except (ValueError, RecursionError) as exc:  # including JSONDecodeError and FormatError
        raise FormatError(f"the header is not the JSON that FORMAT.md 3.1 allows: {exc}") from exc
    _check_metadata(entries.pop("__metadata__", {}), text.startswith(_PREFIX))
    tensors = [_parse_entry(name, entry, data_begin) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    position = data_begin
    for tensor in tensors:
        if tensor.begin != position:
            fault = "overlaps the tensor before it" if tensor.begin < position else "follows a hole"
            raise FormatError(f"tensor {tensor.name!r} {fault}: it starts at byte {tensor.begin}, expected {position}")
        position = tensor.end
    form = form_of(tuple((tensor.name, tensor.dtype, len(tensor.shape)) for tensor in tensors))
    return Layout({tensor.name: tensor for tensor in tensors}, data_begin, position, form)


def _check_metadata(metadata: Any, is_at_begin: bool) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("__metadata__ does not map strings to strings")
    if _SURROGATE.search("".join(metadata)):
        raise FormatError("a key of __metadata__ contains a surrogate, which UTF-8 cannot encode")
    ours = metadata.get("tensorcache")
    if ours is None:
        return
    match = _METADATA.fullmatch(ours)
    if match is None:
        raise FormatError(f"__metadata__ has 'tensorcache': {ours!r}, expected a version and 16 hexadecimal digits")
    check_version(int(match[1]))
    if not is_at_begin:
        raise FormatError(
            "the key 'tensorcache' of __metadata__ is not at the beginning of the header, or its value is escaped, so the "
            "digest is lost"
        )


def check_version(version: int) -> None:
    if version != FORMAT_VERSION:
        raise FormatError(
            f"written in format version {version}; this release reads version {FORMAT_VERSION}: upgrade wds-tensorcache"
        )


def _parse_entry(name: str, entry: Any, data_begin: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"tensor {name!r}: expected dtype, shape and data_offsets, got {entry!r:.100}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in STORED:
        raise FormatError(f"tensor {name!r}: unknown dtype {dtype!r:.100}")
    if not _are_sizes(shape) or len(shape) > MAX_NDIM or not is_possible(shape):
        raise FormatError(
            f"tensor {name!r}: impossible shape {shape!r:.100}, expected at most {MAX_NDIM} sizes, which multiply to less than "
            "2^59 without zeros"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] < 1 << 63:
        raise FormatError(
            f"tensor {name!r}: impossible data_offsets {offsets!r:.100}, expected [begin, end] with 0 <= begin <= end"
        )
    begin, end = offsets
    needed = math.prod(shape) * STORED[dtype][0]
    if end - begin != needed:
        held = f"offsets [{begin}, {end}) hold {end - begin} bytes"
        raise FormatError(f"tensor {name!r}: {held}, but {dtype}{shape} needs {needed}")
    return StoredTensor(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def is_possible(shape: Sequence[int]) -> bool:
    """Return whether torch and numpy can compute the strides of this shape.

    For strides, both libraries count a dimension of 0 as 1.
    """
    return math.prod(filter(None, shape)) < 1 << 59


def _are_sizes(values: Any) -> bool:
    if type(values) is not list:
        return False
    # Takes half the time of a generator expression.
    for value in values:  # noqa: SIM110
        if type(value) is not int or not 0 <= value <= _MAX_SIZE:
            return False
    return True


def parse_json(text: bytes) -> Any:
    """Return the value of UTF-8 JSON. Unlike `json.loads`, also raise ValueError for equal keys, NaN, infinities and `-0`."""
    return (_BY_DIGITS if b"-0" in text else _DECODER).decode(text.decode())


def _parse_int(digits: str) -> int:
    if digits.startswith("-0"):
        raise ValueError("it contains -0; expected 0")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it contains {name}, which is not valid JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        [(name, _), *_] = Counter(name for name, _ in pairs).most_common(1)
        raise FormatError(f"key {name!r} occurs twice in one object")
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
_BY_DIGITS = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_parse_int)
