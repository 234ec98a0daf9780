"""ComfyUI: training sets of the node Save Training Dataset.

The node writes a folder:

- `shard_0000.pkl`, `shard_0001.pkl`, …: files of `torch.save`, in spite of their suffix, with 1,000 samples each by default:
  `{"latents": [{"samples": …}, …], "conditioning": [[[tensor, {"pooled_output": …}]], …]}`;
- `metadata.json`: `{"num_samples": 2500, "num_shards": 3, "shard_size": 1000}`.

Each sample is a latent and its conditioning, as ComfyUI's nodes pass them:

    {"latents": {"samples": [1, C, H, W]}, "conditioning": [[[1, T, D], {"pooled_output": [1, P], …}]]}

So the tensors are `latents.samples`, `conditioning.0.0` and `conditioning.0.1.pooled_output`, and the node Load Tensor Cache in
`examples/comfyui_nodes` returns the saved sample. The name of a sample is the path of its shard without suffix, and its number
in the shard: `shard_0000/000017`. Shards are mapped, so a shard may be larger than memory. A shard with objects of ComfyUI,
such as hooks, needs `--trust` and an installed ComfyUI, and is read as a whole.

A `metadata.json` that lists another number of samples is reported if all shards can be read. The node leaves the shards of an
earlier, larger set in the folder, and ComfyUI would load them too.

A draft of a newer layout (ComfyUI's pull request 14599, not merged) has tensors in `shard_0000.safetensors`, and all other
values in a pickle, `shard_0000.skeleton.pkl`. Its shards are refused, also with `--trust`.
"""

from __future__ import annotations

import re
import threading
from functools import lru_cache, partial
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import load_torch
from wds_tensorcache.importers.source import Faults, Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder

_SHARD = re.compile(r"(?:.*/)?shard_[^/]*\.pkl", re.DOTALL)
_METADATA = "metadata.json"


def _open(folder: SourceFolder) -> Source:
    samples: list[SourceSample] = []
    bad = Faults()
    metadata_files: list[str] = []
    lock = threading.Lock()
    read_shard = lru_cache(2)(partial(_read_shard, folder))

    def load(name: str, number: int) -> Loaded:
        with lock:  # several threads of an import need the same shard at once
            return Loaded(read_shard(name)[number])

    for name in folder.by_suffix.get(".pkl", ()):
        with bad.of(name):
            if not _SHARD.fullmatch(name):
                raise FormatError("is not a shard of a training set; other pickles are never read")
            if name.endswith(".skeleton.pkl") or f"{name[:-4]}.safetensors" in folder:
                problem = (
                    "has its tensors in a .safetensors file, as in a draft of ComfyUI that this package does not read"
                )
                raise FormatError(f"{problem}; save the set with the node Save Training Dataset of a released ComfyUI")
            for number in range(len(read_shard(name))):
                samples.append(SourceSample(f"{name[:-4]}/{number:06d}", (name,), partial(load, name, number)))
    for name in folder.by_suffix.get(".json", ()):
        root = name.removesuffix(_METADATA)
        # captions of other tools may be thousands of `.json` files
        count = 0 if root == name else sum(sample.name.startswith(f"{root}shard_") for sample in samples)
        if count and not any(other.startswith(f"{root}shard_") for other in bad):
            metadata_files.append(name)
            with bad.of(name):
                listed = folder.read_json(name)["num_samples"]
                if listed != count:
                    problem = "some are missing, or belong to an earlier set"
                    raise FormatError(f"lists {listed!r:.50} samples, but the shards have {count:,}: {problem}")
    return Source(samples, {}, bad, metadata_files)


def _read_shard(folder: SourceFolder, name: str) -> list[dict[str, Any]]:
    """Return the samples of a shard, with mapped tensors."""
    content = load_torch(folder, name, is_mapped=True)
    latents, conditioning = map(content.get, ("latents", "conditioning")) if isinstance(content, dict) else (None, None)
    if not isinstance(latents, list) or not isinstance(conditioning, list):
        raise FormatError("expected a dict of two lists, 'latents' and 'conditioning'").at(name)
    if len(latents) != len(conditioning):
        raise FormatError(f"has {len(latents):,} latents, but {len(conditioning):,} conditionings").at(name)
    return [{"latents": left, "conditioning": right} for left, right in zip(latents, conditioning, strict=True)]


FORMAT = Format("comfyui", "ComfyUI: shard_*.pkl of the node Save Training Dataset", _SHARD, _open)
