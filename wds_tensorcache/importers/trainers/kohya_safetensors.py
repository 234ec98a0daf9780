"""Caches of kohya's sd-scripts in `.safetensors` files. Its branch `new_cache` writes them (issue 1750 of sd-scripts).

Files, with the size of the image as width x height, and the model in lower case, for example `sdxl`:

- latents: `{stem}_{width}x{height}_{model}.safetensors`;
- text encoder outputs: `{stem}_{model}_{tokens}_te.safetensors` or `{stem}_{model}_{tokens}_m_te.safetensors` (with masks).

They become the samples that `kohya` makes from `.npz` files, with the dtypes of the trainer:

    {
        "latents": [C, h, w], "latents_flipped": …, "alpha_mask": …,
        "original_size": (width, height), "crop_ltrb": (left, top, right, bottom), from the metadata, in pixels,
        "text": {"t5_out": …, "l_pooled": …}, "caption": "…",
    }

If any image has more than one caption, all samples have `texts` and `captions` in place of `text` and `caption`: lists with an
item for each caption. `choose={("t5", "pool"): ("texts.*.t5_out", "texts.*.l_pooled")}` of `tc.Loader` draws one caption. If
texts were encoded with several numbers of tokens, the names are `text_256` and `text_512_m`. A file in which the captions have
different tensors is an error: the branch as of commit f3a85060 mixes up the tensors when it adds a caption to a file.

Each resolution in a file becomes a sample, and the names of samples are made as for `kohya`. If a file has a tensor in several
dtypes, only the widest tensor has the name, and the other tensors have their whole keys. `metadata` contains the other entries
of the metadata, unless they are the same in all files.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.source import Format, Source
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.importers.trainers.joined_files import (
    Content,
    Table,
    TableFiles,
    find_resolutions,
    name_tensors,
    parse_key,
)

_PROMPT = re.compile(r"(.+)_(\d{1,4})", re.DOTALL)


_TABLE = Table(
    "sd-scripts",
    re.compile(r"(?P<stem>.+)_(?P<model>[a-z][a-z0-9]*)_(?P<label>\d+(?:_m)?)_te\.safetensors", re.DOTALL),
    has_crops=True,
    per_file={"latents": re.compile("width|height|crop_ltrb_.*"), "text": re.compile(r"caption\d+")},
)


def _open(folder: SourceFolder) -> Source:
    files = TableFiles(_TABLE, folder)
    files.latents = [replace(file, resolutions=find_resolutions(file.tensors) or [""]) for file in files.latents]
    has_many = any(_split_prompt(key)[0] for text in files.texts for key in text.tensors)
    labels = {text.label for text in files.texts}
    files.provenance["tokens"] = sorted(labels)
    # Hazard: after a second caption changes the structure, a resumed import would mix samples of both.
    files.provenance |= {"structure": "lists of texts"} if has_many else {}

    def add(sample: dict[str, Any], content: Content) -> str:
        if content.resolution is not None:
            sample.update(_latents(content, content.resolution))
            return "latents"
        prompts = _prompts(content.tensors)
        captions = [content.metadata.get(f"caption{number + 1}") for number in range(len(prompts))]
        kind, states = ("texts", prompts) if has_many else ("text", prompts[0])
        of_caption, caption = ("captions", captions) if has_many else ("caption", captions[0])
        if sample.setdefault(of_caption, caption) != caption:
            raise FormatError("has another caption than the texts of other lengths")
        name = f"{kind}_{content.file.label}" if len(labels) > 1 else kind
        sample[name] = states
        return name

    return files.join(add)


def _latents(content: Content, resolution: str) -> dict[str, Any]:
    """Return the entries of a sample for a resolution, for example `_64x64`."""
    ends = {key: parse_key(key).resolution for key in sorted(content.tensors)}
    sample = content.name_latents({key: tensor for key, tensor in content.tensors.items() if ends[key] == resolution})
    if f"crop_ltrb{resolution}" in content.metadata:
        sample["crop_ltrb"] = content.numbers(f"crop_ltrb{resolution}", count=4)
    resolutions = find_resolutions(ends)
    other = {key: content.tensors[key] for key, end in ends.items() if end not in resolutions}
    return sample | ({"other": other} if other else {})


def _split_prompt(key: str) -> tuple[int, str]:
    """Split a tensor name into prompt number and name: `(1, "t5_out_bfloat16")`."""
    content, _, dtype = parse_key(key)
    match = _PROMPT.fullmatch(content)
    return (int(match[2]), match[1] + (f"_{dtype}" if dtype else "")) if match else (0, key)


def _prompts(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    prompts: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = _split_prompt(key)
        if name in prompts.setdefault(number, {}):
            raise FormatError(f"has two tensors for {name!r:.100} of prompt {number}")
        prompts[number][name] = tensor
    if prompts.keys() != set(range(len(prompts))) or not prompts:
        raise FormatError(f"has prompts {sorted(prompts)}, expected numbers from 0 on")
    contents = {number: sorted({parse_key(key).content for key in prompt}) for number, prompt in prompts.items()}
    for number in sorted(prompts):
        if contents[number] != contents[0]:
            raise FormatError(
                f"prompts 0 and {number} have different tensors, {contents[0]} and {contents[number]}, as some versions of the "
                "branch new_cache wrote them; encode the texts again"
            )
    return [name_tensors(prompts[number]) for number in sorted(prompts)]


FORMAT = Format(
    "kohya-safetensors",
    "kohya sd-scripts, branch new_cache: the same data in .safetensors files",
    _TABLE.recognize,
    _open,
)
