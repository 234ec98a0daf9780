"""A sample for the page: texts, pictures of tensors, statistics and marks."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import wds_tensorcache as tc
from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tree import flatten
from wds_tensorcache.inspecting.plane import Planes, find_planes
from wds_tensorcache.inspecting.report.png import fit_png
from wds_tensorcache.inspecting.samples_ahead import READ_ERRORS
from wds_tensorcache.inspecting.survey import Survey
from wds_tensorcache.inspecting.text import cut, escape_hidden, json_number, num_stored, page_text, shape_text
from wds_tensorcache.inspecting.tree import small_values
from wds_tensorcache.inspecting.values import ValueStatistics
from wds_tensorcache.integrations.safe_members import shrink_picture

_TEXT_NAMES = [re.compile(pattern, re.IGNORECASE) for pattern in ("prompt", "caption", "text|txt", "label|class|title")]
_TEXT_MEMBERS = "txt", "caption", "cls", "json"
_PICTURE_MEMBERS = "jpg", "jpeg", "png", "webp"
_MAX_VALUES = 200
_NUM_DRAWN = 300  # tensors among which pictures are chosen
_PICTURE_NAMES = re.compile(r"latent|sample|image|video|moment", re.IGNORECASE)
_LATER_PICTURES = re.compile(r"flip|mask|control|cond|clean|ref", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the parts of a sample that the page shows.

    Attributes:
        text_nbytes: Maximum number of bytes of all small values together, as they are encoded in the page.
        num_pictures: Maximum number of pictures.
        picture_side: Maximum of width and height of a picture in pixels.
        picture_nbytes: Approximate limit in bytes for the file of the first picture; each other picture may take half as much.
        num_tensors: Maximum number of tensors whose statistics are listed.
    """

    text_nbytes: int
    num_pictures: int
    picture_side: int
    picture_nbytes: int
    num_tensors: int


def has_photos(survey: Survey) -> bool:
    """Return whether samples have pictures in other members."""
    return not survey.description.members.keys().isdisjoint(_PICTURE_MEMBERS)


