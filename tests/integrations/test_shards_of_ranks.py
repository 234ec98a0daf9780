"""Streams divide shards among ranks first, so that no rank goes without while another has several."""

from __future__ import annotations

from pathlib import Path

import pytest
import webdataset as wds
from torch.utils.data import DataLoader

import wds_tensorcache as tc

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def write_shards(folder: Path, num_shards: int, num_samples: int = 1, nbytes: int = 1) -> list[str]:
    urls = []
    for shard in range(num_shards):
        urls.append(str(folder / f"{shard:03d}.tar"))
        with wds.TarWriter(urls[-1]) as sink:
            for i in range(num_samples):
                sink.write({"__key__": f"{shard}-{i}", "bin": bytes(nbytes)})
    return urls


def keys(urls: list[str], rank: int, world_size: int, num_workers: int) -> list[str]:
    stream = tc.ResumablePipeline(urls, rank=rank, world_size=world_size)
    return [sample["__key__"] for sample in DataLoader(stream, batch_size=None, num_workers=num_workers)]


@pytest.mark.parametrize(
    ("num_shards", "num_samples", "num_workers", "counts"),
    [
        (3, 4, 4, [8, 4]),
        (5, 4, 0, [8, 8, 4]),
        pytest.param(100, 1, 8, [13] * 4 + [12] * 4, marks=pytest.mark.long),
    ],
)
def test_every_rank_has_its_part(
    tmp_path: Path, num_shards: int, num_samples: int, num_workers: int, counts: list[int]
) -> None:
    urls = write_shards(tmp_path, num_shards, num_samples)
    parts = [keys(urls, rank, len(counts), num_workers) for rank in range(len(counts))]
    assert [len(part) for part in parts] == counts
    assert len({key for part in parts for key in part}) == num_shards * num_samples


@pytest.mark.long
def test_the_number_of_workers_does_not_change_the_shards_of_a_rank(tmp_path: Path) -> None:
    urls = []
    for size in (100, 90_000, 2_000, 50_000, 10, 30_000, 7_000):
        (tmp_path / f"{size}").mkdir()
        urls += write_shards(tmp_path / f"{size}", 1, nbytes=size)
    nbytes = {url: Path(url).stat().st_size for url in urls}
    parts = []
    for num_workers in (0, 1, 3):
        streams = [tc.ResumablePipeline(urls, rank=rank, world_size=2) for rank in range(2)]
        loaders = [DataLoader(stream, batch_size=None, num_workers=num_workers) for stream in streams]
        parts.append([sorted(sample["__url__"] for sample in loader) for loader in loaders])
    assert parts[0] == parts[1] == parts[2]
    first, second = (sum(nbytes[url] for url in part) for part in parts[0])
    assert abs(first - second) <= max(nbytes.values())
