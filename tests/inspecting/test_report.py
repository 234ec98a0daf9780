"""The data of a page, from ordinary, hostile, damaged and empty caches."""

from __future__ import annotations

import base64
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.command import json_of
from tests.hostile.pickles import little_memory
from tests.inspecting.caches import EVIL, view, write_hostile, write_photos
from tests.reading.batches import write


def test_the_cache_is_described(tmp_path: Path) -> None:
    write_photos(tmp_path)
    report, _, _ = view(tmp_path)
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
    assert (report["sample_sizes"]["low"], report["sample_sizes"]["high"]) == (8384, 8640)
    assert stats["tensors"][0]["not_finite"] == ["photo-00007"]


def test_samples_have_texts_pictures_and_marks(tmp_path: Path) -> None:
    write_photos(tmp_path)
    report, _, _ = view(tmp_path)
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
    assert (stats["min"], stats["num_nan"]) == (pytest.approx(latent["values"]["min"], rel=1e-5), 0)


def _picture(kind: str, size: tuple[int, int], mode: str = "RGB", color: int = 0, **options: Any) -> bytes:
    image = pytest.importorskip("PIL.Image")
    image.new(mode, size, color).save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def _open_picture(shown: dict[str, Any]) -> Any:
    return pytest.importorskip("PIL.Image").open(io.BytesIO(base64.b64decode(shown["jpeg"])))


def test_captions_and_pictures_in_other_members(tmp_path: Path) -> None:
    captions = ["a fox", "a fox\nin the snow", "animal"]
    members = [{"jpg": _picture("JPEG", (600, 300))}, {"png": _picture("PNG", (20, 30))}, {"jpg": b"no picture"}]
    members += [{"png": _picture("PNG", (8000, 8000), "1")}]  # as RGB, it would take 192 MB
    decoded = ({".jpg": (256, 128)}, {".png": (20, 30)}, {".jpg": None}, {".png": None})
    samples = [{"prompt": captions, "more captions": more, "x": torch.zeros(2)} for more in ("one text", captions)]
    write(tmp_path, samples * 2, lambda i: {"digest.txt": "1", **members[i]})
    report, _, _ = view(tmp_path)
    assert dict(map(tuple, report["members"])) == {"jpg": 2, "png": 2}  # not the digests of `tc.build`
    for card, sizes in zip(report["samples"], decoded, strict=True):
        assert (card["is_list"], card["text"].split("\n")) == (True, ["a fox", "a fox in the snow", "animal"])
        assert dict(map(tuple, card["values"]))["more captions"] == ("one text", repr(captions))[card["number"] % 2]
        (shown,) = card["pictures"]
        if (size := sizes[shown["member"]]) is None:
            assert shown["error"] == "cannot be decoded"
        else:
            opened = _open_picture(shown)
            assert (opened.format, opened.size, (shown["width"], shown["height"])) == ("JPEG", size, size)
        assert not card["error"]


