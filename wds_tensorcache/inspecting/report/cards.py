"""One sample for the page: its text, small values, pictures of tensors, statistics, and marks."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from wds_tensorcache.codec.dtypes import dtype_name
from wds_tensorcache.codec.lazy import Lazy
from wds_tensorcache.codec.tensor_names import component
from wds_tensorcache.codec.tree import flatten, map_leaves
from wds_tensorcache.inspecting.report.pictures import Planes, fit_png, planes_of
from wds_tensorcache.inspecting.report.survey import READ_ERRORS, Mark, Survey, Values, load_planes
from wds_tensorcache.inspecting.report.texts import cut, num_stored, number, visible, words
from wds_tensorcache.inspecting.values import ValueStatistics
from wds_tensorcache.reading.structure import value_at

_TEXT_NAMES = [re.compile(pattern, re.IGNORECASE) for pattern in ("prompt", "caption", "text|txt", "label|class|title")]
_TEXT_MEMBERS = "txt", "caption", "cls", "json"
_PICTURE_NAMES = re.compile(r"latent|sample|image|video|moment", re.IGNORECASE)
_LATER_PICTURES = re.compile(r"flip|mask|control|cond|clean|ref", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a sample is shown.

    Attributes:
        text_nbytes: Bytes of all small values together, as they are encoded in the page.
        num_pictures: Number of pictures.
        picture_side: Maximum of width and height of a picture in pixels.
        picture_nbytes: Maximum size of the first picture's PNG in bytes; the other pictures may have half of it.
        num_tensors: Number of tensors whose statistics are listed.
    """

    text_nbytes: int
    num_pictures: int
    picture_side: int
    picture_nbytes: int
    num_tensors: int


def make_card(survey: Survey, at: int, limits: Limits) -> dict[str, Any]:
    """Return the sample with index `at` for JSON. A sample that cannot be read has the message in `error`, and a mark."""
    key = survey.cache.keys()[at]
    card: dict[str, Any] = {
        "number": at,
        "key": visible(key),
        "name": _name_of(survey, at, key),
        "text": "",
        "text_name": "",
    }
    card |= {
        "values": [],
        "tensors": [],
        "num_more": 0,
        "pictures": [],
        "marks": [],
        "error": survey.errors.get(at, ""),
    }
    try:
        sample = survey.cache[at]
        _add_values(card, survey, at, sample, limits.text_nbytes)
        lazies = flatten(sample)
        values = survey.values[at] if at in survey.values else survey.measure(lazies)
        card["marks"] = [_mark(mark) for mark in islice(survey.marks(values), 20)]
        shown = [name for name in lazies if name in survey.positions][: limits.num_tensors]
        card["tensors"] = [_tensor_row(survey, name, lazies[name], values) for name in shown]
        card["num_more"] = len(lazies) - len(shown)
        card["pictures"] = list(_pictures(survey, {name: lazies[name] for name in shown}, limits))
    except READ_ERRORS as exc:
        card["error"] = visible(str(exc), 500)
    if card["error"]:
        card["marks"] = [_mark(Mark("damaged", card["error"])), *card["marks"]]
    return card


def text_of_sample(survey: Survey, at: int, max_nbytes: int) -> str:
    """Return the key and the small values of a sample as one text, in which to search. No tensor is read."""
    key = survey.cache.keys()[at]
    card: dict[str, Any] = {"text": "", "values": []}
    try:
        _add_values(card, survey, at, survey.cache[at], max_nbytes)
    except READ_ERRORS:
        return key
    return "\n".join([key, _name_of(survey, at, key), card["text"], *(text for _, text in card["values"])])


def _name_of(survey: Survey, at: int, key: str) -> str:
    try:
        name = survey.cache._name_at(at, key)
    except READ_ERRORS:
        return ""
    return "" if name is None or name == key else visible(name, 300)


def _mark(mark: Mark) -> dict[str, str]:
    return {"short": mark.short, "text": mark.text}


