"""Photos and their latents through one DALI pipeline: both are cropped at the same place and stay together.

    python examples/dali_images_and_latents.py [--out demo_out]

1. Pieces of scikit-learn's photos are written as JPEGs, each beside its latent (here: its colors, 8 times smaller).
2. The pipeline decodes the JPEG, mirrors and cuts it; the same flip and cut, 8 times smaller, is made to the latent.
3. The outputs are compared: `photos.png` shows the photos above their latents.

Needs: wds_tensorcache, DALI, scikit-learn, pillow.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from nvidia.dali import fn, pipeline_def, types
from PIL import Image
from sklearn.datasets import load_sample_images

import dali_plugin
import wds_tensorcache as tc

SIZE, CUT, SCALE = 192, 128, 8  # pixels of a photo, of a crop, and per element of a latent


def pieces() -> Iterator[np.ndarray[Any, Any]]:
    """Yield uint8 `[SIZE, SIZE, 3]`."""
    for photo in load_sample_images().images:
        for y in range(0, photo.shape[0] - SIZE, SIZE // 2):
            for x in range(0, photo.shape[1] - SIZE, SIZE // 2):
                yield photo[y : y + SIZE, x : x + SIZE]


def write_cache(out: Path) -> None:
    """Write `KEY.jpg` next to the members of the cache; any reader of WebDataset shards sees both."""
    with tc.ShardWriter(out / "photos-%03d.tar", overwrite=True) as sink:
        for i, piece in enumerate(pieces()):
            latent = F.avg_pool2d(torch.tensor(piece).permute(2, 0, 1).float() / 255, SCALE)
            jpeg = io.BytesIO()
            Image.fromarray(piece).save(jpeg, "jpeg", quality=95)
            sink.write(f"{i:04d}", {"latent": latent.half(), "index": i}, jpg=jpeg.getvalue())


def photos_and_latents(cache: Any, batch_size: int) -> Any:
    """Return an iterator; on a GPU if there is one, where the JPEGs are decoded too."""
    on_gpu = torch.cuda.is_available()

    @pipeline_def(batch_size=batch_size, num_threads=2, device_id=0 if on_gpu else None, seed=0)
    def pipeline() -> tuple[Any, ...]:
        latent, jpg, number = dali_plugin.fn.tensorcache(
            cache, ["latent"], ["jpg"], shuffle=True, device="gpu" if on_gpu else "cpu"
        )
        photo = fn.decoders.image(jpg, device="mixed" if on_gpu else "cpu")
        mirrored = fn.random.coin_flip()
        # whole elements of a latent, so that both crops are at the same place
        places = [float(place) for place in range((SIZE - CUT) // SCALE + 1)]
        y, x = (fn.cast(fn.random.uniform(values=places), dtype=types.INT32) for _ in range(2))
        latent = fn.flip(fn.reshape(fn.cast(latent, dtype=types.FLOAT), layout="CHW"), horizontal=mirrored)
        latent = fn.slice(latent, fn.stack(y, x), [CUT // SCALE] * 2, axis_names="HW")
        photo = fn.flip(photo, horizontal=mirrored)
        photo = fn.slice(photo, fn.stack(y, x) * SCALE, [CUT] * 2, axis_names="HW")
        return latent, photo, number

    return dali_plugin.TensorCacheIterator(pipeline(), outputs=["latent", "photo", "number"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for shards and picture")
    out = parser.parse_args().out / "photos"
    write_cache(out)
    with tc.open(out) as cache:
        worst = 0.0
        for batch, beside in photos_and_latents(cache, 8):
            photo = beside["photo"].permute(0, 3, 1, 2).float() / 255
            worst = max(worst, (F.avg_pool2d(photo, SCALE) - batch["latent"]).abs().mean().item())
        print(f"{len(cache)} photos; a photo, made smaller, differs from its latent by {worst:.4f} of 1 at most")
        small = F.interpolate(batch["latent"], scale_factor=SCALE).clamp(0, 1)
        sheet = torch.cat([photo, small], dim=2).permute(2, 0, 3, 1).flatten(1, 2)
        Image.fromarray((sheet * 255).byte().cpu().numpy()).save(out / "photos.png")
        print(f"picture: {out / 'photos.png'}, of samples {list(batch['index'])}")


if __name__ == "__main__":
    main()
