"""Samples for MosaicML streaming and litdata, and the calls of these packages that write them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch

COUNT = 3
JPEG, PNG = b"\xff\xd8\xff not a picture", b"\x89PNG\r\n\x1a\n neither"
MDS_COLUMNS = {
    "any": "ndarray",
    "half": "ndarray:float16",
    "fixed": "ndarray:float32:2,3",
    "latents": "bytes",
    "text": "str",
    "number": "int",
    "f64": "float64",
    "json": "json",
    "long": "str_int",
    "decimal": "str_decimal",
    "photo": "jpeg",
    "mask": "png",
    "frames": "list[jpeg]",
    "views": "jpeg_array",
    "pixels": "pil",
}


def import_streaming() -> Any:
    """Import MosaicML's package without its `__init__`, which needs torchvision, whose builds fit one build of torch."""
    if "streaming" not in sys.modules:
        found = importlib.util.find_spec("streaming")
        assert found is not None, "`make .venv/libraries` installs mosaicml-streaming"
        sys.modules["streaming"] = types.ModuleType("streaming")
        sys.modules["streaming"].__path__ = list(found.submodule_search_locations or [])
    return importlib.import_module("streaming.base")


def mds_sample(number: int) -> dict[str, Any]:
    """Return a sample as it is after the import, without pictures."""
    return {
        "any": torch.full((2, number + 1), number, dtype=torch.int32),
        "half": torch.full((300,), number).half(),
        "fixed": torch.full((2, 3), number / 2),
        "latents": torch.arange(number * 4, dtype=torch.uint8),
        "text": f"a café {number}",
        "number": -(1 << 40) - number,
        "f64": torch.tensor(number / 3, dtype=torch.float64),
        "json": {"k": [1, 2.5, None]},
        "long": 10**30,
        "decimal": Decimal("1.50"),
        "pixels": torch.full((2, 3, 3), number, dtype=torch.uint8),
    }


def write_mds(out: Path, compression: str | None = None, size_limit: int = 1 << 26) -> None:
    from PIL import Image

    writer: Any = import_streaming().MDSWriter
    with writer(out=str(out), columns=MDS_COLUMNS, compression=compression, size_limit=size_limit) as sink:
        for number in range(COUNT):
            sample = {name: _stored(value) for name, value in mds_sample(number).items()}
            media = {"photo": JPEG, "mask": PNG, "views": [JPEG, JPEG]}
            media["frames"] = b"\0\0\0\0\2\0\0\0" + 2 * len(JPEG).to_bytes(4, "little") + 2 * JPEG
            sink.write({**sample, **media, "pixels": Image.fromarray(np.full((2, 3, 3), number, np.uint8))})


def _stored(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    array = value.numpy()
    if array.dtype == np.uint8 and array.ndim:
        return array.tobytes()
    return array if array.ndim else array[()]


def litdata_sample(number: int) -> dict[str, Any]:
    """Return a sample as it is after the import, without encoded pictures."""
    return {
        "latent": torch.full((4, 2, 1), number / 2),
        "states": torch.full((3, 2), number).half(),
        "empty": torch.zeros(0, 3),
        "ids": torch.arange(number + 1),
        "scalar": torch.tensor(number, dtype=torch.int16),
        "array": torch.full((2, 2), number, dtype=torch.float32),
        "line": torch.arange(number + 1, dtype=torch.int16),
        "raw": torch.arange(number, dtype=torch.uint8),
        "number": number,
        "text": f"a café {number}",
        "nested": (1, [2.5, "x"]),
        "pixels": torch.full((2, 3, 3), number, dtype=torch.uint8),
    }


def write_litdata(out: Path, loader: Any = None, **options: Any) -> None:
    os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")
    from litdata.streaming.writer import BinaryWriter
    from litdata.types import Image, Jpeg, JpegArray
    from PIL import Image as Pictures

    writer = BinaryWriter(str(out), chunk_size=2, item_loader=loader, **options)
    for number in range(COUNT):
        sample: Any = litdata_sample(number)
        sample |= {"array": sample["array"].numpy(), "line": sample["line"].numpy(), "raw": bytes(range(number))}
        sample["photo"] = Jpeg(bytes=JPEG)
        sample["mask"] = Image(path=None, bytes=PNG)
        sample["views"] = JpegArray(images=[JPEG, JPEG])
        sample["pixels"] = Pictures.fromarray(np.full((2, 3, 3), number, np.uint8))
        writer[number] = sample
    writer.done()
    writer.merge(1)
