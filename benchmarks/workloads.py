"""The measured samples: three workloads, how to use their tensors, and how to compare two samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

Tensors = dict[str, Any]  # by the short names that peers store them under; lazy tensors too
Small = dict[str, Any]  # JSON's types and tuples; "index" says which sample it is


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples of one kind, and their numbers stored and measured."""

    name: str
    title: str
    count: int  # samples stored
    timed: int  # samples that one timed pass reads, a multiple of batch_size
    written: int  # samples that one timed pass writes
    batch_size: int
    sample: Callable[[int], Any]  # the nested sample of an index
    split: Callable[[Any], tuple[Tensors, Small]]  # a nested sample, or a batch, as its parts
    nest: Callable[[Tensors, Small], Any]  # and back
    dtypes: dict[str, torch.dtype]  # of the tensors, by their short names
    one: tuple[str, str]  # the tensor that `one_tensor` reads: its short name, its path in the sample
    ragged: dict[str, str]  # tensors whose first dimension varies: the small value that says how long it is

    def touch(self, sample: Any) -> None:
        """Use every tensor: read one byte of each page."""
        for tensor in self.split(sample)[0].values():
            loaded = tensor if isinstance(tensor, torch.Tensor) else tensor.load()
            flat = loaded.view(-1) if loaded.is_contiguous() else loaded.flatten(1)  # rows with gaps between them
            int(flat.view(torch.uint8)[..., ::4096].sum())

    def checksum(self, sample: Any) -> tuple[Any, ...]:
        """Return a checksum that is equal for equal samples."""
        tensors, small = self.split(sample)
        return (*self.digests(tensors), small)

    def digests(self, tensors: Tensors) -> tuple[Any, ...]:
        """Return the digests of a sample's tensors."""
        return tuple(_digest(tensors[name], dtype) for name, dtype in self.dtypes.items())


def _digest(tensor: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    loaded = tensor if isinstance(tensor, torch.Tensor) else tensor.load()
    if loaded.dtype != dtype:
        raise AssertionError(f"expected {dtype}, read {loaded.dtype}")
    content = loaded.contiguous().view(-1).view(torch.uint8).numpy()
    return tuple(loaded.shape), xxhash.xxh3_64_intdigest(content)


def tensor_at(sample: Any, path: str) -> Any:
    """Return the tensor of a nested sample, or of a nested batch, at its path."""
    for step in path.split("."):
        sample = sample[int(step) if step.isdigit() else step]
    return sample


class Generated(Sequence[Any]):
    """Samples, or what is computed from them, generated on access."""

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        chosen = range(self._count)[index]  # raises IndexError at the end
        return [*map(self._make, chosen)] if isinstance(chosen, range) else self._make(chosen)


def _random(index: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def _diffusion(index: int) -> dict[str, Any]:
    """Return a sample as diffusion trainers cache it: 450 KB in three fp16 tensors, and some small values."""
    samples, text, pooled = (t.half() for t in _random(index, (1, 4, 128, 128), (1, 77, 2048), (1, 1280)))
    prompt = f"photograph number {index} of a harbour at dawn"
    conditioning = {"pooled_output": pooled, "prompt": prompt, "size": (1024, 1024), "crop": (0, 0)}
    return {"latent": {"samples": samples}, "cond": [[text, conditioning]], "seed": index}


def _split_diffusion(sample: Any) -> tuple[Tensors, Small]:
    ((text, conditioning),) = sample["cond"]
    tensors = {"samples": sample["latent"]["samples"], "text": text, "pooled_output": conditioning["pooled_output"]}
    return tensors, {"index": sample["seed"]} | {name: conditioning[name] for name in ("prompt", "size", "crop")}


def _nest_diffusion(tensors: Tensors, small: Small) -> dict[str, Any]:
    pairs = {"size": tuple(small["size"]), "crop": tuple(small["crop"])}
    conditioning = {"pooled_output": tensors["pooled_output"], "prompt": small["prompt"], **pairs}
    latent = {"samples": tensors["samples"]}
    return {"latent": latent, "cond": [[tensors["text"], conditioning]], "seed": small["index"]}


def _features(index: int) -> dict[str, Any]:
    """Return a sample as embeddings are cached: 384 float32, two ids."""
    return {
        "features": _random(index, (384,))[0],
        "meta": {"id": f"item-{index:08d}", "label": index % 1000},
        "index": index,
    }


def _split_features(sample: Any) -> tuple[Tensors, Small]:
    return {"features": sample["features"]}, {"index": sample["index"], **sample["meta"]}


def _nest_features(tensors: Tensors, small: Small) -> dict[str, Any]:
    meta = {"id": small["id"], "label": small["label"]}
    return {"features": tensors["features"], "meta": meta, "index": small["index"]}


def _text(index: int) -> dict[str, Any]:
    """Return a sample as text encoders' states are cached without padding: bf16 of 20 to 76 tokens."""
    tokens = 20 + index % 57
    states = _random(index, (tokens, 256))[0].bfloat16()
    encoded = {"states": states, "pooled": states.mean(0), "tokens": tokens}
    return {"text": encoded, "prompt": f"caption number {index}", "index": index}


def _split_text(sample: Any) -> tuple[Tensors, Small]:
    encoded = sample["text"]
    small = {"index": sample["index"], "tokens": encoded["tokens"], "prompt": sample["prompt"]}
    return {"states": encoded["states"], "pooled": encoded["pooled"]}, small


def _nest_text(tensors: Tensors, small: Small) -> dict[str, Any]:
    encoded = {"states": tensors["states"], "pooled": tensors["pooled"], "tokens": small["tokens"]}
    return {"text": encoded, "prompt": small["prompt"], "index": small["index"]}


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="diffusion",
            title="450 KB in three fp16 tensors, nested",
            count=1024,
            timed=1024,
            written=256,
            batch_size=32,
            sample=_diffusion,
            split=_split_diffusion,
            nest=_nest_diffusion,
            dtypes=dict.fromkeys(("samples", "text", "pooled_output"), torch.float16),
            one=("pooled_output", "cond.0.1.pooled_output"),
            ragged={},
        ),
        Workload(
            name="features",
            title="384 float32",
            count=200_000,
            timed=8192,
            written=4096,
            batch_size=1024,
            sample=_features,
            split=_split_features,
            nest=_nest_features,
            dtypes={"features": torch.float32},
            one=("features", "features"),
            ragged={},
        ),
        Workload(
            name="text",
            title="bf16 states of 20 to 76 tokens",
            count=4096,
            timed=4096,
            written=256,
            batch_size=32,
            sample=_text,
            split=_split_text,
            nest=_nest_text,
            dtypes=dict.fromkeys(("states", "pooled"), torch.bfloat16),
            one=("pooled", "text.pooled"),
            ragged={"states": "tokens"},
        ),
    )
}


def quick(workload: Workload) -> Workload:
    """Return the workload with two small batches of samples: enough to test that everything runs, not to compare."""
    batch_size = min(workload.batch_size, 64)
    count = 2 * batch_size
    title = f"{workload.title} (quick: {count} samples)"
    return replace(workload, title=title, batch_size=batch_size, count=count, timed=count, written=count)
