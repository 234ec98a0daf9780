"""Samples for MosaicML streaming and litdata, and the calls of these libraries that write them.

`python -m tests.importers.chunked_samples` writes the folders in `written/` anew. It was run with mosaicml-streaming 0.13.0,
litdata 0.2.76, numpy 2.4 and torch 2.13, on a little-endian machine. With the argument `old`, it writes the folder that has
the number of the installed release of litdata: 0.2.30 and 0.2.51.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch

WRITTEN = Path(__file__).parent / "written"
COUNT = 3
JPEG, PNG = b"\xff\xd8\xff not a picture", b"\x89PNG\r\n\x1a\n neither"
MDS_COLUMNS = {
    "any": "ndarray",
    "half": "ndarray:float16",
    "fixed": "ndarray:float32:2,3",
    "latents": "bytes",
    "text": "str",
    "number": "int",
    "u8": "uint8",
    "f32": "float32",
    "f64": "float64",
    "json": "json",
    "pickled": "pkl",
    "long": "str_int",
    "decimal": "str_decimal",
    "float": "str_float",
    "photo": "jpeg",
    "mask": "png",
    "frames": "list[jpeg]",
    "views": "jpeg_array",
    "pixels": "pil",
}


def mds_sample(number: int) -> dict[str, Any]:
    """Return a sample, without the column `pixels`; arrays as they are after the import."""
    return {
        "any": torch.full((2, number + 1), number, dtype=torch.int32),
        "half": torch.full((300,), number).half(),
        "fixed": torch.full((2, 3), number / 2),
        "latents": torch.arange(number * 4, dtype=torch.uint8),
        "text": f"a café {number}",
        "number": -(1 << 40) - number,
        "u8": torch.tensor(number, dtype=torch.uint8),
        "f32": torch.tensor(number / 3),
        "f64": torch.tensor(number / 3, dtype=torch.float64),
        "json": {"k": [1, 2.5, None]},
        "pickled": {"x": torch.arange(3)},
        "long": 10**30,
        "decimal": Decimal("1.50"),
        "float": 0.1,
    }


def litdata_sample(number: int) -> dict[str, Any]:
    return {
        "latent": torch.full((4, 2, 1), number / 2),
        "states": torch.full((3, 2), number).half(),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([[True], [False]]),
        "ids": torch.arange(number + 1),
        "scalar": torch.tensor(number, dtype=torch.int16),
        "array": torch.full((2, 2), number, dtype=torch.float32),
        "line": torch.arange(number + 1, dtype=torch.int16),
        "raw": torch.arange(number, dtype=torch.uint8),
        "number": number,
        "float": number / 3,
        "bool": number % 2 == 0,
        "text": f"a café {number}",
        "nested": (1, [2.5, "x"]),
        "none": None,
    }


def write_mds(out: Path, compression: str | None = None, size_limit: int = 1 << 26) -> None:
    from PIL import Image
    from streaming import MDSWriter

    shutil.rmtree(out, ignore_errors=True)
    options = {"columns": MDS_COLUMNS, "compression": compression, "size_limit": size_limit}
    with MDSWriter(out=str(out), **options) as writer:
        for number in range(COUNT):
            sample = {name: _stored(value) for name, value in mds_sample(number).items()}
            sample["pickled"] = {"x": np.arange(3)}
            media = {"photo": JPEG, "mask": PNG, "views": [JPEG, JPEG]}
            media["frames"] = b"\0\0\0\0\2\0\0\0" + 2 * len(JPEG).to_bytes(4, "little") + 2 * JPEG
            writer.write({**sample, **media, "pixels": Image.fromarray(np.full((2, 3, 3), number, np.uint8))})


def _stored(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    array = value.numpy()
    if array.dtype == np.uint8 and array.ndim:
        return array.tobytes()
    return array if array.ndim else array[()]


def write_litdata(out: Path, samples: Iterator[Any] | None = None, loader: Any = None, **options: Any) -> None:
    from litdata.streaming.writer import BinaryWriter
    from litdata.types import Image, Jpeg
    from PIL import Image as Pictures

    shutil.rmtree(out, ignore_errors=True)
    writer = BinaryWriter(str(out), chunk_size=2, item_loader=loader, **options)
    for number in range(COUNT):
        sample: Any = litdata_sample(number)
        sample |= {"array": sample["array"].numpy(), "line": sample["line"].numpy(), "raw": bytes(range(number))}
        sample["photo"] = Jpeg(bytes=JPEG)
        sample["mask"] = Image(path=None, bytes=PNG)
        sample["pixels"] = Pictures.fromarray(np.full((2, 3, 3), number, np.uint8))
        writer[number] = next(samples) if samples else sample
    writer.done()
    writer.merge(1)


def _write_old_litdata() -> None:
    """Write the same samples without pictures, whose classes older releases do not have."""
    from litdata.__about__ import __version__
    from litdata.streaming.writer import BinaryWriter

    out = WRITTEN / f"litdata_{__version__}"
    shutil.rmtree(out, ignore_errors=True)
    writer = BinaryWriter(str(out), chunk_size=2)
    for number in range(COUNT):
        sample: Any = litdata_sample(number)
        sample |= {"array": sample["array"].numpy(), "line": sample["line"].numpy(), "raw": bytes(range(number))}
        writer[number] = sample
    writer.done()
    writer.merge(1)


def _main() -> None:
    if sys.argv[1:] == ["old"]:
        _write_old_litdata()
        return
    from litdata.streaming.item_loader import TokensLoader

    for codec in (None, "gz", "bz2", "zstd:5", "br", "snappy"):
        write_mds(WRITTEN / f"mds_{(codec or 'plain').split(':')[0]}", codec, 1 << 26 if codec else 2500)
    write_litdata(WRITTEN / "litdata_plain")
    for level in ("chunk", "batch", "sample"):
        write_litdata(WRITTEN / f"litdata_{level}", compression="zstd", compression_level=level)
    tokens = (torch.arange(number, number + 10, dtype=torch.int32) for number in range(COUNT))
    write_litdata(WRITTEN / "litdata_tokens", tokens, TokensLoader())


if __name__ == "__main__":
    _main()
