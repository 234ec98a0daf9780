"""The measured samples: three workloads, how to use their tensors, and how to compare two samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import xxhash

Tensors = dict[str, Any]  # by the short names that peers store them under; lazy tensors too
Small = dict[str, Any]  # JSON's types and tuples; "index" says which sample it is


@dataclass(frozen=True)
class Workload:
    """Samples of one kind, and their numbers stored and measured."""

    name: ClassVar[str]
    title: ClassVar[str]
    names: ClassVar[tuple[str, ...]]  # the short names of the tensors
    one: ClassVar[tuple[str, str]]  # the tensor that `one_tensor` reads: its short name, its path in the sample
    ragged: ClassVar[
        dict[str, str]
    ] = {}  # tensors whose first dimension varies: the small value that says how long it is
    sample: ClassVar[Callable[..., Any]]  # the nested sample of an index
    split: ClassVar[Callable[..., tuple[Tensors, Small]]]  # a nested sample, or a batch, as its parts
    nest: ClassVar[Callable[..., Any]]  # and back

    count: int  # samples stored
    timed: int  # samples that one timed pass reads, a multiple of batch_size
    written: int  # samples that one timed pass writes
    batch_size: int

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
        """Return the digests of a sample's tensors, with their dtypes and shapes."""
        parts = (tensors[name] for name in self.names)
        loaded = (part if isinstance(part, torch.Tensor) else part.load() for part in parts)
        return tuple((t.dtype, tuple(t.shape), xxhash.xxh3_64_intdigest(flat_bytes(t))) for t in loaded)


def flat_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor, without a copy if it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


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


class _Diffusion(Workload):
    """Samples as diffusion trainers cache them: 450 KB in three fp16 tensors, and some small values."""

    name, title = "diffusion", "450 KB in three fp16 tensors, nested"
    names = ("samples", "text", "pooled_output")
    one = ("pooled_output", "cond.0.1.pooled_output")

    def sample(self, index: int) -> Any:
        tensors = (tensor.half() for tensor in _random(index, (1, 4, 128, 128), (1, 77, 2048), (1, 1280)))
        small = {"prompt": f"photograph number {index} of a harbour at dawn", "size": (1024, 1024), "crop": (0, 0)}
        return self.nest(dict(zip(self.names, tensors, strict=True)), small | {"index": index})

    def split(self, sample: Any) -> tuple[Tensors, Small]:
        ((text, conditioning),) = sample["cond"]
        tensors = {"samples": sample["latent"]["samples"], "text": text, "pooled_output": conditioning["pooled_output"]}
        return tensors, {"index": sample["seed"]} | {name: conditioning[name] for name in ("prompt", "size", "crop")}

    def nest(self, tensors: Tensors, small: Small) -> Any:
        pairs = {"size": tuple(small["size"]), "crop": tuple(small["crop"])}
        conditioning = {"pooled_output": tensors["pooled_output"], "prompt": small["prompt"], **pairs}
        latent = {"samples": tensors["samples"]}
        return {"latent": latent, "cond": [[tensors["text"], conditioning]], "seed": small["index"]}


class _Features(Workload):
    """Samples as embeddings are cached: 384 float32, two ids."""

    name, title = "features", "384 float32"
    names = ("features",)
    one = ("features", "features")

    def sample(self, index: int) -> Any:
        small = {"id": f"item-{index:08d}", "label": index % 1000, "index": index}
        return self.nest({"features": _random(index, (384,))[0]}, small)

    def split(self, sample: Any) -> tuple[Tensors, Small]:
        return {"features": sample["features"]}, {"index": sample["index"], **sample["meta"]}

    def nest(self, tensors: Tensors, small: Small) -> Any:
        meta = {"id": small["id"], "label": small["label"]}
        return {"features": tensors["features"], "meta": meta, "index": small["index"]}


class _Text(Workload):
    """Samples as text encoders' states are cached without padding: bf16 of 20 to 76 tokens."""

    name, title = "text", "bf16 states of 20 to 76 tokens"
    names = ("states", "pooled")
    one = ("pooled", "text.pooled")
    ragged: ClassVar = {"states": "tokens"}

    def sample(self, index: int) -> Any:
        states = _random(index, (20 + index % 57, 256))[0].bfloat16()
        small = {"tokens": len(states), "prompt": f"caption number {index}", "index": index}
        return self.nest({"states": states, "pooled": states.mean(0)}, small)

    def split(self, sample: Any) -> tuple[Tensors, Small]:
        encoded = sample["text"]
        small = {"index": sample["index"], "tokens": encoded["tokens"], "prompt": sample["prompt"]}
        return {"states": encoded["states"], "pooled": encoded["pooled"]}, small

    def nest(self, tensors: Tensors, small: Small) -> Any:
        encoded = {"states": tensors["states"], "pooled": tensors["pooled"], "tokens": small["tokens"]}
        return {"text": encoded, "prompt": small["prompt"], "index": small["index"]}


WORKLOADS: dict[str, Workload] = {
    "diffusion": _Diffusion(count=1024, timed=1024, written=256, batch_size=32),
    "features": _Features(count=200_000, timed=8192, written=4096, batch_size=1024),
    "text": _Text(count=4096, timed=4096, written=256, batch_size=32),
}
# two small batches each: enough to test that everything runs, not to compare
QUICK: dict[str, Workload] = {
    name: replace(workload, count=64, timed=64, written=64, batch_size=32) for name, workload in WORKLOADS.items()
}