def _add_values(card: dict[str, Any], survey: Survey, at: int, sample: Any, max_nbytes: int) -> None:
    """Add the small values, and the one that is shown as the text of the sample."""
    found: list[tuple[str, Any]] = []

    def leaf(path: tuple[Any, ...]) -> None:
        if len(found) < 200:
            found.append((".".join(_part(step) for step in path), value_at(sample, path)))

    map_leaves(sample, lambda lazy: None, leaf)
    found += list(_member_texts(survey, at))
    text = max(found, key=lambda pair: _text_rank(*pair), default=("", ""))
    left = max_nbytes
    if _text_rank(*text) > (0,):
        written = text[1] if isinstance(text[1], str) else "\n".join(each for each in text[1] if isinstance(each, str))
        card["text"], card["text_name"] = cut(visible(written, left), left), visible(text[0], 120)
        left -= num_stored(card["text"])
    for name, value in found:
        if name == text[0] and card["text"] and isinstance(value, str):
            continue
        if value is not None and left > 0:
            most = min(left, max(200, max_nbytes // 4))
            card["values"].append([visible(name, 120), cut(words(value, most), most)])
            left -= sum(map(num_stored, card["values"][-1])) + 8


def _part(step: Any) -> str:
    return component(step, 0) if type(step) in (str, int) else words(step, 40)


def _text_rank(name: str, value: Any) -> tuple[int, ...]:
    """Return how well a value serves as the text of a sample; `(0,)` if it does not."""
    is_list = (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, str) for each in islice(value, 8))
    )
    if not (isinstance(value, str) and value) and not is_list:
        return (0,)
    ranks = [len(_TEXT_NAMES) - at for at, pattern in enumerate(_TEXT_NAMES) if pattern.search(name)]
    return (1, max(ranks, default=0), min(len(value), 1000) if isinstance(value, str) else 0)


def _member_texts(survey: Survey, at: int) -> Iterator[tuple[str, str]]:
    for suffix in _TEXT_MEMBERS:
        if suffix in survey.description.members:
            try:
                (content,) = survey.cache.read_members([at], suffix)
            except KeyError:
                continue
            yield f".{suffix}", content[: 1 << 20].decode("utf-8", "replace")


def _tensor_row(survey: Survey, name: str, lazy: Lazy, values: Values) -> list[Any]:
    shape = f"[{', '.join(map(str, lazy.shape))}]"
    return [survey.positions[name], dtype_name(lazy.dtype), shape, statistics(values.get(name))]


def statistics(values: ValueStatistics | None) -> dict[str, Any] | None:
    """Return statistics for JSON, without the histogram."""
    if values is None:
        return None
    names = "num_nan", "num_inf", "min", "max", "mean", "std"
    found = ((name, getattr(values, name)) for name in names)
    return {name: None if value is None else number(value) for name, value in found}


def _pictures(survey: Survey, lazies: dict[str, Lazy], limits: Limits) -> Iterator[dict[str, Any]]:
    drawn = [(name, lazy, planes_of(name, lazy.dtype, lazy.shape)) for name, lazy in lazies.items()]
    chosen = [(name, lazy, planes) for name, lazy, planes in drawn if planes is not None]
    chosen.sort(key=lambda each: _picture_rank(each[0], each[2]))
    nbytes = limits.picture_nbytes
    for name, lazy, planes in chosen[: limits.num_pictures]:
        loaded = load_planes(lazy, planes)
        colors = survey.colors_of(name, lazy, planes, loaded)
        png, width, height = fit_png(loaded, colors, planes.kind, limits.picture_side, nbytes)
        encoded = base64.b64encode(png).decode("ascii")
        place = {"tensor": survey.positions[name], "kind": planes.kind, "note": planes.note}
        yield {**place, "png": encoded, "width": width, "height": height}
        nbytes = limits.picture_nbytes // 2


def _picture_rank(name: str, planes: Planes) -> tuple[bool, bool, bool, int]:
    """Return a key that sorts latents before other pictures, and pictures before maps."""
    later = bool(_LATER_PICTURES.search(name))
    return planes.kind == "map", later, not _PICTURE_NAMES.search(name), -planes.height * planes.width
