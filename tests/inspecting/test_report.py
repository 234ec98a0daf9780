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
from tests.cli.command import json_of
from tests.inspecting.caches import EVIL, embedded, view, write_hostile, write_photos
from wds_tensorcache.inspecting.report.cards import Limits, make_card, text_of_sample
from wds_tensorcache.inspecting.report.data import overview
from wds_tensorcache.inspecting.report.page import build_page
from wds_tensorcache.inspecting.survey import Survey
from wds_tensorcache.inspecting.text import as_json, cut, escape_hidden, json_number, page_text


def test_the_cache_is_described(tmp_path: Path) -> None:
    write_photos(tmp_path)
    report, _ = view(tmp_path)
    assert (report["num_samples"], report["num_shards"], report["num_examined"]) == (40, 3, 40)
    assert report["file_nbytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    assert report["fingerprint"] == [["model", "flux"]]
    assert [shard[2] for shard in report["shards"]] == [16, 16, 8]
    latent, text = report["tensors"]
    assert (latent["name"], latent["dtype"], latent["shape"]) == ("latent", "bfloat16", "[16, 16, 16]")
    assert (text["name"], text["shape"], text["num_shapes"]) == ("text.states", "[3..7, 32]", 5)
    assert dict(map(tuple, text["shapes"])) == {f"[{n}, 32]": 8 for n in range(3, 8)}
    tree = report["structure"]
    assert [(node["name"], node["text"], node["types"]) for node in tree["children"]] == [
        ("latent", "bf16[16, 16, 16]", ["tensor"]),
        ("text", "dict of 1", ["dict"]),
        ("prompt", "'a harbor at dawn, number 0'", ["str"]),
        ("size", "(128, 128)", ["tuple"]),
    ]
    assert tree["children"][1]["children"][0]["text"] == "f16[3..7, 32]"
    # `stats` has the same numbers
    stats = json_of("stats", tmp_path)
    assert report["nbytes"] == stats["nbytes"]
    for shown, tensor in zip(report["tensors"], stats["tensors"], strict=True):
        values, histogram = tensor["values"], tensor["values"]["histogram"]
        for name in ("num_nan", "num_inf", "min", "max", "mean", "std"):
            assert shown["stats"][name] == pytest.approx(values[name], rel=1e-5)
        assert shown["stats"]["histogram"]["counts"] == histogram["counts"]
        assert shown["stats"]["histogram"]["num_outside"] == histogram["num_below"] + histogram["num_above"]
    assert report["sample_sizes"]["counts"] == stats["sample_nbytes"]["histogram"]["counts"]
    assert stats["tensors"][0]["not_finite"] == ["photo-00007"]


def test_samples_have_texts_pictures_and_marks(tmp_path: Path) -> None:
    write_photos(tmp_path)
    report, _ = view(tmp_path)
    assert report["num_marked"] == 2
    marks = {card["number"]: [mark["short"] for mark in card["marks"]] for card in report["samples"] if card["marks"]}
    assert set(marks) == {7, 11}
    assert marks[7] == ["3 NaN"]
    assert "unusual std" in marks[11]
    card = report["samples"][13]
    assert (card["key"], card["text"], card["text_name"]) == ("photo-00013", "a fox in the snow, number 13", "prompt")
    assert card["values"] == [["size", "(128, 128)"]]
    pictures = [(image["tensor"], image["kind"], image["width"]) for image in card["pictures"]]
    assert pictures == [(0, "picture", 16), (1, "map", 32)]
    assert base64.b64decode(card["pictures"][0]["png"]).startswith(b"\x89PNG")
    (latent, _) = json_of("show", tmp_path, "photo-00013")["tensors"]
    stats = card["tensors"][0][3]
    assert (stats["min"], stats["num_nan"]) == (json_number(latent["values"]["min"]), 0)
    with tc.open(tmp_path) as cache:
        # samples that were not examined are shown alike
        survey, limits = Survey(cache, range(0, 40, 2), for_page=True), Limits(1000, 0, 8, 1000, 2)
        for index in (7, 11):
            assert [mark["short"] for mark in make_card(survey, index, limits)["marks"]] == marks[index]
        text = text_of_sample(survey, 13, 1000)
        assert all(part in text for part in ("photo-00013", "a fox in the snow, number 13", "(128, 128)"))
        card = make_card(survey, 13, Limits(10, 0, 8, 1000, 0))
        assert (card["text"], card["pictures"], card["tensors"], card["num_more"]) == ("a fox i…", [], [], 2)


def test_constant_tensors_are_marked_where_they_are_rare(tmp_path: Path) -> None:
    with tc.ShardWriter(f"{tmp_path}/%05d.tar") as sink:
        for i in range(30):
            latent, size = torch.randn(4, 8, 8) * (i != 5), torch.tensor([i] * 20)
            sink.write(f"{i}", {"latent": latent, "ones": torch.ones(8, 8), "size": size})
    marks = {card["number"]: card["marks"] for card in view(tmp_path)[0]["samples"] if card["marks"]}
    assert [(index, mark["short"]) for index, of_sample in marks.items() for mark in of_sample] == [(5, "constant")]


def test_hostile_content_stays_text(tmp_path: Path) -> None:
    write_hostile(tmp_path)
    report, page = view(tmp_path)
    assert len(page) < 2_000_000
    # each script element is the page's own
    assert page.lower().count(b"<script") == page.lower().count(b"</script") == 2
    assert b"\0" not in page
    # a text of a sample, not a place of the page
    assert b"{{report}}" in page
    assert not re.search("[\u202a-\u202e\u2066-\u2069\ud800-\udfff\x1b]", json.dumps(report, ensure_ascii=False))
    by_key = {card["key"]: card for card in report["samples"]}
    assert escape_hidden(EVIL) in {card["text"] for card in report["samples"]}
    assert by_key["none"]["tensors"] == []
    assert by_key["text"]["text"] == "\\u202eשלם\\u202c <b>"
    assert by_key["video"]["text"] == "\ufffd</script> a caption"
    assert by_key["large"]["marks"] == [{"short": "1,024 NaN", "text": "t: 1,024 of 1,024 numbers are NaN"}]
    assert [mark["short"] for mark in by_key["inf"]["marks"]] == ["1,024 Inf", "1 Inf"]
    dtypes = [dtype for _, dtype, _, _ in by_key["dtypes"]["tensors"]]
    assert len(dtypes) == len(set(dtypes)) > 10
    assert by_key["many"]["num_more"] == 10_000 - len(by_key["many"]["tensors"])
    assert report["num_tensors"] > 10_000
    assert len(report["tensors"]) == 300
    assert not any(card["error"] for card in report["samples"])


def test_a_thousand_samples_fit_in_ten_megabytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with tc.ShardWriter(f"{tmp_path}/%05d.tar") as sink:
        for i in range(1000):
            # noise compresses least, and Chinese takes most bytes
            small = {f"tensor {n}": torch.randn(20) for n in range(20)}
            latent = torch.randn(16, 32, 32, dtype=torch.bfloat16)
            sink.write(f"{i:05d}", {"latent": latent, "prompt": "山水" * 2000, "name": "<>" * 500, **small})
    report, page = view(tmp_path)
    assert len(report["samples"]) == 1000
    assert all(card["pictures"] for card in report["samples"])
    assert 7_000_000 < len(page) < 10_000_000


def test_damaged_samples_are_shown_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_photos(tmp_path)
    shard = tmp_path / "train-00001.tar"
    content = shard.read_bytes()
    at = content.index(b"photo-00020.skel.pyd") + 512
    shard.write_bytes(content[:at] + b"\xff" * 64 + content[at + 64 :])
    report, _ = view(tmp_path, status=1)
    assert "sample 20 cannot be read" in capsys.readouterr().err
    card = report["samples"][20]
    assert (card["key"], card["marks"][0]["short"]) == ("photo-00020", "damaged")
    assert card["error"]
    assert report["num_examined"] == 39
    assert "1 of the examined samples" in report["notes"][0]
    assert report["samples"][21]["pictures"]


def test_caches_without_samples(tmp_path: Path) -> None:
    write_photos(tmp_path, 4)
    with tc.open(tmp_path) as cache:
        report = embedded(build_page(overview(Survey(cache[:0], [], for_page=True), "empty")))
    assert (report["num_samples"], report["tensors"], report["samples"]) == (0, [], [])
    assert (report["structure"], report["sample_sizes"]) == (None, None)


def test_memory_is_bounded(tmp_path: Path) -> None:
    with tc.ShardWriter(f"{tmp_path}/%05d.tar") as sink:
        for i in range(8):
            sink.write(f"{i}", {"big": torch.zeros(4_000_000 + i)})
    tracemalloc.start()
    view(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000_000  # of 128 MB


def test_values_as_text() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert page_text(cycle) == "[[[[[…]]]]]"
    assert page_text("a\nb\tc\0") == "a\nb\tc\\x00"
    assert page_text((1,)) == "(1,)"
    assert page_text({"k": {1}}) == "{'k': {1}}"
    assert page_text(b"\xff") == "b'\\xff'"
    assert page_text(10**5000) == "an int of 16,610 bits"
    assert len(page_text(["x" * 50] * 1000)) < 400
    assert len(page_text("x" * 10**6)) == 201


@pytest.mark.parametrize("text", ["", "a" * 50, "山" * 50, "<" * 50, "a\n" * 50, "🌊" * 30, "é<" * 20], ids=repr)
def test_cuts(text: str) -> None:
    for nbytes in (0, 3, 4, 10, 49, 50, 1000):
        found = cut(text, nbytes)
        assert len(as_json(found).encode()) - 2 <= max(nbytes, 3)
        assert found == text or (found.endswith("…") and text.startswith(found[:-1]))
