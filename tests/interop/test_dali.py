"""DALI's own webdataset reader, on the CPU, with and without an index, returns the members' bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.same import assert_same

INSTALL = "needs NVIDIA DALI: pip install nvidia-dali-cuda130 (runs without a GPU)"
dali = pytest.importorskip("nvidia.dali", reason=INSTALL)
wds2idx = pytest.importorskip("wds2idx", reason=INSTALL)

index_or_not = pytest.mark.parametrize("indexed", [True, False], ids=["wds2idx", "no index"])


def read_with_dali(path: str, fields: list[str], indexed: bool) -> list[list[bytes]]:
    """Return the bytes of each field of each sample in one epoch."""
    index_paths = []
    if indexed:
        index_paths = [str(Path(path).with_suffix(".idx"))]
        with wds2idx.IndexCreator(path, index_paths[0], verbose=False) as index:
            index.create_index()

    @dali.pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def pipeline() -> Any:
        reader = dali.fn.readers.webdataset
        outputs = reader(
            paths=[path], index_paths=index_paths, ext=fields, missing_component_behavior="error", name="reader"
        )
        return tuple(outputs) if len(fields) > 1 else outputs

    pipe = pipeline()
    pipe.build()
    epoch = [pipe.run() for _ in range(pipe.epoch_size("reader"))]
    assert all(output.at(0).dtype == np.uint8 and output.at(0).ndim == 1 for batch in epoch for output in batch)
    return [[output.at(0).tobytes() for output in batch] for batch in epoch]


@index_or_not
def test_members_come_back(write_shard: Callable[..., str], indexed: bool) -> None:
    fields = [{"jpg": bytes(range(256)) * i, "meta.raw": b"\x00%d\xff" % i} for i in range(1, 6)]
    named = {"x": torch.rand(3), "y": "é"}
    caches = [{"tensorcache": diffusion_sample(i), "text-2.tensorcache": named} for i in range(5)]
    path = write_shard([{"__key__": f"d/{i:03d}", **cache, **fields[i]} for i, cache in enumerate(caches)], base=False)
    suffixes = ["skel.pyd", "safetensors", "text-2.skel.pyd", "text-2.safetensors", "jpg", "meta.raw"]
    samples = read_with_dali(path, suffixes, indexed)
    assert len(samples) == 5
    for i, (skeleton, tensors, *of_name, jpg, raw) in enumerate(samples):
        assert (skeleton, tensors) == tc.encode_sample(diffusion_sample(i))
        assert tuple(of_name) == tc.encode_sample(named)
        assert (jpg, raw) == tuple(fields[i].values())
        assert_same(diffusion_sample(i), tc.decode_sample(skeleton, tensors, verify=True))


@index_or_not
def test_keys_that_are_allowed(write_shard: Callable[..., str], indexed: bool) -> None:
    longest = [letter * (100 - len(".safetensors")) for letter in "ab"]
    keys = [*longest, "A", "a", "x*", "x?", '"a"', "'a'", "a\\n", "a\\t", "-rf", "--help", "{0}", "%s", "d.e/f", "d/e"]
    path = write_shard([{"__key__": key, "tensorcache": {"key": key, "x": torch.arange(3)}} for key in keys])
    samples = read_with_dali(path, ["skel.pyd", "safetensors"], indexed)
    assert [tc.decode_sample(*sample)["key"] for sample in samples] == keys
