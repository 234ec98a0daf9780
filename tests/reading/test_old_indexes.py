"""Indexes of old writers, which do not list further names of tensors, and indexes that give wrong ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.reading.test_further_names import COUNT, FLIPPED, rows, sample
from wds_tensorcache.shards.footer import build_footer
from wds_tensorcache.shards.index_builder import CacheEntry, IndexBuilder, scan_shard


def write_old(folder: Path, samples: list[Any]) -> str:
    """Write a shard, and next to it an index without further names."""
    write(folder, samples, max_samples=len(samples), footer=False)
    (path,) = folder.glob("*.tar")
    raw = path.read_bytes()
    index = scan_shard(lambda begin, end: raw[begin:end], len(raw))
    old, columns = IndexBuilder(), index.caches[""]
    for row, key in enumerate(index.keys):
        layout = index.layouts[columns.layout.item(row)]
        begins = columns.skeleton_begin.item(row), columns.skeleton_nbytes.item(row), columns.tensors_begin.item(row)
        old.add(key, [CacheEntry("", *begins, layout, columns.digest.item(row), layout.texts)], [])
    Path(f"{path}.index").write_bytes(build_footer(old.finish(index.end), len(raw)))
    return str(folder)


def test_old_indexes(tmp_path: Path) -> None:
    folder = write_old(tmp_path / "c", [sample(i) for i in range(COUNT)])
    for numbers in ([1, 3], [0, 1], [1, 0], range(COUNT), [0, 2, 1]):
        for collate in ("stack", "list", "pad"):
            with tc.open(folder) as cache:
                batch = cache.read_batch(numbers, collate=collate)
                assert rows(batch["latent_flipped"]) == [FLIPPED[i] for i in numbers]
                assert batch["n"] == list(numbers)
            with tc.open(folder) as cache:
                view = cache.select("latent_flipped")
                assert rows(view.read_batch(numbers, collate=collate)["latent_flipped"]) == [
                    FLIPPED[i] for i in numbers
                ]
                assert rows(cache.nest(numbers, view.read_tensors(numbers))["latent_flipped"])
            with tc.open(folder) as cache:
                options: dict[str, Any] = {"choose": {"x": ["latent", "latent_flipped"]}, "collate": collate}
                batch = cache.read_batch(numbers, **options, choices={"x": [1] * len(numbers)})
                assert rows(batch["x"]) == [FLIPPED[i] for i in numbers]
    assert tc.verify(folder).ok


def test_old_indexes_of_samples_that_all_share(tmp_path: Path) -> None:
    x = [torch.full((3,), float(i)) for i in range(4)]
    folder = write_old(tmp_path / "c", [{"a": x[i], "b": {"c": x[i]}} for i in range(4)])
    for _ in range(2):
        with tc.open(folder) as cache:
            assert cache.select("b.c").read_batch([3, 1])["b"]["c"].tolist() == [[3] * 3, [1] * 3]
            assert list(cache.schema) == ["a", "b.c"]
        with tc.open(folder) as cache, pytest.raises(KeyError, match="unknown tensor"):
            cache.select("b.d")


def test_names_that_are_no_further_names(tmp_path: Path) -> None:
    """A name that another tensor has, one of more than 1,000 characters, and the 1,001st."""
    a, b = torch.zeros(1), torch.ones(1)
    samples: list[Any] = [
        {"0": a, "1": b, 1: a},
        {"x": a, "long" * 300: a, "short": a},
        {"x": [a] * 1500},
        {"s": {a}, "t": a, "u": a},
    ]
    names = [[], ["short"], [f"x.{i}" for i in range(1, 1001)], ["u"]]
    for number, (case, further) in enumerate(zip(samples, names, strict=True)):
        with tc.open(write(tmp_path / f"{number}", [case])) as cache:
            index = cache._store.shards[0].index
            (path,) = (tmp_path / f"{number}").glob("*.tar")
            raw = path.read_bytes()
            scanned = scan_shard(lambda begin, end, raw=raw: raw[begin:end], len(raw))
            assert scanned.layouts.further == (index.layouts.further or ((),))
            assert [name for names in scanned.layouts.further or () for name, _ in names] == further
            assert tc.realize(cache[0]).keys() == case.keys()
            assert cache.read_batch([0, 0], collate=list)[1].keys() == case.keys()
            cache.read_batch([0, 0])


def test_forged_further_names(tmp_path: Path) -> None:
    """An index that gives other names than the skeletons is refused."""
    x, y = torch.zeros(2), torch.ones(2)
    folder = write(tmp_path, [{"x": x, "y": y, "pick": y}] * 3)
    (path,) = tmp_path.glob("*.tar")
    raw = path.read_bytes()
    with tc.open(folder) as cache:
        index = cache._store.shards[0].index
    (tmp_path / "manifest.json").unlink()  # it has the digest of the index
    for further in ((("pick", "x"),), (("other", "y"),), ()):
        forged = replace(index, layouts=replace(index.layouts, further=(further,)))
        if not further:  # an index of an old writer, which is right
            forged = replace(index, layouts=replace(index.layouts, further=None))
        path.write_bytes(raw[: index.end + 1024] + build_footer(forged))
        with tc.open(folder) as cache:
            if not further:
                assert cache.read_batch([0, 1])["pick"].tolist() == [[1, 1]] * 2
                continue
            with pytest.raises(tc.FormatError, match="differ from the index"):
                cache.read_batch([0, 1])
            assert cache[0]["pick"].load().tolist() == [1, 1]
    assert path.read_bytes() != raw
