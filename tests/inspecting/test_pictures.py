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

from tests.inspecting.caches import view
from tests.reading.batches import write

Image = pytest.importorskip("PIL.Image")


def _decode(png: bytes) -> Any:
    with Image.open(io.BytesIO(png)) as image:
        image.verify()
    return np.asarray(Image.open(io.BytesIO(png)))


def _draw(folder: Path, *samples: dict[str, Any]) -> list[dict[str, tuple[Any, dict[str, Any]]]]:
    """Return the pixels and the records of the pictures in the page of a cache, for each sample by name."""
    write(folder / "0.tar", {f"{i}": sample for i, sample in enumerate(samples)})
    report, _, _ = view(folder)
    names = [tensor["name"] for tensor in report["tensors"]]
    return [
        {names[one["tensor"]]: (_decode(base64.b64decode(one["png"])), one) for one in card["pictures"]}
        for card in report["samples"]
    ]


_U8 = np.dtype(np.uint8)


_COLORED = "16 channels as colors"
PLANES: list[tuple[str, Any, tuple[int, ...], tuple[str, int, int, str] | None]] = [
    ("latent", torch.bfloat16, (16, 24, 16), ("picture", 16, 24, _COLORED)),
    ("latent", torch.float32, (1, 4, 8, 8), ("picture", 8, 8, "4 channels as colors")),
    ("image", torch.uint8, (3, 20, 30), ("picture", 30, 20, "")),
    ("image", _U8, (20, 30, 3), ("picture", 30, 20, "")),
    ("image", _U8, (20, 30, 4), ("picture", 30, 20, "")),
    ("video", torch.float16, (16, 9, 8, 8), ("picture", 8, 8, f"frame 5 of 9, {_COLORED}")),
    ("latents", torch.float32, (16, 1, 8, 8), ("picture", 8, 8, _COLORED)),
    ("x", torch.float16, (1, 16, 9, 8, 8), ("picture", 8, 8, f"frame 5 of 9, {_COLORED}")),
    ("x", torch.float32, (8, 32, 32), ("picture", 32, 32, "first 4 of 8 channels: the means, 4 channels as colors")),
    ("moments", torch.float32, (6, 8, 8), ("picture", 8, 8, "first 3 of 6 channels: the means")),
    ("alpha_mask", torch.float32, (64, 64), ("picture", 64, 64, "")),
    ("mask", torch.bool, (1, 64, 64), ("picture", 64, 64, "")),
    ("text", torch.bfloat16, (77, 2048), ("map", 128, 48, "")),
    ("text", torch.complex64, (1, 7, 9), ("map", 9, 7, "")),
    ("x", torch.float32, (40, 12, 256), ("map", 128, 12, "the first of 40 planes")),
    ("x", torch.float32, (2, 2, 2, 2, 2), ("map", 2, 2, "the first of 8 planes")),
    ("x", torch.float32, (1000, 8, 8), ("map", 8, 8, "the first of 1,000 planes")),
    *(("latent", torch.float32, shape, None) for shape in [(768,), (), (0, 8, 8), (3, 0, 8), (1, 1)]),
    ("latent", torch.uint8, (1 << 14, (1 << 12) + 1), None),
    ("latent", np.dtype("<U4"), (8, 8), None),
    ("latent", np.dtype("datetime64[s]"), (8, 8), None),
]


def _range(dtype: Any, shape: tuple[int, ...]) -> Any:
    if math.prod(shape) > 1 << 20:
        return torch.zeros(shape, dtype=dtype)
    if isinstance(dtype, torch.dtype):
        return torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def test_planes(tmp_path: Path) -> None:
    # each tensor has a name of its own: one name has one kind of picture and the same colors in all samples
    samples = [{f"{i}": {name: _range(dtype, shape)}} for i, (name, dtype, shape, _) in enumerate(PLANES)]
    for pictures, (name, dtype, shape, expected) in zip(_draw(tmp_path, *samples), PLANES, strict=True):
        case = name, dtype, shape
        if expected is None:
            assert not pictures, case
        else:
            ((pixels, record),) = pictures.values()
            assert (record["kind"], record["width"], record["height"], record["note"]) == expected, case
            assert pixels.shape[:2] == (record["height"], record["width"]), case


