"""`ray_from_torch` is the inverse of `ray_to_torch`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.same import assert_same

pytestmark = pytest.mark.long


def test_a_function_of_batches_changes_tensors_of_any_dtype(tmp_path: Path) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64)
    samples = [
        {
            "many": {str(dtype)[6:]: torch.arange(6).view(2, 3).add(i).to(dtype) for dtype in dtypes},
            "ragged": torch.full((i + 1, 2), i).bfloat16(),
            "prompt": f"photo {i}",
        }
        for i in range(6)
    ]
    with tc.ShardWriter(tmp_path / "cache") as sink:
        for i, sample in enumerate(samples):
            sink.write(f"{i:03d}", sample)

    def changed(batch):  # type: ignore[no-untyped-def]
        tensors = tc.ray.ray_to_torch(batch)
        ragged = [each * 3 for each in tensors["ragged"]]
        columns = {name: value for name, value in tensors.items() if name.startswith("many.")}
        return {**batch, **tc.ray.ray_from_torch({**columns, "ragged": ragged})}

    ds = tc.ray.read_ray(tmp_path / "cache").map_batches(changed, batch_size=3)
    found = tc.ray.write_ray(ds, tmp_path / "again")
    for i, sample in enumerate(samples):
        assert_same({**sample, "ragged": sample["ragged"] * 3}, tc.realize(found[f"{i:03d}"]))
