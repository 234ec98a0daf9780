"""ComfyUI: training sets of the node Save Training Dataset.

The node writes a folder:

- `shard_0000.pkl`, `shard_0001.pkl`, …: files of `torch.save`, in spite of their suffix, with 1,000 samples each by default:
  `{"latents": [{"samples": …}, …], "conditioning": [[[tensor, {"pooled_output": …}]], …]}`;
- `metadata.json`: `{"num_samples": 2500, "num_shards": 3, "shard_size": 1000}`.

Each sample is a latent and its conditioning, as ComfyUI's nodes pass them:

    {"latents": {"samples": [1, C, H, W]}, "conditioning": [[[1, T, D], {"pooled_output": [1, P], …}]]}

So the tensors are `latents.samples`, `conditioning.0.0` and `conditioning.0.1.pooled_output`, and the node Load Tensor Cache in
`examples/comfyui_nodes` returns what was saved. The name of a sample is the path of its shard without suffix, and its number
there: `shard_0000/000017`. Tensors are read one by one, so a shard may be larger than memory. A shard with objects of ComfyUI,
such as hooks, needs `--trust` and an installed ComfyUI, and is read as a whole.

If `metadata.json` lists another number of samples, it is reported. The node leaves the shards of an earlier, larger set in the
folder, and ComfyUI would load them too.

A draft of a newer layout (ComfyUI's pull request 14599, not merged) has tensors in `.safetensors` files, and all other values
in pickles. Tensors with names such as `latents.0.samples` and `conditioning.0.0.0` become samples; dots, slashes, colons and
brackets separate the parts of a name. Pickles of the draft are reported and not imported, so `--on-error skip` is needed.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from wds_tensorcache.codec.header import StoredTensor
from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.file_parts import index_torch, read_parts, read_tensor
from wds_tensorcache.importers.safe_files import load_torch, read_safetensors_tensors
from wds_tensorcache.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.importers.suffixed_keys import peek_header

_SHARD = re.compile(r"(?:.*/)?shard_[^/]*\.pkl", re.DOTALL)
_TENSOR = re.compile(r"(latents?|conditionings?|conds?)[./:\[_]+(\d{1,9})(?=[./:\[\]_]|$)_?(.*)", re.DOTALL | re.ASCII)
_METADATA = "metadata.json"
_MAX_DEPTH = 32
_NUM_PROBED = 4
_Shards = Callable[[str], list[tuple[Any, Any]]]


def _recognize(folder: SourceFolder) -> int:
    shards = sum(_SHARD.fullmatch(name) is not None for name in folder.by_suffix.get(".pkl", ()))
    names = [] if shards else folder.by_suffix.get(".safetensors", [])
    probed = [peek_header(folder, name)[0] for name in names[:_NUM_PROBED]]
    return shards + len(names) * (bool(probed) and all(map(_is_draft, probed)))


def _is_draft(tensors: list[str]) -> bool:
    matches = [_TENSOR.fullmatch(tensor) for tensor in tensors]
    return {match and match[1][0] for match in matches} == {"l", "c"}


def _open(folder: SourceFolder) -> Source:
    """Find the samples from the pickles of the shards, without their tensors."""
    samples: list[SourceSample] = []
    bad: dict[str, str] = {}
    metadata_files: list[str] = []
    lock = threading.Lock()
    cached = lru_cache(2)(partial(_read_shard, folder))

    def shards(name: str) -> list[tuple[Any, Any]]:
        with lock:  # several threads of an import need the same shard at once
            return cached(name)

    for name in folder.by_suffix.get(".pkl", ()):
        try:
            if not _SHARD.fullmatch(name):
                raise FormatError("is not a shard of a training set; other pickles are never read")
            for number in range(len(shards(name))):
                load = partial(_load, folder, shards, name, number)
                samples.append(SourceSample(f"{name[:-4]}/{number:06d}", (name,), load))
        except FormatError as exc:
            bad[name] = exc.reason
    for name in folder.by_suffix.get(".json", ()):
        root = name[: -len(_METADATA)]
        count = sum(sample.name.startswith(f"{root}shard_") for sample in samples)
        if root + _METADATA == name and count and not any(other.startswith(f"{root}shard_") for other in bad):
            bad |= _check_count(folder, name, count)
            metadata_files.append(name)
    for name in folder.by_suffix.get(".safetensors", ()):
        try:
            samples += _open_draft(folder, name)
        except FormatError as exc:
            bad[name] = exc.reason
    return Source(samples, {}, bad, metadata_files)


def _read_shard(folder: SourceFolder, name: str) -> list[tuple[Any, Any]]:
    """Return latent and conditioning of each sample, with parts of the file in place of tensors."""
    try:
        content = index_torch(folder, name)
    except FormatError:
        if not folder.trust:
            raise
        content = load_torch(folder, name)
    latents, conditioning = map(content.get, ("latents", "conditioning")) if isinstance(content, dict) else (None, None)
    if not isinstance(latents, list) or not isinstance(conditioning, list):
        raise FormatError("expected a dict of two lists, 'latents' and 'conditioning'").at(name)
    if len(latents) != len(conditioning):
        raise FormatError(f"has {len(latents):,} latents, but {len(conditioning):,} conditionings").at(name)
    return list(zip(latents, conditioning, strict=True))


def _load(folder: SourceFolder, shards: _Shards, name: str, number: int) -> Loaded:
    latents, conditioning = shards(name)[number]
    return Loaded(read_parts(folder, name, {"latents": latents, "conditioning": conditioning}))


def _check_count(folder: SourceFolder, name: str, count: int) -> dict[str, str]:
    """Return the fault of a `metadata.json`, if it has one."""
    try:
        listed = json.loads(folder.read_text(name))["num_samples"]
    except (FormatError, ValueError, TypeError, KeyError, RecursionError) as exc:
        return {name: f"does not have the number of samples: {exc!r:.200}"}
    if listed == count:
        return {}
    return {
        name: f"lists {listed!r:.50} samples, but the shards have {count:,}: some are missing, or belong to an earlier set"
    }


def _open_draft(folder: SourceFolder, name: str) -> list[SourceSample]:
    """Return a sample for each number in the names of the tensors."""
    found: dict[int, dict[str, dict[tuple[str, ...], StoredTensor]]] = {}
    for tensor in read_safetensors_tensors(folder, name)[0].values():
        match = _TENSOR.fullmatch(tensor.name)
        path = [part for part in re.split(r"[./:\[\]]+", match[3]) if part] if match else []
        if match is None or len(path) > _MAX_DEPTH:
            raise FormatError(f"tensor {tensor.name!r:.100} is not named like a part of a training set").at(name)
        kind = "latents" if match[1].startswith("latent") else "conditioning"
        if found.setdefault(int(match[2]), {}).setdefault(kind, {}).setdefault(tuple(path), tensor) is not tensor:
            raise FormatError(f"two tensors have the place of {tensor.name!r:.100}").at(name)
    for number, kinds in found.items():
        if len(kinds) < 2:
            raise FormatError(f"sample {number} has {next(iter(kinds))}, but not both latents and conditioning").at(
                name
            )
    stem = name.rpartition(".")[0]
    return [
        SourceSample(f"{stem}/{number:06d}", (name,), partial(_load_draft, folder, name, kinds))
        for number, kinds in sorted(found.items())
    ]


def _load_draft(folder: SourceFolder, name: str, kinds: dict[str, dict[tuple[str, ...], StoredTensor]]) -> Loaded:
    value: dict[str, Any] = {}
    for kind, tensors in sorted(kinds.items(), reverse=True):
        for path, tensor in tensors.items():
            parent, parts = value, (kind, *path)
            for part in parts[:-1]:
                parent = parent.setdefault(part, {})
                if not isinstance(parent, dict):
                    raise FormatError(f"tensor {tensor.name!r:.100} is inside another tensor").at(name)
            if parts[-1] in parent:
                raise FormatError(f"two tensors have the place of {tensor.name!r:.100}").at(name)
            parent[parts[-1]] = read_tensor(folder, name, tensor)
    return Loaded({kind: _as_lists(each) for kind, each in value.items()})


def _as_lists(value: Any) -> Any:
    """Return nested dicts whose keys are "0", "1", … as lists."""
    if not isinstance(value, dict):
        return value
    made = {key: _as_lists(item) for key, item in value.items()}
    numbers = [str(number) for number in range(len(made))]
    return [made[number] for number in numbers] if made.keys() == set(numbers) else made


FORMAT = Format("comfyui", "ComfyUI: shard_*.pkl of the node Save Training Dataset", _recognize, _open)
