"""The data of a page, from ordinary, hostile, damaged and empty caches."""

from __future__ import annotations

import base64
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.inspecting.caches import EVIL, write_hostile, write_photos
from wds_tensorcache.inspecting.report.cards import Limits, make_card, text_of_sample
from wds_tensorcache.inspecting.report.data import cards_of, file_limits, overview
from wds_tensorcache.inspecting.report.page import as_json, build_page
from wds_tensorcache.inspecting.report.structure import structure_of
from wds_tensorcache.inspecting.report.survey import MAX_TENSORS, Survey
from wds_tensorcache.inspecting.report.texts import cut, num_stored, number, visible, words
from wds_tensorcache.inspecting.values import measure


def _report(cache: Any) -> tuple[Survey, dict[str, Any]]:
    survey = Survey(cache, range(len(cache)))
    report = overview(survey, "title")
    report["samples"] = cards_of(survey, range(len(cache)), file_limits(survey, len(cache)))
    return survey, report


def _embedded(page: bytes) -> Any:
    """Return the data in a page, as an HTML parser finds it: up to the first end of a script element."""
    text = page.decode("utf-8")
    begin = text.index('<script type="application/json" id="report">')
    return json.loads(text[text.index(">", begin) + 1 : text.index("</script", begin)])


def test_the_cache_is_described(tmp_path: Path) -> None:
    write_photos(tmp_path)
    with tc.open(tmp_path) as cache:
        _, report = _report(cache)
        assert (report["num_samples"], report["num_shards"], report["num_examined"]) == (40, 3, 40)
        assert report["file_nbytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
        assert report["nbytes"] == cache.describe().nbytes
        assert report["fingerprint"] == [["model", "flux"]]
        assert [shard[2] for shard in report["shards"]] == [16, 16, 8]
        latent, text = report["tensors"]
        assert (latent["name"], latent["dtype"], latent["shape"]) == ("latent", "bfloat16", "[16, 16, 16]")
        assert (text["name"], text["shape"], text["num_shapes"]) == ("text.states", "[3..7, 32]", 5)
        assert dict(map(tuple, text["shapes"])) == {f"[{n}, 32]": 8 for n in range(3, 8)}
        assert latent["stats"]["num_nan"] == 3
        assert (
            sum(latent["stats"]["histogram"]["counts"]) + latent["stats"]["histogram"]["num_outside"] == 40 * 4096 - 3
        )
        tree = report["structure"]
        assert [(each["name"], each["types"]) for each in tree["children"]] == [
            ("latent", ["tensor"]),
            ("text", ["dict"]),
            ("prompt", ["str"]),
            ("size", ["tuple"]),
        ]
        assert tree["children"][1]["children"][0]["tensor"] == "text.states"
        assert tree["children"][2]["example"] == "a harbor at dawn, number 0"


def test_samples_have_texts_pictures_and_marks(tmp_path: Path) -> None:
    write_photos(tmp_path)
    with tc.open(tmp_path) as cache:
        survey, report = _report(cache)
        assert report["num_marked"] == 2
        marks = {
            card["number"]: [mark["short"] for mark in card["marks"]] for card in report["samples"] if card["marks"]
        }
        assert marks[7] == ["3 NaN"]
        assert "unusual std" in marks[11]
        assert set(marks) == {7, 11}
        card = report["samples"][13]
        assert (card["key"], card["text"], card["text_name"]) == (
            "photo-00013",
            "a fox in the snow, number 13",
            "prompt",
        )
        assert card["values"] == [["size", "(128, 128)"]]
        assert [(each["tensor"], each["kind"], each["width"]) for each in card["pictures"]] == [
            (0, "picture", 16),
            (1, "map", 32),
        ]
        assert base64.b64decode(card["pictures"][0]["png"]).startswith(b"\x89PNG")
        expected = measure(cache[13]["latent"])
        assert expected is not None
        stats = card["tensors"][0][3]
        assert (stats["min"], stats["num_nan"]) == (number(float(expected.min or 0)), 0)
        # a sample that was not examined is shown alike
        partial = Survey(cache, range(0, 40, 2))
        assert "unusual std" in [mark.short for mark in partial.marks(partial.measure(tc.flatten(cache[11])))]
        assert make_card(partial, 7, file_limits(survey, 40))["marks"][0]["short"] == "3 NaN"


def test_constant_tensors_are_marked_where_they_are_rare(tmp_path: Path) -> None:
    with tc.ShardWriter(f"{tmp_path}/%05d.tar") as sink:
        for i in range(30):
            sink.write(
                f"{i}",
                {"latent": torch.randn(4, 8, 8) * (i != 5), "ones": torch.ones(8, 8), "size": torch.tensor([i] * 20)},
            )
    with tc.open(tmp_path) as cache:
        survey, _ = _report(cache)
        assert {
            at: [mark.short for mark in found] for at in range(30) if (found := survey.marks(survey.values[at]))
        } == {5: ["constant"]}


def test_hostile_content_stays_text(tmp_path: Path) -> None:
    write_hostile(tmp_path)
    with tc.open(tmp_path) as cache:
        survey, report = _report(cache)
        page = build_page(report)
        embedded = _embedded(page)
    assert embedded == json.loads(json.dumps(report | {"mode": "file"}))
    assert len(page) < 2_000_000
    # each script element is the page's own
    assert page.lower().count(b"<script") == page.lower().count(b"</script") == 2
    assert b"\0" not in page
    assert (
        page.count(b"{{") == page.count(b"}}") == 0 or b"{{report}}" in page
    )  # a text of a sample, not a place of the page
    assert not re.search("[\u202a-\u202e\u2066-\u2069\ud800-\udfff\x1b]", json.dumps(embedded, ensure_ascii=False))
    by_key = {card["key"]: card for card in embedded["samples"]}
    assert visible(EVIL) in {card["text"] for card in embedded["samples"]}
    assert by_key["none"]["tensors"] == []
    assert by_key["text"]["text"] == "\\u202eשלם\\u202c <b>"
    assert by_key["video"]["text"] == "\ufffd</script> a caption"
    assert by_key["large"]["marks"] == [{"short": "1,024 NaN", "text": "t: 1,024 of 1,024 numbers are NaN"}]
    assert [mark["short"] for mark in by_key["inf"]["marks"]] == ["1,024 Inf", "1 Inf"]
    assert len(by_key["dtypes"]["tensors"]) == len(cache_dtypes(by_key)) == len(set(cache_dtypes(by_key)))
    assert by_key["many"]["num_more"] == 10_000 - len(by_key["many"]["tensors"])
    assert embedded["num_tensors"] > 10_000
    assert len(embedded["tensors"]) == MAX_TENSORS
    assert not survey.errors


def cache_dtypes(by_key: dict[str, Any]) -> list[str]:
    return [row[1] for row in by_key["dtypes"]["tensors"]]


def test_a_thousand_samples_fit_in_ten_megabytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with tc.ShardWriter(f"{tmp_path}/%05d.tar") as sink:
        for i in range(1000):
            # noise compresses least, and Chinese takes most bytes
            small = {f"tensor {n}": torch.randn(20) for n in range(20)}
            latent = torch.randn(16, 32, 32, dtype=torch.bfloat16)
            sink.write(f"{i:05d}", {"latent": latent, "prompt": "山水" * 2000, "name": "<>" * 500, **small})
    with tc.open(tmp_path) as cache:
        _, report = _report(cache)
        page = build_page(report)
    assert len(report["samples"]) == 1000
    assert all(card["pictures"] for card in report["samples"])
    assert 7_000_000 < len(page) < 10_000_000


def test_damaged_samples_are_shown_as_such(tmp_path: Path) -> None:
    write_photos(tmp_path)
    shard = tmp_path / "train-00001.tar"
    with tc.open(tmp_path) as cache:
        key = cache.keys()[20]
    content = shard.read_bytes()
    at = content.index(b"photo-00020.skel.pyd") + 512
    shard.write_bytes(content[:at] + b"\xff" * 64 + content[at + 64 :])
    with tc.open(tmp_path) as cache:
        survey, report = _report(cache)
    assert list(survey.errors) == [20]
    card = report["samples"][20]
    assert card["key"] == key
    assert card["error"]
    assert card["marks"][0]["short"] == "damaged"
    assert report["num_examined"] == 39
    assert "1 of the examined samples" in report["notes"][0]
    assert report["samples"][21]["pictures"]


def test_caches_without_samples(tmp_path: Path) -> None:
    write_photos(tmp_path)
    with tc.open(tmp_path) as cache:
        _, report = _report(cache[:0])
    assert (report["num_samples"], report["tensors"], report["samples"], report["sample_sizes"]) == (0, [], [], None)
    assert _embedded(build_page(report))["num_samples"] == 0


def test_memory_is_bounded(tmp_path: Path) -> None:
    with tc.ShardWriter(f"{tmp_path}/%05d.tar") as sink:
        for i in range(8):
            sink.write(f"{i}", {"big": torch.zeros(4_000_000 + i)})
    with tc.open(tmp_path) as cache:
        tracemalloc.start()
        _report(cache)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 100_000_000  # of 128 MB


def test_search_texts(tmp_path: Path) -> None:
    write_photos(tmp_path)
    with tc.open(tmp_path) as cache:
        survey = Survey(cache, range(4))
        text = text_of_sample(survey, 13, 1000)
        assert "photo-00013" in text
        assert "a fox in the snow, number 13" in text
        assert "(128, 128)" in text
        card = make_card(survey, 13, Limits(10, 0, 8, 1000, 0))
        assert (card["text"], card["pictures"], card["tensors"], card["num_more"]) == ("a fox i…", [], [], 2)


def test_structures_that_differ() -> None:
    skeleton, tensors = tc.encode_sample({"a": [torch.zeros(2)] * 20, "b": {"c": torch.zeros(1)}})
    other = tc.decode_sample(*tc.encode_sample({"b": None, 5: "x"}))
    found = structure_of([tc.decode_sample(skeleton, tensors), other])
    a, b, five = found["children"]
    assert (a["name"], a["num_samples"], len(a["children"]), a["num_more"]) == ("a", 1, 8, 12)
    assert (b["types"], b["num_samples"]) == (["dict", "None"], 2)
    assert (five["name"], five["example"]) == ("5", "x")


def test_words() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert words(cycle) == "[[[[[…]]]]]"
    assert words("a\nb\tc\0") == "a\nb\tc\\x00"
    assert words((1,)) == "(1,)"
    assert words({"k": {1}}) == "{'k': {1}}"
    assert words(b"\xff") == "b'\\xff'"
    assert words(10**5000) == "an int of 16,610 bits"
    assert len(words(["x" * 50] * 1000)) < 400
    assert len(words("x" * 10**6)) == 201


@pytest.mark.parametrize("text", ["", "a" * 50, "山" * 50, "<" * 50, "a\n" * 50, "🌊" * 30, "é<" * 20], ids=repr)
def test_cuts(text: str) -> None:
    assert num_stored(text) <= len(as_json(text).encode()) - 2
    for nbytes in (0, 3, 4, 10, 49, 50, 1000):
        found = cut(text, nbytes)
        assert len(as_json(found).encode()) - 2 <= max(nbytes, 3)
        assert found == text or (found.endswith("…") and text.startswith(found[:-1]))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1),
        (1.0, 1),
        (0.1 + 0.2, 0.3),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (2**60, "1.15292e+18"),
        (-3, -3),
    ],
)
def test_numbers(value: float, expected: Any) -> None:
    assert number(value) == expected
    assert type(number(value)) is type(expected)


def test_json_ends_no_element() -> None:
    text = as_json({"<": "</script><!-- \u2028 \ud800 &"})
    assert not set("<>&\u2028\ud800") & set(text)
    assert json.loads(text) == {"<": "</script><!-- \u2028 \ud800 &"}
    with pytest.raises(ValueError, match="JSON"):
        as_json(float("nan"))