def test_images_keep_their_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    frames = torch.from_numpy(pixels).permute(2, 0, 1)[:, None].repeat(1, 3, 1, 1)
    frames[:, [0, 2]] = 0
    other = np.zeros_like(pixels)  # colors are those of all samples
    drawn, _ = _draw(tmp_path, {"rows": pixels, "video": frames}, {"rows": other, "video": frames})
    assert np.array_equal(drawn["rows"][0], pixels)
    assert np.array_equal(drawn["video"][0], pixels)


def test_the_first_component_is_brightness(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    light = random.random((40, 40)) ** 4
    weights = random.normal(size=16)
    latent = (weights[:, None, None] * light + 0.01 * random.normal(size=(16, 40, 40))).astype(np.float32)
    (pictures,) = _draw(tmp_path, {"latent": latent, "opposite": -latent})  # the colors do not depend on the sign
    for pixels, _ in pictures.values():
        assert np.corrcoef(pixels.astype(float).mean(-1).ravel(), light.ravel())[0, 1] > 0.9


def test_numbers_that_are_not_finite_are_red(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = []
    for number, shape in enumerate([(8, 8), (1, 8, 8), (2, 8, 8), (3, 8, 8), (4, 8, 8), (16, 8, 8)]):
        planes = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        planes.reshape(-1, 8, 8)[0, 2, 3], planes.reshape(-1, 8, 8)[-1, 4, 5] = np.nan, -np.inf
        values = {"nan": np.nan, "inf": np.inf, "zero": 0.0, "huge": 1e30}
        full = {f"{name} {number}": np.full(shape, value, np.float32) for name, value in values.items()}
        samples += [{name: tensor} for name, tensor in {f"some {number}": planes, **full}.items()]
    for drawn in _draw(tmp_path, *samples):
        ((name, (pixels, _)),) = drawn.items()
        is_red = (pixels == (255, 0, 90)).all(-1) if pixels.ndim == 3 else np.zeros(pixels.shape, bool)
        if name.startswith("some"):
            assert np.argwhere(is_red).tolist() == [[2, 3], [4, 5]], name
        else:
            assert is_red.all() == name.startswith(("nan", "inf")), name
            assert is_red.any() == is_red.all(), name


def test_shrinking_takes_means(tmp_path: Path) -> None:
    ramp = np.broadcast_to(np.arange(256, dtype=np.uint8).repeat(4)[:, None], (1024, 1024)).copy()
    ramp[::2], ramp[1::2] = ramp[::2] - (ramp[::2] > 0), ramp[1::2] + (ramp[1::2] > 0) * (ramp[1::2] < 255)
    (drawn,) = _draw(tmp_path, {"image": ramp})
    pixels, record = drawn["image"]
    assert (record["width"], record["height"]) == (256, 256)
    assert np.abs(pixels.astype(int) - np.arange(256)[:, None]).max() <= 4  # of 64 levels


def test_one_plane_is_read_without_the_others(tmp_path: Path) -> None:
    """Each plane of a video, of maps and of a picture is the one that its place says."""
    video = torch.arange(4 * 3 * 8 * 8).reshape(4, 3, 8, 8).float()
    maps = torch.zeros(600, 8, 8)
    maps[1:] = float("nan")
    video[:, [0, 2]] = float("nan")
    means = torch.cat([torch.rand(4, 8, 8), torch.full((4, 8, 8), float("nan"))])
    (drawn,) = _draw(tmp_path, {"video": video, "maps": maps, "moments": means})
    assert len(drawn) == 3
    for pixels, _ in drawn.values():
        assert not (pixels == (255, 0, 90)).all(-1).any()
