"""All import formats, and the choice of a folder's format."""

from __future__ import annotations

import re
from contextlib import suppress

from wds_tensorcache.errors import FormatError, unknown_name
from wds_tensorcache.importers.generic import (
    file_folder,
    hf_datasets,
    litdata,
    mds,
    webdataset_members,
)
from wds_tensorcache.importers.source import Format
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.importers.trainers import (
    ai_toolkit,
    comfyui,
    diffusion_pipe,
    edm2,
    fastvideo,
    kohya_npz,
    kohya_safetensors,
    lightningdit,
    ltx,
    musubi,
    nemo,
    nemo_hidden_states,
    onetrainer,
    simpletuner,
)

FORMATS: tuple[Format, ...] = (
    ai_toolkit.FORMAT,
    comfyui.FORMAT,
    diffusion_pipe.FORMAT,
    edm2.FORMAT,
    fastvideo.FORMAT,
    file_folder.FORMAT,
    hf_datasets.FORMAT,
    kohya_npz.FORMAT,
    kohya_safetensors.FORMAT,
    lightningdit.FORMAT,
    litdata.FORMAT,
    ltx.FORMAT,
    mds.FORMAT,
    musubi.FORMAT,
    nemo.FORMAT,
    nemo_hidden_states.FORMAT,
    onetrainer.FORMAT,
    simpletuner.FORMAT,
    webdataset_members.FORMAT,
)


def choose_format(folder: SourceFolder, name: str) -> Format:
    """Return the format called `name`, or the format that a folder has.

    For "auto", exactly one format must recognize files. A generic format counts only if no other format recognizes files.

    Raises:
        ValueError: No format is called `name`. Or, for "auto", no format or several formats fit the folder.
    """
    if name != "auto":
        by_name = {form.name: form for form in FORMATS}
        if name not in by_name:
            raise ValueError(unknown_name("format", name, list(by_name)))
        return by_name[name]
    fitting = [(form, count) for form in FORMATS if (count := _recognize(form, folder))]
    fitting = [(form, count) for form, count in fitting if not form.is_generic] or fitting
    if len(fitting) > 1:
        listed = ", ".join(f"{form.name} ({count:,} files)" for form, count in fitting)
        raise ValueError(
            f"{folder.path} has files of several formats: {listed}; pass one of them as --format (format=)"
        )
    if fitting:
        return fitting[0][0]
    shard = webdataset_members.find_shard(folder)
    if shard is not None:
        raise ValueError(
            f"{folder.path} is a cache already: {shard} is one of its shards. tc.open reads it, `tensorcache merge` copies its "
            "samples and those of other caches into one cache, and `tensorcache reshard` into shards of another length"
        )
    problem = f"{folder.path}: no file, of {len(folder.names):,}, belongs to a known format"
    remedy = "--list-formats lists the formats; to compute tensors of pictures or texts, use tc.build"
    raise ValueError(f"{problem}; {folder.first_fault() or remedy}")


def _recognize(form: Format, folder: SourceFolder) -> int:
    if isinstance(form.files, re.Pattern):
        return len(list(filter(form.files.fullmatch, folder.names)))
    with suppress(FormatError):  # a bad file, which the import reports
        return form.files(folder)
    return 0
