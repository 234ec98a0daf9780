"""Datasets of caches in an object store, and caches written and built there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.data
import torch
from ray.data.expressions import col

import wds_tensorcache as tc
from tests.ray_data.conftest import by_key, every_kind
from tests.remote.servers.write_server import WriteServer
from tests.same import assert_same

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("write_server")]
URL = "s3://bucket/cache"


class Double:
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": 2 * batch["x"].bfloat16()}


def test_written_read_and_built(every_kind_cache: Path, write_server: WriteServer) -> None:
    dataset = tc.ray.read_ray(every_kind_cache, exact=True, override_num_blocks=3)
    first, rest = (dataset.filter(expr=part) for part in (col("__key__") < "0010", col("__key__") >= "0010"))
    tc.ray.write_ray(first, URL).close()
    with pytest.raises(FileExistsError, match="append=True"):
        tc.ray.write_ray(rest, URL)
    with pytest.raises(tc.InvalidKeyError, match="0000"):
        tc.ray.write_ray(dataset, URL, append=True)
    with tc.ray.write_ray(rest, URL, append=True) as cache:
        assert sorted(cache.keys()) == [f"{i:04d}" for i in range(40)]
    for i, row in enumerate(by_key(tc.ray.read_ray(URL, exact=True, override_num_blocks=2))):
        assert_same(every_kind(i), tc.ray.ray_sample(row))
    shards = {name for name in write_server.objects("cache/") if name.endswith(".tar")}
    assert len(shards) == cache.num_shards
    assert [name for name in write_server.objects("cache/") if ".ray-" in name] == []
    with tc.ray.write_ray(first, URL, overwrite=True) as cache:
        assert len(cache) == 10
    assert not shards & write_server.objects("cache/").keys()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("equal", [False, True], ids=["ragged", "equal"])
def test_values_of_a_task_are_read_together(write_server: WriteServer, equal: bool, exact: bool) -> None:
    with tc.ShardWriter(URL) as writer:
        for i in range(60):
            sample = {"x": torch.zeros(3 + (0 if equal else i % 5)), "prompt": f"photo {i}"}
            writer.write(f"{i:04d}", sample if equal or i % 7 else {**sample, "more": i})
    write_server.log()
    rows = by_key(tc.ray.read_ray(URL, exact=exact, override_num_blocks=1))
    assert len(rows) == 60
    requests = [key for method, key, _ in write_server.log() if method == "GET" and key.endswith(".tar")]
    assert 0 < len(requests) < 20


def test_built() -> None:
    rows = [{"id": i, "x": np.full(3, i, np.float32)} for i in range(20)]
    items = ray.data.from_items(rows, override_num_blocks=2)
    options = {"fingerprint": {"made": 1}, "key": "id", "batch_size": 4}
    for count in (5, 20):
        with tc.ray.build_ray(items.limit(count), Double, "s3://bucket/built", **options) as cache:
            assert sorted(map(int, cache.keys())) == list(range(count))
            assert_same({"y": torch.full((3,), 8.0).bfloat16()}, cache["4"])
