"""States of loaders: damaged ones, and those of another loader, are refused; those of another version of a cache resume."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.hostile.pickles import little_memory
from tests.training.loaders import COUNT, modes, ranks, saved, steps, write_numbers

IMPOSSIBLE: list[dict[str, Any]] = [
    *({"counts": counts} for counts in ([1, 2], [], None, "ab", [4.0], [3])),
    *({"used": used} for used in (8, -4, True)),
    {"used": 1 << 70, "counts": [1 << 70]},
    *({"epoch": epoch} for epoch in (-1, "1", 10**30, 1 << 61)),
    {"step": 10**30},
    {"began": 5},
    {"began": None},
    {"more": 1},
]


def test_damaged_states(cache: Any) -> None:
    loader = tc.Loader(cache, 4, collate="list")
    next(iter(loader))
    state = saved(loader)
    for wrong in (None, [], {}, "state", state | {"version": 3}):
        with pytest.raises(ValueError, match="state of version 2"):
            loader.load_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"version 1.*finish the epoch with the code that wrote.*begin an epoch anew"):
        loader.load_state_dict(state | {"version": 1})
    for name in ("dataset", "settings", "position", "weights"):
        with pytest.raises(ValueError, match=f"is damaged: it lacks {name}"):
            loader.load_state_dict({key: value for key, value in state.items() if key != name})
    for settings in (None, 5, [], "seed"):
        with pytest.raises(ValueError, match="it lacks settings"):
            loader.load_state_dict(state | {"settings": settings})
    for weights in (5, [], {"caches": None, "samples": {}}):
        with pytest.raises(ValueError, match="the state has weights, unlike this loader"):
            loader.load_state_dict(state | {"weights": weights})
    for position in (3, *(state["position"] | changed for changed in IMPOSSIBLE)):
        with pytest.raises(ValueError, match="a position that this loader cannot have"):
            loader.load_state_dict(state | {"position": position})
    assert saved(loader) == state


def packed(values: Any) -> str:
    return base64.b64encode(zlib.compress(np.array(values, "<f8").tobytes())).decode()


def test_damaged_weights(cache: Any) -> None:
    loader = tc.Loader(cache, 4, weights=np.arange(COUNT), collate="list")
    state, bomb = loader.state_dict(), packed(np.ones(1_000_000))  # 8 MB in a state of 8 KB
    values = [5, "!", "AAAA", packed([1.0]), *(packed([value] * COUNT) for value in (-1.0, 0.0, float("nan"))), bomb]
    for samples in (None, {}, {"1": packed([1.0] * COUNT)}, *({"0": value} for value in values)):
        with little_memory(1_500_000), pytest.raises(ValueError, match="the state has no"):
            loader.load_state_dict(state | {"weights": {"caches": None, "samples": samples}})
    with pytest.raises(ValueError, match="the state has no weights"):
        loader.load_state_dict(state | {"weights": None})
    assert loader.state_dict() == state


def test_states_of_other_loaders(cache: Any, more: Any, tmp_path: Path) -> None:
    state = tc.Loader(cache, 4).state_dict()
    assert len(json.dumps(state)) < 500
    resharded = tc.open(write_numbers(tmp_path, range(COUNT), max_samples=7))
    by_half = {"bucket_by": lambda entry: int(entry.key) % 2}
    for first, other, message in (
        ({}, {"cache": more}, r"23 samples, keys \w{32}; this loader has 9 samples, keys \w{32}"),
        ({}, {"cache": cache[::-1]}, "a different dataset"),
        ({}, {"seed": 1}, "seed=0, but this one has seed=1"),
        ({}, {"shuffle": True}, "shuffle=False, but this one has shuffle=True"),
        ({}, {"bucket_by": "y"}, "mode='all', but this one has mode='buckets'; mode lists which of .* bucket_by="),
        ({"shuffle": "blocks", "window": 4}, {"shuffle": "blocks", "window": 8}, "order=.* or window have changed"),
        ({"shuffle": "blocks"}, {"cache": resharded, "shuffle": "blocks"}, "order=.*buckets, shards or window"),
        (by_half, {"bucket_by": lambda entry: int(entry.key >= "012")}, "order=.*: its buckets"),
    ):
        options: dict[str, Any] = {"cache": cache, "batch_size": 4}
        with pytest.raises(ValueError, match=message):
            tc.Loader(**options | other).load_state_dict(tc.Loader(**options | first).state_dict())
    for same in (tc.join({"a": cache}), cache[:], resharded):  # the same samples in the same order
        tc.Loader(same, 4).load_state_dict(state)
    resharded.close()


@pytest.mark.parametrize(
    ("mode", "last_batch"),
    [("buckets", last) for last in ("short", "pad", "drop", "wrap")] + [("repeats", "drop"), ("mix+buckets", "short")],
)
def test_batches_that_are_left(cache: Any, more: Any, mode: str, last_batch: str) -> None:
    """From every state, a loader with steps of any size returns as many batches as it says, and then a whole epoch."""
    options: dict[str, Any] = modes(cache, more)[mode] | {"last_batch": last_batch, "collate": len, "num_threads": 0}
    first = tc.Loader(batch_size=2, **options)
    assert first.num_batches_left == len(first)
    sizes = [[tc.Loader(batch_size=n, rank=rank, world_size=2, **options) for rank in range(2)] for n in (1, 2, 3)]
    for count, _ in enumerate(first, 1):
        assert first.num_batches_left == len(first) - count % len(first)
        for loaders in sizes:
            for loader in loaders:
                loader.load_state_dict(first.state_dict())
                left = loader.num_batches_left
                assert 0 < left <= len(loader)
                assert len(list(loader)) == left
                assert loader.num_batches_left == len(loader)
            assert loaders[0].state_dict() == loaders[1].state_dict()


def test_set_epoch(cache: Any) -> None:
    loader = tc.Loader(cache, 4, collate="list")
    for number in (np.int64(3), torch.tensor(3), 3):
        loader.set_epoch(number)
        assert saved(loader)["position"]["epoch"] == 3
    assert {info.epoch for _, info in loader.with_info()} == {3}
    for wrong in (-1, 1 << 31, 1 << 62, float("nan"), 1.5, "1"):
        with pytest.raises((ValueError, TypeError), match="epoch="):
            loader.set_epoch(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"repeats": 1 << 30}, {"repeats": 1 << 30, "bucket_by": "y"}, {"shuffle": "blocks", "window": 3}],
    ids=str,
)
def test_the_last_epoch(cache: Any, options: dict[str, Any]) -> None:
    """It can be read, saved and resumed, also with the most passes that an epoch can have."""
    loader, resumed = (tc.Loader(cache, 4, collate="list", **options) for _ in range(2))
    loader.set_epoch((1 << 31) - 1)
    iterator = iter(loader.with_info())
    _, info = next(iterator)
    assert (len(info.keys), info.epoch) == (4, (1 << 31) - 1)
    resumed.load_state_dict(saved(loader))
    if "repeats" not in options:
        assert len(list(iterator)) == len(loader) - 1
        resumed.load_state_dict(saved(loader))
        assert resumed.epoch == 1 << 31
    assert len(next(iter(resumed))["i"]) == 4


# --- new versions of a cache with the same keys, and with other keys ---

KEYS = [f"{i:03d}" for i in range(40)]
CAPTIONS = {key: f"photo {key}" for key in KEYS}


def captioned(items: list[Any]) -> list[dict[str, Any]]:
    """Return samples whose text has the length of its caption, and whose latents have three aspects."""
    return [
        {
            "latent": torch.full((4, 2 + int(item["__key__"]) % 3, 2), int(item["__key__"])),
            "text": torch.ones(len(item["caption"]), 2),
            "caption": item["caption"],
        }
        for item in items
    ]


def build(out: Path, captions: dict[str, str], **options: Any) -> Any:
    items = [{"__key__": key, "caption": caption} for key, caption in captions.items()]
    sizes: dict[str, Any] = {"batch_size": 8, "max_samples": 16, "fingerprint": {"made": "once"}}
    return tc.build(items, captioned, out, digest=lambda item: item["caption"], **sizes, **options)


@pytest.mark.parametrize(
    "options",
    [{"shuffle": True}, {"shuffle": "blocks", "window": 8}, {"bucket_by": "latent", "shuffle": True}, {"repeats": 2}],
    ids=str,
)
def test_changed_and_added_samples(tmp_path: Path, options: dict[str, Any]) -> None:
    """A state resumes with other captions under the same keys; with more keys, on a view without them, as the error says."""
    before = build(tmp_path / "v1", CAPTIONS)
    captions = CAPTIONS | {key: f"a mended photo {key}" for key in KEYS[3::6]}
    mended = build(tmp_path / "v2", captions, reuse=tmp_path / "v1")
    appended = build(tmp_path / "v3", CAPTIONS | {"100": "new", "101": "newer"}, reuse=tmp_path / "v1")
    loaders = ranks(before, 4, 2, **options)
    whole = steps(loaders, 12)
    for taken in (1, 3):
        loaders = ranks(before, 4, 2, **options)
        steps(loaders, taken)
        state = json.loads(json.dumps(loaders[0].state_dict()))
        for view in (mended, appended[:40], appended.filter(lambda entry: entry.key in before)):
            resumed = ranks(view, 4, 2, **options)
            for loader in resumed:
                loader.load_state_dict(state)
            assert steps(resumed, 12 - taken) == whole[taken:]
    message = r"40 samples, keys \w+; this loader has 42 samples, keys \w+. If samples were only added"
    with pytest.raises(ValueError, match=message):
        tc.Loader(appended, 4, **options).load_state_dict(state)
    (batch,) = tc.Loader(mended, 40, collate="list")
    assert [text.startswith("a mended") for text in batch["caption"]] == [i % 6 == 3 for i in range(40)]
    for by in ("text", tc.by_length("text", [9, 16])):
        with pytest.raises(ValueError, match="its buckets, shards or window have changed"):
            tc.Loader(mended, 4, bucket_by=by).load_state_dict(tc.Loader(before, 4, bucket_by=by).state_dict())
