"""Pictures of tensors: PNG files that Pillow reads alike, planes of every layout, colors, and sizes within their bound."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

from wds_tensorcache.inspecting.report.pictures import encode_png, fit_colors, fit_png, paint, planes_of, shrink

Image = pytest.importorskip("PIL.Image")


def _decoded(png: bytes) -> Any:
    with Image.open(io.BytesIO(png)) as image:
        image.verify()
    return np.asarray(Image.open(io.BytesIO(png)))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7, 3), (9, 1), (17, 5, 3), (300, 300), (64, 48, 3)], ids=str)
def test_png_has_the_same_pixels(shape: tuple[int, ...]) -> None:
    picture = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert np.array_equal(_decoded(encode_png(picture)), picture)
    smooth = np.broadcast_to(np.arange(shape[1], dtype=np.uint8).reshape(1, -1, *[1] * (len(shape) - 2)), shape)
    assert np.array_equal(_decoded(encode_png(smooth)), smooth)
    few = _decoded(encode_png(picture, 32))
    assert len(np.unique(few)) <= 32
    assert np.abs(few.astype(int) - picture).max() <= 5


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "expected"),
    [
        ("latent", torch.bfloat16, (16, 64, 48), ("picture", 16, 64, 48, "16 channels as colors")),
        ("latent", torch.float32, (1, 4, 8, 8), ("picture", 4, 8, 8, "4 channels as colors")),
        ("image", torch.uint8, (3, 20, 30), ("picture", 3, 20, 30, "")),
        ("image", np.dtype(np.uint8), (20, 30, 3), ("picture", 3, 20, 30, "")),
        ("image", np.dtype(np.uint8), (20, 30, 4), ("picture", 3, 20, 30, "")),
        ("video", torch.float16, (16, 9, 8, 8), ("picture", 16, 8, 8, "frame 5 of 9, 16 channels as colors")),
        ("latents", torch.float32, (16, 1, 8, 8), ("picture", 16, 8, 8, "16 channels as colors")),
        ("x", torch.float16, (1, 16, 9, 8, 8), ("picture", 16, 8, 8, "frame 5 of 9, 16 channels as colors")),
        (
            "x",
            torch.float32,
            (8, 32, 32),
            ("picture", 4, 32, 32, "first 4 of 8 channels: the means, 4 channels as colors"),
        ),
        ("moments", torch.float32, (6, 8, 8), ("picture", 3, 8, 8, "first 3 of 6 channels: the means")),
        ("alpha_mask", torch.float32, (64, 64), ("picture", 1, 64, 64, "")),
        ("mask", torch.bool, (1, 64, 64), ("picture", 1, 64, 64, "")),
        ("text", torch.bfloat16, (77, 2048), ("map", 1, 77, 2048, "")),
        ("text", torch.bfloat16, (1, 77, 2048), ("map", 1, 77, 2048, "")),
    ],
)
def test_planes(name: str, dtype: Any, shape: tuple[int, ...], expected: tuple[Any, ...]) -> None:
    planes = planes_of(name, dtype, shape)
    assert planes is not None
    assert (planes.kind, planes.num_channels, planes.height, planes.width, planes.note) == expected


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, (768,)),
        (torch.float32, ()),
        (torch.float32, (0, 8, 8)),
        (torch.float32, (3, 0, 8)),
        (torch.float32, (40, 12, 2560)),
        (torch.float32, (2, 2, 2, 2, 2)),
        (torch.float32, (1000, 8, 8)),
        (torch.float32, (1 << 20, 1 << 20)),
        (np.dtype("<U4"), (8, 8)),
        (np.dtype("datetime64[s]"), (8, 8)),
    ],
    ids=str,
)
def test_other_tensors_are_not_drawn(dtype: Any, shape: tuple[int, ...]) -> None:
    assert planes_of("latent", dtype, shape) is None


def test_the_planes_are_those_of_the_tensor() -> None:
    video = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).float()
    planes = planes_of("video", video.dtype, video.shape)
    assert planes is not None
    assert np.array_equal(planes.take(video), video[:, 1].numpy())
    pixels = np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3)
    planes = planes_of("image", pixels.dtype, pixels.shape)
    assert planes is not None
    assert np.array_equal(planes.take(pixels), np.moveaxis(pixels, -1, 0).astype(np.float32))
    waves = torch.randn(3, 8, 8, dtype=torch.complex64)
    planes = planes_of("waves", waves.dtype, waves.shape)
    assert planes is not None
    assert np.allclose(planes.take(waves), waves.abs().numpy())
    large = np.full((1, 3, 8, 8), 1e300)
    large[0, 0, 0, 0] = np.inf
    planes = planes_of("large", large.dtype, large.shape)
    assert planes is not None
    assert np.isinf(planes.take(large)).sum() == 1


def test_uint8_images_keep_their_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 9, 7)).astype(np.float32)
    picture = paint(pixels, fit_colors([pixels], 8), "picture")
    assert np.array_equal(np.moveaxis(picture, -1, 0), pixels)


def test_the_first_component_is_brightness() -> None:
    random = np.random.default_rng(0)
    light = random.random((40, 40)) ** 4
    weights = random.normal(size=16)
    latent = (weights[:, None, None] * light + 0.01 * random.normal(size=(16, 40, 40))).astype(np.float32)
    colors = fit_colors([latent])
    gray = paint(latent, colors, "picture").astype(float).mean(-1)
    assert np.corrcoef(gray.ravel(), light.ravel())[0, 1] > 0.9
    # the same colors, whatever the sign of the latent is
    assert np.array_equal(paint(latent, colors, "picture"), paint(latent, fit_colors([latent]), "picture"))
    assert np.corrcoef(paint(-latent, fit_colors([-latent]), "picture").mean(-1).ravel(), light.ravel())[0, 1] > 0.9


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("kind", ["picture", "map"])
def test_numbers_that_are_not_finite_are_magenta(channels: int, kind: str) -> None:
    planes = np.random.default_rng(0).normal(size=(channels, 8, 8)).astype(np.float32)
    planes[0, 2, 3], planes[-1, 4, 5] = np.nan, -np.inf
    picture = paint(planes, fit_colors([planes]), kind)
    is_bad = (picture == (255, 0, 200)).all(-1)
    assert is_bad[2, 3]
    assert is_bad[4, 5]
    assert is_bad.sum() == 2
    for value in (np.nan, np.inf, 0.0, 1e30):
        full = np.full((channels, 8, 8), value, np.float32)
        picture = paint(full, fit_colors([full]), kind)
        assert bool((picture == 255).any() and picture.ndim == 3 and (picture == (255, 0, 200)).all()) == (
            not np.isfinite(value)
        )


@pytest.mark.parametrize("max_nbytes", [900, 4000, 20_000])
def test_pictures_fit(max_nbytes: int) -> None:
    noise = np.random.default_rng(0).normal(size=(16, 96, 64)).astype(np.float32)
    png, width, height = fit_png(noise, fit_colors([noise]), "picture", 256, max_nbytes)
    assert len(png) <= max_nbytes
    assert _decoded(png).shape == (height, width, 3)
    assert abs(height / width - 1.5) < 0.2
    if max_nbytes == 20_000:
        assert (width, height) == (64, 96)


def test_shrinking_takes_means() -> None:
    planes = np.arange(2 * 8 * 8, dtype=np.float32).reshape(2, 8, 8)
    assert np.array_equal(shrink(planes, 4, "picture"), planes.reshape(2, 4, 2, 4, 2).mean((2, 4)))
    planes[0, 0, 0] = np.nan
    assert np.isnan(shrink(planes, 4, "picture")).sum() == 1
    assert shrink(np.zeros((1, 512, 4096), np.float32), 256, "map").shape == (1, 48, 128)