def test_pictures_of_strangers(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    exif = image.Exif()
    exif[0x112] = 6  # the picture lies on its side
    cases: list[tuple[dict[str, bytes], str, tuple[int, int] | None, int]] = [
        ({"jpg": _picture("JPEG", (60, 30), exif=exif)}, ".jpg", (30, 60), 0),
        ({"jpg": _picture("JPEG", (60, 30), comment=b"a secret" * 8000)}, ".jpg", (60, 30), 0),
        ({"png": _picture("PNG", (60, 30), "I;16", 0x8000)}, ".png", (60, 30), 0x80),
        ({"png": _picture("PNG", (60, 30), "I;16", 0x8000, exif=exif)}, ".png", (30, 60), 0x80),
        # other formats are not decoded, whatever their names
        ({"jpg": _picture("TIFF", (60, 30))}, ".jpg", None, 0),
        ({"png": b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>'}, ".png", None, 0),
    ]
    samples = [{"latent": torch.zeros(4, 16, 16)}] * 200
    write(tmp_path, samples, lambda i: cases[i % len(cases)][0], max_samples=200)
    report, page, _ = view(tmp_path)
    assert len(page) < 2_000_000
    for card, (_, member, size, level) in zip(report["samples"], cases, strict=False):
        latent, photo = card["pictures"]
        assert (latent["tensor"], photo["member"]) == (0, member)
        if size is None:
            assert photo["error"] == "cannot be decoded"
        else:
            assert (photo["width"], photo["height"]) == size
            assert b"secret" not in base64.b64decode(photo["jpeg"])
            assert abs(_open_picture(photo).getpixel((5, 5))[0] - level) < 3


def test_constant_tensors_are_marked_where_they_are_rare(tmp_path: Path) -> None:
    latents = [torch.randn(4, 8, 8) * (i != 5) for i in range(30)]
    ones = torch.ones(8, 8)
    write(tmp_path, [{"latent": x, "ones": ones, "size": torch.tensor([i] * 20)} for i, x in enumerate(latents)])
    marks = {card["number"]: card["marks"] for card in view(tmp_path)[0]["samples"] if card["marks"]}
    assert [(index, mark["short"]) for index, of_sample in marks.items() for mark in of_sample] == [(5, "constant")]


def test_hostile_content_stays_text(tmp_path: Path) -> None:
    write_hostile(tmp_path)
    report, page, _ = view(tmp_path)
    assert len(page) < 2_000_000
    # each script element is the page's own
    assert page.lower().count(b"<script") == page.lower().count(b"</script") == 2
    assert b"\0" not in page
    # a text of a sample, not a place of the page
    assert b"{{report}}" in page
    assert not re.search("[\u202a-\u202e\u2066-\u2069\ud800-\udfff\x1b]", json.dumps(report, ensure_ascii=False))
    by_key = {card["key"]: card for card in report["samples"]}
    escapes = {ord(char): repr(char)[1:-1] for char in "\0\x1b\r\u202e\u2066\ud800"}
    assert EVIL.translate(escapes) in {card["text"] for card in report["samples"]}
    assert by_key["none"]["tensors"] == []
    assert by_key["text"]["text"] == "\\u202eשלם\\u202c <b>"
    assert by_key["video"]["text"] == "\ufffd</script> a caption"
    assert by_key["large"]["marks"] == [{"short": "1,024 NaN", "text": "t: 1,024 of 1,024 numbers are NaN"}]
    assert [mark["short"] for mark in by_key["inf"]["marks"]] == ["1,024 Inf", "1 Inf"]
    dtypes = [dtype for _, dtype, _, _ in by_key["dtypes"]["tensors"]]
    assert len(dtypes) == len(set(dtypes)) > 10
    assert by_key["many"]["num_more"] == 3000 - len(by_key["many"]["tensors"])
    assert report["num_tensors"] > 3000
    assert len(report["tensors"]) == 300
    assert not any(card["error"] for card in report["samples"])


@pytest.mark.long
def test_a_thousand_samples_fit_in_ten_megabytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # noise compresses least, and Chinese takes most bytes
    texts = {"prompt": "山水" * 2000, "name": "<>" * 500}
    smalls = [{f"tensor {n}": torch.randn(20) for n in range(20)} for _ in range(1000)]
    samples = [{"latent": torch.randn(16, 32, 32).bfloat16(), **texts, **small} for small in smalls]
    write(tmp_path, samples, max_samples=1000)
    report, page, _ = view(tmp_path)
    assert len(report["samples"]) == 1000
    assert all(card["pictures"] for card in report["samples"])
    assert 7_000_000 < len(page) < 10_000_000


def test_damaged_samples_are_shown_as_such(tmp_path: Path) -> None:
    write_photos(tmp_path)
    shard = tmp_path / "train-00001.tar"
    content = shard.read_bytes()
    at = content.index(b"photo-00020.skel.pyd") + 512
    shard.write_bytes(content[:at] + b"\xff" * 64 + content[at + 64 :])
    report, _, messages = view(tmp_path, status=1)
    assert "sample 20 cannot be read" in messages
    card = report["samples"][20]
    assert (card["key"], card["marks"][0]["short"]) == ("photo-00020", "damaged")
    assert card["error"]
    assert report["num_examined"] == 39
    assert "1 of the examined samples" in report["notes"][0]
    assert report["samples"][21]["pictures"]
    shard.write_bytes(bytes(range(256)) * (len(content) // 256))
    report, _, _ = view(tmp_path, status=1)
    assert [card["number"] for card in report["samples"] if card["error"]] == list(range(16, 32))


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions = ["x" * 1_000_000] * 400  # one object
    samples = {f"{i}": {"big": torch.zeros(4_000_000 + i), "captions": captions} for i in range(8)}
    write(f"{tmp_path}/%05d.tar", samples)
    monkeypatch.setattr(sys, "argv", ["tensorcache", "view", str(tmp_path), "-o", str(tmp_path / "page.html")])
    with little_memory(100_000_000), pytest.raises(SystemExit, match="0"):  # of 128 MB, and of 400 MB
        runpy.run_module("wds_tensorcache.cli", run_name="__main__")


def test_values_as_text(tmp_path: Path) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    values = {"cycle": cycle, "text": "a\nb\tc\0", "one": (1,), "set": [{1}], "bytes": b"\xff", "int": 10**5000}
    write(f"{tmp_path}/%05d.tar", {"a": values | {"prompt": "x" * 10**5}})
    (card,) = view(tmp_path)[0]["samples"]
    assert len(card["text"]) == 8000 - 2
    write(f"{tmp_path}/%05d.tar", {"a": values | {"prompt": "x"}}, overwrite=True)
    (card,) = view(tmp_path)[0]["samples"]
    shown = {"cycle": "[[[[[…]]]]]", "text": "a\nb\tc\\x00", "one": "(1,)", "set": "[{1}]", "bytes": "b'\\xff'"}
    assert dict(card["values"]) == shown | {"int": "an int of 16,610 bits"}
