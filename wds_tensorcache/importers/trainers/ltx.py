"""LTX-Video-Trainer and the LTX-2 trainer: parallel folders of `.pt` files in `.precomputed/`.

`.precomputed/` contains a folder for each kind of data. Each folder has the same tree as the media files, with one `.pt` file
for each media file:

- `latents/`: `{"latents", "num_frames", "height", "width", "fps"}`. The latents are `[C, F, H, W]`, or `[F * H * W, C]` from
  old versions. `num_frames`, `height` and `width` are sizes of the latents.
- `conditions/`: `{"prompt_embeds", "prompt_attention_mask"}`, from LTX-2 `{"video_prompt_embeds", "prompt_attention_mask"}`,
  and `audio_prompt_embeds` for audio. Padding is on the left, and newer versions do not store it.
- `audio_latents/`, `reference_latents/`, masks, and any other folder that the training configuration names.

Each sample is one media file: a dict with the content of its files by folder, as the trainer's dataset returns it:

    {"latents": {"latents": …, "num_frames": 4, "height": 16, "width": 24, "fps": 24.0},
     "conditions": {"video_prompt_embeds": …, "prompt_attention_mask": …}, "audio_latents": {…}}

Its name is the path of the media file without suffix. Old versions number the files: `latents/latent_7.pt` belongs to
`conditions/condition_7.pt`. The content is stored as it is, so old latents stay `[F * H * W, C]`.

The trainer skips a media file without latents or conditions. The import reports such a file, unless the whole folder is
missing. Files of other folders may be missing, for example for clips without audio. Temporary files of an interrupted run
(`.pt.tmp.1234`) are not read.
"""

from __future__ import annotations

import os.path
import re
from functools import partial

from wds_tensorcache.importers.safe_files import load_torch
from wds_tensorcache.importers.source import Format, Loaded, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder

_PRECOMPUTED = ".precomputed"
_LATENTS, _CONDITIONS = "latents", "conditions"


def _recognize(folder: SourceFolder) -> int:
    return sum(len(files) for stems in _find(folder).values() for files in stems.values())


def _open(folder: SourceFolder) -> Source:
    samples = []
    bad: dict[str, str] = {}
    every_kind: set[str] = set()
    for root, stems in _find(folder).items():
        kinds = {kind for files in stems.values() for kind in files}
        every_kind |= kinds
        prefix = root.removesuffix("/").removesuffix(_PRECOMPUTED).strip("/")
        for stem, files in stems.items():
            missing = [kind for kind in (_LATENTS, _CONDITIONS) if kind in kinds and kind not in files]
            if missing:
                bad.update(dict.fromkeys(files.values(), f"has no file in {root}{missing[0]}/"))
            else:
                load = partial(_load, folder, files)
                samples.append(SourceSample(f"{prefix}/{stem}".lstrip("/"), tuple(files.values()), load))
    return Source(samples, {"folders": sorted(every_kind)}, bad)


def _find(folder: SourceFolder) -> dict[str, dict[str, dict[str, str]]]:
    """Return the `.pt` files by root, stem and folder."""
    kinds: dict[str, set[str]] = {}
    names = folder.by_suffix.get(".pt", [])
    for name in names:
        parts = name.split("/")
        for depth, part in enumerate(parts[:-1]):
            if part in (_LATENTS, _CONDITIONS):
                kinds.setdefault("".join(f"{parent}/" for parent in parts[:depth]), set()).add(part)
    path = f"/{os.path.basename(os.path.abspath(folder.path))}/"
    end = f"/{_PRECOMPUTED}/"  # latents alone are common in other formats
    # a root is empty or ends with `/`
    roots = sorted(root for root in kinds if len(kinds[root]) == 2 or (path + root).endswith(end))
    files: dict[str, dict[str, dict[str, str]]] = {}
    for name in names:
        root = next((root for root in roots if name.startswith(root)), None)
        if root is not None and "/" in name[len(root) :]:
            kind, _, stem = name[len(root) : -len(".pt")].partition("/")
            # `condition_7` belongs to `latent_7`
            paired = re.sub(r"(^|/)condition_(?=[^/]*$)", r"\1latent_", stem) if kind == _CONDITIONS else stem
            stem = paired if f"{root}{_LATENTS}/{paired}.pt" in folder else stem
            files.setdefault(root, {}).setdefault(stem, {})[kind] = name
    return files


def _load(folder: SourceFolder, files: dict[str, str]) -> Loaded:
    return Loaded({kind: load_torch(folder, name) for kind, name in files.items()})


FORMAT = Format(
    "ltx",
    "LTX-Video-Trainer and LTX-2: .precomputed/ with latents/, conditions/ and further folders of .pt files",
    _recognize,
    _open,
)
