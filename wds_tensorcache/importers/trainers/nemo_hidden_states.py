"""NeMo Automodel (speculative decoding): hidden states of a target model. The `.safetensors` files have many rows.

A cache of EAGLE-3 or DSpark is a folder with

- `manifest.json`: `num_samples`, `shard_size`, and how the states were made, such as `target_model`, `dtype` and
  `selected_token_ids`, the ids of the tokens in the draft model's vocabulary;
- `shard-000000.safetensors`, …: tensors whose first dimension counts samples, such as `input_ids` and `loss_mask` [n, S]; for
  EAGLE-3, `aux_hidden_states` [n, S, 3 * H] and `target_probs` [n, S, V]; for DSpark, `target_hidden_states`;
- `target_embeddings.safetensors` or `target_weights.safetensors`: weights of the target model, which are not imported.

Each sample is a row, with the names of the tensors in the file:

    {"input_ids": int64 [S], "loss_mask": int64 [S], "aux_hidden_states": [S, 3 * H], …}

The name of a sample is the path of its file without suffix, and the number of the row: `shard-000000/00042`. Only the bytes of
the row are read. If the most probable tokens are stored, `target_probs_values` and `target_probs_indices`, [S, k], replace
`target_probs`.

The manifest without its counts is the provenance. If all files can be read, but contain another number of samples than it
lists, the import reports the difference.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.source import Faults, Format, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.importers.trainers.nemo import read_json
from wds_tensorcache.importers.trainers.rows import list_rows

_SHARD = re.compile(r"((?:.*/)?)shard-\d{6}\.safetensors", re.DOTALL | re.ASCII)
_MANIFEST = "manifest.json"
_COUNTS = ("complete", "num_samples", "shard_size")


def _recognize(folder: SourceFolder) -> int:
    num_files = 0
    for root, names in _caches(folder).items():
        with suppress(FormatError):
            manifest = read_json(folder, root + _MANIFEST, dict)
            num_files += len(names) if {"num_samples", "shard_size"} <= manifest.keys() else 0
    return num_files


def _open(folder: SourceFolder) -> Source:
    bad = Faults()
    samples: list[SourceSample] = []
    caches = _caches(folder)
    provenance: dict[str, Any] = {}
    for root, names in caches.items():
        first = len(samples)
        for name in names:
            with bad.of(name):
                samples += list_rows(folder, name, ["input_ids"])
        with bad.of(root + _MANIFEST):
            manifest = read_json(folder, root + _MANIFEST, dict)
            provenance[root.rstrip("/")] = {key: value for key, value in manifest.items() if key not in _COUNTS}
            count = len(samples) - first
            if manifest.get("num_samples") != count and not bad.keys() & set(names):
                raise FormatError(f"lists {manifest.get('num_samples')!r:.50} samples, but the files have {count:,}")
    described = next(iter(provenance.values())) if len(caches) == 1 and provenance else {"caches": provenance}
    return Source(samples, described, bad, [root + _MANIFEST for root in caches])


def _caches(folder: SourceFolder) -> dict[str, list[str]]:
    """Return the files with hidden states by the folder of their manifest."""
    caches: dict[str, list[str]] = {}
    for match in filter(None, map(_SHARD.fullmatch, folder.by_suffix.get(".safetensors", ()))):
        if match[1] + _MANIFEST in folder:
            caches.setdefault(match[1], []).append(match[0])
    return caches


FORMAT = Format(
    "nemo-hidden-states",
    "NeMo Automodel: shard-*.safetensors of hidden states (EAGLE-3, DSpark) with manifest.json, a sample for each row",
    _recognize,
    _open,
)