def make_card(survey: Survey, index: int, limits: Limits) -> dict[str, Any]:
    """Return a sample for JSON. A sample that cannot be read has a mark, and the error message in `error`."""
    card = _new_card(survey, index) | {"tensors": [], "num_more": 0, "pictures": [], "marks": []}
    try:
        sample = survey.cache[index]
        _add_texts(card, survey, index, sample, limits.text_nbytes)
        lazies = flatten(sample)
        values = survey.samples[index] if index in survey.samples else survey.measure(lazies)
        card["marks"] = [mark._asdict() for mark in survey.marks(values)[:20]]
        names = [name for name in lazies if name in survey.positions][:_NUM_DRAWN]
        for name in names[: limits.num_tensors]:
            shape, dtype = shape_text(lazies[name].shape), dtype_name(lazies[name].dtype)
            card["tensors"].append([survey.positions[name], dtype, shape, values_record(values.get(name))])
        card["num_more"] = len(lazies) - len(card["tensors"])
        sizes = chain([limits.picture_nbytes], repeat(limits.picture_nbytes // 2))
        photos = _open_pictures(survey, index, limits, sizes)
        pictures = _draw(survey, {name: lazies[name] for name in names}, photos, limits, sizes)
        card["pictures"] = list(islice(pictures, limits.num_pictures))
    except READ_ERRORS as exc:
        card["error"] = escape_hidden(str(exc), 500)
    if card["error"]:
        card["marks"] = [{"short": "damaged", "text": card["error"]}, *card["marks"]]
    return card


def text_of_sample(survey: Survey, index: int, max_nbytes: int) -> str:
    """Return a sample's key and small values as one text to search. An unreadable sample has only its key."""
    card = _new_card(survey, index)
    try:
        _add_texts(card, survey, index, survey.cache[index], max_nbytes)
    except READ_ERRORS:
        return str(card["key"])
    return "\n".join([card["key"], card["name"], card["text"], *(text for _, text in card["values"])])


def _new_card(survey: Survey, index: int) -> dict[str, Any]:
    key, error = "", survey.errors.get(index, "")
    try:
        key = escape_hidden(survey.cache.keys()[index])
    except READ_ERRORS as exc:  # the index of its shard cannot be read
        error = error or escape_hidden(str(exc), 500)
    card = {"number": index, "key": key, "error": error}
    return card | {"name": "", "text": "", "text_name": "", "is_list": False, "values": []}


def _add_texts(card: dict[str, Any], survey: Survey, index: int, sample: Any, max_nbytes: int) -> None:
    key = survey.cache.keys()[index]
    original = survey.cache._name_at(index, key)
    card["name"] = "" if original in (None, key) else escape_hidden(str(original), 300)
    pairs = list(islice(_small_values(survey, index, sample), _MAX_VALUES))
    left = max_nbytes
    best = max(pairs, key=lambda pair: _text_rank(*pair), default=("", ""))
    if _text_rank(*best) > (0,):
        text = best[1] if isinstance(best[1], str) else _join_lines(best[1], left + 1)
        card["is_list"] = text is not best[1] and "\n" in text
        card["text"], card["text_name"] = cut(escape_hidden(text, left), left), escape_hidden(best[0], 120)
        left -= num_stored(card["text"])
    for name, value in pairs:
        if value is None or left <= 0 or (name == best[0] and card["text"] and isinstance(value, str)):
            continue
        most = min(left, max(200, max_nbytes // 4))
        card["values"].append([escape_hidden(name, 120), cut(page_text(value, most), most)])
        left -= sum(map(num_stored, card["values"][-1])) + 8


def _join_lines(texts: Iterable[Any], limit: int) -> str:
    """Return the strings among `texts` as lines, at most `limit` characters."""
    # Hazard: a hostile list may contain one long text many times, so a text of all lines would fill the memory.
    lines = ("\n" + text[:limit].replace("\n", " ") for text in texts if isinstance(text, str))
    return "".join(islice(chain.from_iterable(lines), limit + 1))[1:]


def _small_values(survey: Survey, index: int, sample: Any) -> Iterator[tuple[str, Any]]:
    """Yield the small values by path, and text members by suffix."""
    yield from small_values(sample)
    for suffix, content in _read_members(survey, index, _TEXT_MEMBERS):
        yield f".{suffix}", content[: 1 << 20].decode("utf-8", "replace")


def _read_members(survey: Survey, index: int, suffixes: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    for suffix in suffixes:
        if suffix in survey.description.members:
            # not `read_members`: for its message about a missing member, it loads the indexes of all shards
            for content in survey.cache._find_members(survey.cache._request([index]), suffix, [0]).values():
                yield suffix, content


def _text_rank(name: str, value: Any) -> tuple[int, ...]:
    """Rank a value as the text of a sample; `(0,)` rejects it."""
    is_text = isinstance(value, str) or (
        isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in islice(value, 8))
    )
    if not is_text or not value:
        return (0,)
    ranks = [len(_TEXT_NAMES) - at for at, pattern in enumerate(_TEXT_NAMES) if pattern.search(name)]
    return (1, max(ranks, default=0), min(len(value), 1000) if isinstance(value, str) else 0)


def values_record(values: ValueStatistics | None) -> dict[str, Any] | None:
    if values is None:
        return None
    numbers = {name: getattr(values, name) for name in ("num_nan", "num_inf", "min", "max", "mean", "std")}
    return {name: None if number is None else json_number(number) for name, number in numbers.items()}


def _open_pictures(survey: Survey, index: int, limits: Limits, sizes: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield the pictures in other members, with an `error` if they fail."""
    for suffix, content in _read_members(survey, index, _PICTURE_MEMBERS):
        try:
            jpeg, width, height = shrink_picture(content, limits.picture_side, next(sizes))
        except (ImportError, tc.FormatError) as exc:
            error = "needs Pillow" if isinstance(exc, ImportError) else "cannot be decoded"
            yield {"member": f".{suffix}", "error": error}
            continue
        encoded = base64.b64encode(jpeg).decode("ascii")
        place = {"member": f".{suffix}", "kind": "photo", "note": ""}
        yield {**place, "jpeg": encoded, "width": width, "height": height}


def _draw(
    survey: Survey, lazies: dict[str, Lazy], photos: Iterator[dict[str, Any]], limits: Limits, sizes: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """Yield pictures: a latent, photos, further tensors, flips and masks, then maps."""
    drawn: list[tuple[Any, int, str, Lazy, Planes]] = []
    for name, lazy in lazies.items():
        planes = find_planes(name, lazy.dtype, lazy.shape)
        if planes is not None and planes.height > 1 < planes.width:
            is_later, size = bool(_LATER_PICTURES.search(name)), planes.height * planes.width
            rank = planes.kind == "map", is_later, not _PICTURE_NAMES.search(name), -size
            drawn.append((rank, len(drawn), name, lazy, planes))
    for _, _, name, lazy, planes in sorted(drawn)[: limits.num_pictures]:
        if planes.kind == "map":
            yield from photos
        loaded = planes.load(lazy)
        colors = survey.colors_of(name, lazy, planes, loaded)
        png, width, height = fit_png(loaded, colors, planes.kind, limits.picture_side, next(sizes))
        encoded = base64.b64encode(png).decode("ascii")
        place = {"tensor": survey.positions[name], "kind": planes.kind, "note": planes.note}
        yield {**place, "png": encoded, "width": width, "height": height}
        yield from photos
    yield from photos
