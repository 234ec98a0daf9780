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
        outputs = dali.fn.readers.webdataset(
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
    longest = [letter * (100 - len(".text-2.safetensors")) for letter in "ab"]
    keys = [*longest, "A", "a", "x*", "x?", '"a"', "'a'", "a\\n", "a\\t", "-rf", "--help", "{0}", "%s", "d.e/f", "d/e"]
    named = {"x": torch.rand(3), "y": "é"}
    samples: list[dict[str, Any]] = []
    for i, key in enumerate(keys):
        sample = {"__key__": key, "tensorcache": diffusion_sample(i), "text-2.tensorcache": named}
        samples.append(sample | {"jpg": bytes(range(256)) * i, "meta.raw": b"\x00%d\xff" % i})
    path = write_shard(samples, base=False)
    suffixes = ["skel.pyd", "safetensors", "text-2.skel.pyd", "text-2.safetensors", "jpg", "meta.raw"]
    for i, (sample, found) in enumerate(zip(samples, read_with_dali(path, suffixes, indexed), strict=True)):
        skeleton, tensors, *of_name, jpg, raw = found
        assert (skeleton, tensors) == tc.encode_sample(diffusion_sample(i))
        assert tuple(of_name) == tc.encode_sample(named)
        assert (jpg, raw) == (sample["jpg"], sample["meta.raw"])
        assert_same(diffusion_sample(i), tc.decode_sample(skeleton, tensors, verify=True))
