"""Families of samples: a fast path for writing a sample that differs from an earlier one only in plain values and tensors.

A sample whose structure matches the template of its family has the body that `SkeletonWriter` writes, byte for byte.
`SkeletonWriter` writes all other samples, and raises the errors of samples that cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from wds_tensorcache.codec.dtypes import TORCH_TRUE, TrueDtype
from wds_tensorcache.codec.header import Layout, plan_member
from wds_tensorcache.codec.skeleton.limits import TEXTS
from wds_tensorcache.codec.skeleton.template import MAX_PARTS, Template, item_getter, learn
from wds_tensorcache.codec.storable import PLAIN, StorableTensor, describe_tensor, view_plain

_MAX_FAMILIES = 256
_MAX_MISSES = 32  # after more misses in a row, the template is given up

# Body of the skeleton; header without its digest, layout and buffers of the `.safetensors` member; strings of the references
# in the order of the tensors' bytes, None if readers of the skeleton need `allow=`.
Written = tuple[bytes, bytes, Layout, list[Any], "tuple[str, ...] | None"]


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """A template, and the tensors that a sample must have to match it.

    Attributes:
        template: Template of an earlier sample.
        select_tensors: Function that selects the tensors from the parts, in the order of their bytes in the member.
        tensors: For each tensor in this order: its type, its name, its stored dtype, and its torch dtype if `view_plain`
            accepts it, otherwise None.
        references: Strings of the references to the tensors, in the same order.
    """

    template: Template
    select_tensors: Callable[[list[Any]], Iterable[Any]]
    tensors: tuple[tuple[Any, str, TrueDtype, torch.dtype | None], ...]
    references: tuple[str, ...]


@lru_cache(1024)
def _plan(form: _Form, align: int, *shapes: tuple[int, ...]) -> tuple[bytes, Layout]:
    entries = [
        (name, true.stored, tuple(shape), math.prod(shape) * true.itemsize)
        for shape, (_, name, true, _) in zip(shapes, form.tensors, strict=True)
    ]
    return plan_member(tuple(entries), align)


@dataclass(slots=True, eq=False)
class Family:
    """Samples whose outermost containers have the same type, and the same keys or the same length.

    Attributes:
        form: Form of an earlier sample; None if there is none.
        num_misses: Number of samples since the last one that matched the form.
    """

    form: _Form | None = None
    num_misses: int = 0

    def write(self, sample: Any, align: int) -> Written | None:
        """Return the content of both members, which aliases the sample's tensors; None if the sample does not match."""
        form = self.form
        written = None if form is None else form.template.write(sample)
        if form is None or written is None:
            return None
        body, parts = written
        buffers: list[Any] = []
        shapes: list[Any] = []
        for value, (cls, _, true, plain) in zip(form.select_tensors(parts), form.tensors, strict=True):
            if type(value) is not cls:
                return None
            flat: Any = view_plain(value) if value.dtype is plain else None
            if flat is not None:
                shapes.append(value.shape)
            else:
                try:
                    stored = describe_tensor(value)
                except Exception:
                    return None  # `SkeletonWriter` raises the error
                if stored.true != true:
                    return None
                flat = stored.flat
                shapes.append(stored.shape)
            if len(flat):
                buffers.append(flat)
        header, layout = _plan(form, align, *shapes)
        self.num_misses = 0
        return body, header, layout, buffers, form.references

    def miss(self, sample: Any, body: bytes, tensors: list[StorableTensor]) -> None:
        """Count a sample that did not match, and sometimes learn from it.

        Args:
            sample: The sample.
            body: Body of its skeleton.
            tensors: Its tensors, in the order of the body.
        """
        self.num_misses += 1
        # Learning takes as long as writing three samples. So it skips the first sample, which may be the only one or an
        # exception, and becomes rarer with each further miss.
        if self.num_misses > 1 and self.num_misses.bit_count() == 1:
            self.form = _learn_form(sample, body, tensors)
        elif self.num_misses > _MAX_MISSES:
            self.form = None


_FAMILIES: dict[tuple[Any, ...], Family] = {}


def family_of(sample: Any) -> Family | None:
    """Return the family of a sample; None if it cannot have a template."""
    cls = type(sample)
    if cls is dict:
        key = tuple(sample)
        if not TEXTS.issuperset(map(type, key)):
            return None
    elif cls is list or cls is tuple:
        key = (cls, len(sample))
    else:
        return None
    family = _FAMILIES.get(key)
    if family is None and len(sample) < MAX_PARTS:
        if len(_FAMILIES) >= _MAX_FAMILIES:
            _FAMILIES.clear()
        family = _FAMILIES.setdefault(key, Family())
    return family


def _learn_form(sample: Any, body: bytes, tensors: list[StorableTensor]) -> _Form | None:
    template = learn(sample, body)
    written = None if template is None else template.write(sample)
    # Another thread may have changed the sample after `body` was written.
    if template is None or written is None or written[0] != body:
        return None
    parts = written[1]
    pairs = zip(template.tensors, tensors, strict=True)
    wide_first = sorted(pairs, key=lambda pair: pair[1].true.itemsize, reverse=True)
    return _Form(
        template=template,
        select_tensors=item_getter([position for position, _ in wide_first]),
        tensors=tuple([(type(parts[n]), t.name, t.true, _plain_dtype(parts[n], t.true)) for n, t in wide_first]),
        references=tuple([tensor.reference for _, tensor in wide_first]),
    )


def _plain_dtype(tensor: Any, true: TrueDtype) -> torch.dtype | None:
    is_plain = type(tensor) is torch.Tensor and tensor.dtype in PLAIN and TORCH_TRUE[tensor.dtype] == true
    return tensor.dtype if is_plain else None
