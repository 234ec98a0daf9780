"""LightningDiT: latents of images with their classes. The `.safetensors` files have 10,000 rows.

`latents_rank{rank:02d}_shard{shard:03d}.safetensors` contains

- `latents`: float32 [N, C, h, w], without the scale and shift that training applies;
- `latents_flip`: the latents of the mirrored images, [N, C, h, w];
- `labels`: int64 [N], the classes.

`latents_stats.pt`, which the first training writes, has the means and standard deviations of the channels, [1, C, 1, 1].

Each sample is a row:

    {"latents": float32 [C, h, w], "latents_flip": float32 [C, h, w], "label": int64 []}

The name of a sample is the path of its file without suffix, and the number of the row: `latents_rank00_shard000/00042`. Only
the bytes of the row are read. LightningDiT draws one of the two latents at random, normalizes it with the statistics, and
multiplies it by its `latent_multiplier`. The statistics are part of the fingerprint, as `latents_mean` and `latents_std`.

If several processes made the latents, the last rows of some ranks repeat images, because torch's DistributedSampler gives all
ranks the same number of images.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import load_torch
from wds_tensorcache.importers.source import Faults, Format, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.importers.trainers.rows import list_rows

_FILE = re.compile(r"(?:.*/)?latents_rank\d+_shard\d+\.safetensors", re.DOTALL | re.ASCII)
_STATS = "latents_stats.pt"


def _open(folder: SourceFolder) -> Source:
    samples: list[SourceSample] = []
    bad = Faults()
    provenance: dict[str, Any] = {}
    metadata_files = [name for name in folder.names if f"/{name}".endswith(f"/{_STATS}")]
    for name in metadata_files:
        with bad.of(name):
            stats = _read_stats(folder, name)
            provenance |= stats if name == _STATS else {name: stats}
    for name in folder.names:
        if name.endswith(".safetensors"):
            with bad.of(name):
                samples += list_rows(folder, name, ["latents", "labels"], {"labels": "label"})
    return Source(samples, provenance, bad, metadata_files)


def _read_stats(folder: SourceFolder, name: str) -> dict[str, list[float]]:
    stats = load_torch(folder, name)
    if not isinstance(stats, dict) or stats.keys() != {"mean", "std"}:
        raise FormatError("expected a dict with 'mean' and 'std'")
    for key, value in stats.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.isfinite().all():
            raise FormatError(f"{key!r} is not a tensor of finite numbers")
    return {f"latents_{key}": value.flatten().tolist() for key, value in stats.items()}


FORMAT = Format("lightningdit", "LightningDiT: latents_rank*_shard*.safetensors of ImageNet", _FILE, _open)
