"""NeMo Automodel (diffusion): `.pt` files listed by `metadata.json`, or `.meta` files.

`metadata.json` names `metadata_shard_0000.json`, …, which list the items: `cache_file` (an absolute path), `image_path`,
`prompt`, `bucket_resolution` or `crop_resolution`, `original_resolution`, `bucket_id`, `aspect_ratio`, and more. The file of
an item, `{W}x{H}/{hash}.pt`, `samples/sample_00000000.pt` or `.meta`, is a dict:

- images: `latent`, text tensors such as `clip_hidden`, `pooled_prompt_embeds`, `prompt_embeds`, and `crop_offset`, `prompt`,
  `image_path`;
- videos: `video_latents` `[1, C, T, H, W]`, `text_embeddings` `[1, S, E]`, `metadata`, and further entries for the model;
- edits of images, in `samples/`: `target_latent`, the list `context_latents`, `prompt_embeddings` and `metadata`.

Each sample is the dict of one file, with further entries from its item, such as `aspect_ratio`. The name of a sample is the
path of the file without suffix, `512x768/0cc175b9c0f1b6a8`. Tensors keep the batch dimension of 1 that the files have.

`cache_file` is looked up in the imported folder by its last parts. So a cache that was moved or copied can be imported, and no
file outside the folder is read. Files that `metadata.json` does not list are reported. Without `metadata.json`, all `.meta`
files, and all `.pt` files in these folders, are samples.

`.meta` files of old versions are pickles with numpy arrays, which stay arrays. Without `metadata.json`, these files and `.pt`
files need `--format nemo`.

The processor, model and options in `metadata.json` become the provenance.
"""

from __future__ import annotations

import os.path
import re
from functools import partial
from typing import Any

from wds_tensorcache.codec.skeleton.limits import check_depth
from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.safe_files import load_torch
from wds_tensorcache.importers.source import Faults, Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder, naming

_METADATA = "metadata.json"
_FILE = re.compile(r"(?:.*/)?(?:\d+x\d+(?:x\d+)?/[^/]+\.pt|samples/sample_\d{8}\.pt|[^/]+\.meta)", re.ASCII | re.DOTALL)
_COUNTS = ("shards", "num_shards", "shard_size", "total_items")


def _recognize(folder: SourceFolder) -> int:
    roots = tuple(root for root in _roots(folder) if f"{root}metadata_shard_0000.json" in folder)
    is_torch = False  # other programs write other `.meta` files
    for meta in folder.by_suffix.get(".meta", [])[:1]:
        with folder.open(meta) as file:
            is_torch = file.read(4) == b"PK\x03\x04"
    return sum(name.startswith(roots) or (is_torch and name.endswith(".meta")) for name in _files(folder))


def _open(folder: SourceFolder) -> Source:
    provenance: dict[str, Any] = {}
    bad = Faults()
    items: dict[str, dict[str, Any]] = {}
    doubles: list[str] = []
    metadata_files: list[str] = []
    roots = []
    for root in _roots(folder):
        shards: Any = None
        with bad.of(root + _METADATA):
            described = read_json(folder, root + _METADATA, dict)
            shards = described.get("shards")
        if not isinstance(shards, list):  # the file of another program
            continue
        roots.append(root)
        provenance[root.rstrip("/")] = {key: value for key, value in described.items() if key not in _COUNTS}
        names = [f"{root}{shard}" for shard in shards]
        metadata_files += [root + _METADATA, *names]
        for name in names:
            listed: list[Any] = []
            with bad.of(name):
                if name not in folder:
                    raise FormatError(f"is missing, but {root}{_METADATA} lists it")
                listed = read_json(folder, name, list)
            for number, item in enumerate(listed):
                file = _locate(folder, root, item.get("cache_file") if isinstance(item, dict) else None)
                if file is None:
                    bad[f"{name}, item {number}"] = f"its cache_file is not in the folder: {item!r:.200}"
                elif items.setdefault(file, item) is not item:
                    doubles.append(f"item {number} of {name}")
    for name in _files(folder):
        if name not in items and name.startswith(tuple(roots)):
            bad[name] = f"is not listed by {_METADATA}"
        else:
            items.setdefault(name, {})
    samples = [
        SourceSample(os.path.splitext(name)[0], (name,), partial(_load, folder, name, item))
        for name, item in items.items()
    ]
    described = next(iter(provenance.values())) if len(provenance) == 1 else {"caches": provenance}
    notes = []
    if doubles:
        problem = f"{len(doubles):,} items have the cache_file of an earlier item, and were not used"
        notes.append(f"{problem}, for example {', '.join(doubles[:3])}")
    return Source(samples, described, bad, metadata_files, notes)


def _roots(folder: SourceFolder) -> list[str]:
    names = folder.by_suffix.get(".json", ())
    return [name[: -len(_METADATA)] for name in names if f"/{name}".endswith(f"/{_METADATA}")]


def _files(folder: SourceFolder) -> list[str]:
    return [name for suffix in (".pt", ".meta") for name in folder.by_suffix.get(suffix, ()) if _FILE.fullmatch(name)]


def read_json(folder: SourceFolder, name: str, expected: type) -> Any:
    """Return the JSON in a file; raise FormatError for a wrong type. In a dict, NaN and infinities become texts."""
    with naming(name):
        content = folder.read_json(name, names_nan=expected is dict)
        if not isinstance(content, expected):
            raise FormatError(f"contains a JSON {type(content).__name__}, expected a {expected.__name__}")
        if expected is dict:
            check_depth(content)  # it becomes part of the fingerprint
        return content


def _locate(folder: SourceFolder, root: str, cache_file: object) -> str | None:
    """Find a `cache_file` in `root` by the last parts of its path."""
    parts = cache_file.replace("\\", "/").split("/") if isinstance(cache_file, str) else []
    names = (root + "/".join(parts[at:]) for at in range(len(parts)))
    return next((name for name in names if name in folder and name.endswith((".pt", ".meta"))), None)


def _load(folder: SourceFolder, name: str, item: dict[str, Any]) -> Loaded:
    value = load_torch(folder, name)
    if not isinstance(value, dict):
        raise FormatError(f"contains {type(value).__name__}, expected a dict").at(name)
    return Loaded(value | {key: part for key, part in item.items() if key not in value and key != "cache_file"})


FORMAT = Format(
    "nemo",
    "NeMo Automodel: .pt files in {W}x{H}/ or samples/ folders listed by metadata.json, or .meta files",
    _recognize,
    _open,
)
