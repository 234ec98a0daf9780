"""Buckets together with weights, mixes and repeats: what an epoch has, and where it resumes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.training.loaders import COMBINED, COUNT, modes, ranks, steps

LAST = ("short", "pad", "wrap", "drop")


def test_repeats_without_mix(cache: Any) -> None:
    loader, twice = (tc.Loader(cache, 4, repeats=count, collate="list") for count in (3, 2))
    indices = [index for _, info in loader.with_info() for index in info.indices.tolist()]
    assert len(loader) == 18  # of 69 samples
    assert indices == [*range(COUNT)] * 3 + [indices[-1]] * (len(indices) - 3 * COUNT)
    for other in (tc.Loader(cache, 4), twice):
        for one, two in ((loader, other), (other, loader)):
            with pytest.raises(ValueError, match="the state belongs to a loader with repeats="):
                two.load_state_dict(one.state_dict())


def test_passes_are_those_of_epochs(cache: Any) -> None:
    """Two epochs of three passes have the order of six epochs, also where `wrap` begins again."""

    def samples(count: int, **options: Any) -> list[int]:
        sampler = tc.StepSampler(cache, 1, shuffle=True, seed=3, **options)
        return [step.indices.item() for _ in range(count) for step in sampler]

    assert samples(2, repeats=3) == samples(6)
    (step,) = tc.StepSampler(cache, 5 * COUNT, shuffle=True, seed=3, repeats=3, last_batch="wrap")
    assert step.indices.tolist() == (samples(3) + samples(3))[: 5 * COUNT]


def test_sources_of_batches(cache: Any, more: Any) -> None:
    shapes = {(1,), (2,), (3,)}
    for mode, expected in (
        ("repeats", {"a", "b"}),
        ("weights+buckets", shapes),
        ("mix+weights", {"a", "b"}),
        ("mix+weights+buckets", {(name, shape) for name in "ab" for shape in shapes}),
        ("repeats+buckets", {(name, length) for name in "ab" for length in (1, 2, math.inf)}),
    ):
        sources = set()
        for _ in range(3):
            options = modes(cache, more)[mode] | {"batch_size": 2, "collate": {"y": "list"}}
            for batch, info in tc.torch_loader(**options, seed=len(sources)).with_info():
                assert info.cache is not None
                assert [int(key) for key in info.keys] == batch["i"].tolist()
                assert (min(batch["i"].tolist()) >= 100) is (info.source == "b" or info.source[0] == "b")
                assert "repeats" in mode or "buckets" not in mode or len({tensor.shape for tensor in batch["y"]}) == 1
                sources.add(info.source)
        assert sources == expected


def test_a_cache_of_a_mix_passes_over_all_its_buckets(cache: Any, more: Any) -> None:
    """A bucket is at most one step ahead of other buckets, so all samples of a cache are equally frequent."""
    sampler = tc.StepSampler(batch_size=4, **modes(cache, more)["mix+buckets"])
    seen: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    for _ in range(60):
        for step in sampler:
            seen[step.source].update(step.indices.tolist())
    for times, count in zip(seen, (COUNT, 9), strict=True):
        assert len(times) == count
        # a pass, and a step of 4 rows in a bucket of 3 samples
        assert max(times.values()) - min(times.values()) <= 1 + 4 // 3 + 1
    assert 1.7 < seen[0].total() / seen[1].total() < 3.2  # 0.7 / 0.3


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("mode", ["all", "buckets", *COMBINED])
def test_rows_are_counted(cache: Any, more: Any, mode: str, last: str) -> None:
    sizes = {"all": 23, "buckets": 23, "repeats": 23 + 27, "repeats+buckets": 46 + 27}
    for world_size in (1, 3, 5):
        loaders = ranks(batch_size=1, world_size=world_size, **modes(cache, more)[mode], last_batch=last)
        counts = loaders[0].count_rows()
        infos = [info for loader in loaders for _, info in loader.with_info()]
        rows = sum(len(info.indices) for info in infos)
        padding = sum(int(info.is_padding.sum()) for info in infos)
        assert (counts.num_rows, counts.num_padding) == (rows, padding)
        if mode in sizes:
            assert counts.num_samples == sizes[mode]
            extra = rows - padding - counts.num_samples
            assert (counts.num_repeated, counts.num_dropped) == ((0, -extra) if last == "drop" else (extra, 0))
            assert last == "wrap" or not counts.num_repeated
        assert "batch_size=1" in repr(loaders[0])
        empty = {source for source, part in counts.sources.items() if not part.num_rows}
        for source, part in counts.sources.items():
            assert part.num_rows == sum(len(info.indices) for info in infos if info.source == source)
        has_sources = mode in sizes and mode != "all"
        assert set(counts.sources) == ({info.source for info in infos} | empty if has_sources else set())


def test_by_length(cache: Any, tmp_path: Any) -> None:
    joined = tc.join({"a": cache, "b": cache})
    for view, name in ((cache, "y"), (cache[::-1], "y"), (joined, "a.y")):
        by = tc.by_length(name, [0, 2])
        lengths = defaultdict(set)
        for batch, info in tc.Loader(view, 4, bucket_by=by, collate="list").with_info():
            lengths[info.source] |= {len(tensor) for tensor in (batch if view is not joined else batch["a"])["y"]}
        assert lengths == {2: {1, 2}, math.inf: {3}}
    for bucket_by, expected in (
        (lambda entry: "low" if int(entry.key) < 10 else "high", {"low", "high"}),
        (lambda entry: (entry.shapes["x"], tc.by_length("y", [2])(entry)), {((4,), 2), ((4,), math.inf)}),
    ):
        loader = tc.Loader(cache, 4, bucket_by=bucket_by, collate="list")
        assert {info.source for _, info in loader.with_info()} == expected
    with pytest.raises(ValueError, match="returned NaN"):
        tc.Loader(cache, 4, bucket_by=lambda entry: math.nan)
    for bounds in ([], [-1, 2], [2, 2], [3, 2]):
        with pytest.raises(ValueError, match="expected ascending lengths"):
            tc.by_length("y", bounds)
    samples = {"a": {"x": np.array(1.0), "y": np.zeros(3)}, "b": {"x": np.array(1.0)}}
    with tc.open(write(tmp_path / "scalars", samples)) as scalars:
        with pytest.raises(ValueError, match="tensor 'x' of a sample has no dimensions"):
            tc.Loader(scalars, 1, bucket_by=tc.by_length("x", [1]))
        for opened, name in ((scalars, "y"), (tc.join({"only": scalars}), "only.y")):
            for by_name in (name, tc.by_length(name, [1])):
                with pytest.raises(KeyError, match=f"sample 'b' has no tensor '{name}'"):
                    tc.Loader(opened, 1, bucket_by=by_name)
        for unknown in ("yy", tc.by_length("yy", [1])):
            with pytest.raises(KeyError, match="unknown tensor 'yy'; there are "):
                tc.Loader(scalars, 4, bucket_by=unknown)
        with pytest.raises(KeyError, match="sample 'b' has no tensor 'y'") as caught:
            tc.Loader(mix={"all": cache, "few": scalars}, batch_size=4, bucket_by="y")
        if hasattr(caught.value, "add_note"):
            assert caught.value.__notes__ == ["this is the cache 'few' of mix="]


def test_orders_are_what_they_were(cache: Any, more: Any) -> None:
    """Written down: a release that shuffles otherwise would resume other epochs, so it needs another version of states."""
    options = modes(cache, more)
    found = {mode: steps(ranks(batch_size=3, world_size=2, **options[mode]), 11)[-4:] for mode in EXPECTED}
    assert found == EXPECTED


EXPECTED = {
    "all": [[20, 5, 4, 8, 7], [18, 6, 3, 21, 8, 12], [13, 7, 19, 10, 2, 22], [4, 15, 14, 17, 9, 16]],
    "blocks": [[19, 16, 22, 21, 20], [0, 2, 3, 1, 12, 11], [4, 10, 21, 14, 20, 13], [15, 17, 22, 16, 18, 5]],
    "buckets": [[7, 10, 1, 16, 19, 22], [5, 17, 8, 14, 20, 11], [4, 13], [3, 18]],
    "weights": [[13, 5, 16, 19, 16, 17], [18, 12, 19, 21, 18, 9], [10, 4, 14, 20, 19, 8], [22, 7, 17, 6, 8, 16]],
    "mix": [
        [11, 19, 3, 0, 10, 13],
        [108, 102, 104, 106, 103, 101],
        [17, 6, 22, 16, 18, 9],
        [107, 105, 100, 102, 107, 105],
    ],
}
