"""Pictures of tensors in a page: which planes are drawn, their colors, and files within their bound."""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.inspecting.caches import view
from wds_tensorcache.inspecting.plane import NOT_FINITE, fit_colors, shrink
from wds_tensorcache.inspecting.report.png import encode_png, fit_png, paint

Image = pytest.importorskip("PIL.Image")


def _decode(png: bytes) -> Any:
    with Image.open(io.BytesIO(png)) as image:
        image.verify()
    return np.asarray(Image.open(io.BytesIO(png)))


def _draw(folder: Path, *samples: dict[str, Any]) -> list[dict[str, tuple[Any, dict[str, Any]]]]:
    """Return the pixels and the records of the pictures in the page of a cache, for each sample by name."""
    with tc.ShardWriter(folder / "0.tar", fsync=False) as sink:
        for i, sample in enumerate(samples):
            sink.write(f"{i}", sample)
    report, _ = view(folder)
    names = [tensor["name"] for tensor in report["tensors"]]
    return [
        {names[one["tensor"]]: (_decode(base64.b64decode(one["png"])), one) for one in card["pictures"]}
        for card in report["samples"]
    ]


@pytest.mark.parametrize("shape", [(1, 1), (1, 7, 3), (9, 1), (17, 5, 3), (300, 300), (64, 48, 3)], ids=str)
def test_png_has_the_same_pixels(shape: tuple[int, ...]) -> None:
    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert np.array_equal(_decode(encode_png(picture)), picture)
    smooth = np.broadcast_to(np.arange(shape[1], dtype=np.uint8).reshape(1, -1, *[1] * (len(shape) - 2)), shape)
    assert np.array_equal(_decode(encode_png(smooth)), smooth)
    few = _decode(encode_png(picture, 32))
    assert len(np.unique(few)) <= 32
    assert np.abs(few.astype(int) - picture).max() <= 5


_U8 = np.dtype(np.uint8)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "expected"),
    [
        ("latent", torch.bfloat16, (16, 24, 16), ("picture", 16, 24, "16 channels as colors")),
        ("latent", torch.float32, (1, 4, 8, 8), ("picture", 8, 8, "4 channels as colors")),
        ("image", torch.uint8, (3, 20, 30), ("picture", 30, 20, "")),
        ("image", _U8, (20, 30, 3), ("picture", 30, 20, "")),
        ("image", _U8, (20, 30, 4), ("picture", 30, 20, "")),
        ("video", torch.float16, (16, 9, 8, 8), ("picture", 8, 8, "frame 5 of 9, 16 channels as colors")),
        ("latents", torch.float32, (16, 1, 8, 8), ("picture", 8, 8, "16 channels as colors")),
        ("x", torch.float16, (1, 16, 9, 8, 8), ("picture", 8, 8, "frame 5 of 9, 16 channels as colors")),
        (
            "x",
            torch.float32,
            (8, 32, 32),
            ("picture", 32, 32, "first 4 of 8 channels: the means, 4 channels as colors"),
        ),
        ("moments", torch.float32, (6, 8, 8), ("picture", 8, 8, "first 3 of 6 channels: the means")),
        ("alpha_mask", torch.float32, (64, 64), ("picture", 64, 64, "")),
        ("mask", torch.bool, (1, 64, 64), ("picture", 64, 64, "")),
        ("text", torch.bfloat16, (77, 2048), ("map", 128, 48, "")),
        ("text", torch.complex64, (1, 7, 9), ("map", 9, 7, "")),
        ("x", torch.float32, (40, 12, 256), ("map", 128, 12, "the first of 40 planes")),
        ("x", torch.float32, (2, 2, 2, 2, 2), ("map", 2, 2, "the first of 8 planes")),
        ("x", torch.float32, (1000, 8, 8), ("map", 8, 8, "the first of 1,000 planes")),
        *((("latent", torch.float32, shape, None)) for shape in [(768,), (), (0, 8, 8), (3, 0, 8), (1, 1)]),
        ("latent", torch.uint8, (1 << 14, (1 << 12) + 1), None),
        ("latent", np.dtype("<U4"), (8, 8), None),
        ("latent", np.dtype("datetime64[s]"), (8, 8), None),
    ],
    ids=str,
)
def test_planes(tmp_path: Path, name: str, dtype: Any, shape: tuple[int, ...], expected: Any) -> None:
    if isinstance(dtype, torch.dtype):
        value: Any = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    else:
        value = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    (pictures,) = _draw(tmp_path, {name: value})
    if expected is None:
        assert not pictures
    else:
        pixels, record = pictures[name]
        assert (record["kind"], record["width"], record["height"], record["note"]) == expected
        assert pixels.shape[:2] == (record["height"], record["width"])


def test_images_keep_their_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    frames = torch.from_numpy(pixels).permute(2, 0, 1)[:, None].repeat(1, 3, 1, 1)
    frames[:, [0, 2]] = 0
    other = np.zeros_like(pixels)  # colors are those of all samples
    drawn, _ = _draw(tmp_path, {"rows": pixels, "video": frames}, {"rows": other, "video": frames})
    assert np.array_equal(drawn["rows"][0], pixels)
    assert np.array_equal(drawn["video"][0], pixels)


def test_the_first_component_is_brightness() -> None:
    random = np.random.default_rng(0)
    light = random.random((40, 40)) ** 4
    weights = random.normal(size=16)
    latent = (weights[:, None, None] * light + 0.01 * random.normal(size=(16, 40, 40))).astype(np.float32)
    for planes in (latent, -latent):  # the colors do not depend on the sign
        gray = paint(planes, fit_colors([planes]), "picture").astype(float).mean(-1)
        assert np.corrcoef(gray.ravel(), light.ravel())[0, 1] > 0.9


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("kind", ["picture", "map"])
def test_numbers_that_are_not_finite_are_red(channels: int, kind: str) -> None:
    planes = np.random.default_rng(0).normal(size=(channels, 8, 8)).astype(np.float32)
    planes[0, 2, 3], planes[-1, 4, 5] = np.nan, -np.inf
    is_bad = (paint(planes, fit_colors([planes]), kind) == NOT_FINITE).all(-1)
    assert np.argwhere(is_bad).tolist() == [[2, 3], [4, 5]]
    for value in (np.nan, np.inf, 0.0, 1e30):
        full = np.full((channels, 8, 8), value, np.float32)
        picture = paint(full, fit_colors([full]), kind)
        assert (picture.ndim == 3 and bool((picture == NOT_FINITE).all())) == (not np.isfinite(value))


@pytest.mark.parametrize("max_nbytes", [900, 4000, 20_000])
def test_pictures_fit(max_nbytes: int) -> None:
    noise = np.random.default_rng(0).normal(size=(16, 96, 64)).astype(np.float32)
    png, width, height = fit_png(noise, fit_colors([noise]), "picture", 256, max_nbytes)
    assert len(png) <= max_nbytes
    assert _decode(png).shape == (height, width, 3)
    assert abs(height / width - 1.5) < 0.2
    if max_nbytes == 20_000:
        assert (width, height) == (64, 96)


def test_shrinking_takes_means() -> None:
    planes = np.arange(2 * 8 * 8, dtype=np.float32).reshape(2, 8, 8)
    assert np.array_equal(shrink(planes, 4, 4), planes.reshape(2, 4, 2, 4, 2).mean((2, 4)))
    assert shrink(planes, 10, 10) is planes
    planes[0, 0, 0] = np.nan
    assert np.isnan(shrink(planes, 4, 4)).sum() == 1
