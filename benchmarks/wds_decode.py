"""Scenario `wds_decode`: the same samples through webdataset's own pipeline, as ours and as what people use today."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import webdataset as wds

import wds_tensorcache as tc
from benchmarks.timing import Rounds, interleaved
from benchmarks.workloads import checksum, diffusion_sample, touch

__all__ = ["run"]


def _write(path: Path, field: str, count: int, value_of: Callable[[dict[str, Any]], Any], **options: Any) -> str:
    with wds.TarWriter(str(path), mtime=0, **options) as sink:
        for index in range(count):
            value = value_of(diffusion_sample(index))
            fields = value if isinstance(value, dict) and "skel.pyd" in value else {field: value}
            sink.write({"__key__": f"{index:06d}", **fields})
    return str(path)


def _npz(sample: dict[str, Any]) -> bytes:
    ((text, conditioning),) = sample["cond"]
    small = pickle.dumps({**{k: v for k, v in conditioning.items() if k != "pooled_output"}, "seed": sample["seed"]})
    arrays = {"samples": sample["latent"]["samples"], "text": text, "pooled_output": conditioning["pooled_output"]}
    stream = io.BytesIO()
    np.savez(stream, small=np.frombuffer(small, np.uint8), **{k: v.numpy() for k, v in arrays.items()})
    return stream.getvalue()


def _decode_npz(sample: dict[str, Any]) -> dict[str, Any]:
    arrays = np.load(io.BytesIO(sample["npz"]))
    small = pickle.loads(arrays["small"].tobytes())
    seed = small.pop("seed")
    text, pooled = torch.from_numpy(arrays["text"]), torch.from_numpy(arrays["pooled_output"])
    latent = {"samples": torch.from_numpy(arrays["samples"])}
    return {"value": {"latent": latent, "cond": [[text, {**small, "pooled_output": pooled}]], "seed": seed}}


def _decode_naively(sample: dict[str, Any]) -> dict[str, Any]:
    """The two members with stock libraries: safetensors.torch.load, pickle.loads, and a walk to put them together."""
    tensors = safetensors.torch.load(sample["safetensors"])

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        return tensors[value[7:]] if isinstance(value, str) and value.startswith("tensor:") else value

    return {"value": fill(pickle.loads(sample["skel.pyd"]))}


def run(folder: Path, count: int, rounds: int) -> Rounds:
    """Return microseconds per sample of each variant and round; what each reads is compared with what was written."""
    ours = _write(folder / "ours.tar", "tensorcache", count, lambda sample: sample, encoder=tc.encoder())
    pyd = _write(folder / "pyd.tar", "pyd", count, lambda sample: sample)
    pth = _write(folder / "pth.tar", "pth", count, lambda sample: sample)
    npz = _write(folder / "npz.tar", "npz", count, _npz, encoder=False)
    expected = [checksum(diffusion_sample(index)) for index in range(count)]
    # name: (shard, stages, field that holds the sample, whether its tensors are used)
    variants: dict[str, tuple[str, list[Any], str | None, bool]] = {
        "raw members": (ours, [], None, False),
        "tensorcache, lazy": (ours, [tc.decode()], "tensorcache", False),
        "tensorcache, lazy, touched": (ours, [tc.decode()], "tensorcache", True),
        "tensorcache, eager": (ours, [tc.decode(lazy=False)], "tensorcache", False),
        "tensorcache, eager, touched": (ours, [tc.decode(lazy=False)], "tensorcache", True),
        "tensorcache, verified, touched": (ours, [tc.decode(verify=True)], "tensorcache", True),
        "safetensors.torch.load, touched": (ours, [wds.map(_decode_naively)], "value", True),
        ".pyd": (pyd, [wds.decode()], "pyd", False),
        ".pyd, touched": (pyd, [wds.decode()], "pyd", True),
        ".pth, touched": (pth, [wds.decode()], "pth", True),
        ".npz, touched": (npz, [wds.map(_decode_npz)], "value", True),
    }

    def samples(shard: str, stages: list[Any]) -> Iterator[dict[str, Any]]:
        return iter(wds.DataPipeline(wds.SimpleShardList(shard), wds.tarfile_to_samples(), *stages))

    def measured(shard: str, stages: list[Any], field: str | None, touched: bool) -> Callable[[], int]:
        def once() -> int:
            seen = 0
            for sample in samples(shard, stages):
                if touched:
                    touch(sample[field])
                seen += 1
            return seen

        return once

    for name, (shard, stages, field, _) in variants.items():
        if field is not None and [checksum(sample[field]) for sample in samples(shard, stages)] != expected:
            raise AssertionError(f"{name}: what was read is not what was written")
    return interleaved({name: measured(*variant) for name, variant in variants.items()}, count, rounds)
