"""Checkpoints resume on a new version of a cache with the same keys; the error for other keys says what differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.training.loaders import COUNT, ranks, steps
from wds_tensorcache.training.key_summary import difference, summary_of

KEYS = [f"{i:05d}" for i in range(1500)]
STATES: list[dict[str, Any]] = [
    {
        "version": 1,
        "position": {"epoch": 0, "counts": [0, 8, 4], "used": 12, "step": 3, "began": 0},
        "settings": {
            "seed": 0,
            "shuffle": True,
            "mode": "buckets",
            "streams": ["(1,)", "(2,)", "(3,)"],
            "order": "4b1e329c9369ca8e",
        },
        "dataset": "23 samples, keys ccdf77d5fc1fc2b8092f8e8f5cadd4b7",
        "weights": [],
    },
    {
        "version": 1,
        "position": {"epoch": 0, "counts": [4, 8], "used": 12, "step": 3, "began": 0},
        "settings": {"seed": 0, "shuffle": True, "mode": "mix", "streams": ["a", "b"], "order": "9b1dcb92887daca4"},
        "dataset": "32 samples, keys 8448ac1331d5585d2126bd5e5faecf9d",
        "weights": [[0, "eAFLSwOBZ/bGYHDZHgA0AQXO"]],
    },
]
FOLLOWING = [
    ["018 012 015 003", "006 000 021 009", "017 002 008"],
    ["100 104 105 101", "016 008 021 000", "017 010 013 015", "022 020 007 001", "004 011 019 014"],
]


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
    return tc.build(
        items,
        captioned,
        out,
        batch_size=8,
        max_samples=16,
        digest=lambda item: item["caption"],
        fingerprint={"made": "once"},
        **options,
    )


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    folder = tmp_path_factory.mktemp("versions")
    captions = {f"{i:03d}": f"photo {i}" for i in range(60)}
    build(folder / "v1", captions).close()
    mended = captions | {f"{i:03d}": f"a mended caption of photo {i}" for i in range(3, 60, 6)}
    build(folder / "v2", mended, reuse=folder / "v1").close()
    with tc.open(folder / "v1") as before, tc.open(folder / "v2") as after:
        assert sum(a["caption"] != b["caption"] for a, b in zip(before, after, strict=True)) == 10
        yield before, after


@pytest.mark.parametrize(
    "options",
    [{"shuffle": True}, {"shuffle": "blocks", "window": 8}, {"bucket_by": "latent", "shuffle": True}, {"repeats": 2}],
    ids=str,
)
def test_yesterdays_checkpoint_resumes_on_mended_captions(versions: tuple[Any, Any], options: dict[str, Any]) -> None:
    before, after = versions
    whole = steps(ranks(before, 4, 2, **options), 20)
    for taken in (1, 3, 7):
        loaders = ranks(before, 4, 2, **options)
        steps(loaders, taken)
        state = json.loads(json.dumps(loaders[0].state_dict()))
        resumed = ranks(after, 4, 2, **options)
        for loader in resumed:
            loader.load_state_dict(state)
        assert steps(resumed, 20 - taken) == whole[taken:]
    first = tc.Loader(after, 4, **options)
    first.load_state_dict(state)
    for batch, info in tc.Loader(after, 60, collate="list").with_info():
        mended = [
            int(key) for key, text in zip(info.keys, batch["caption"], strict=True) if text.startswith("a mended")
        ]
        assert mended == list(range(3, 60, 6))


def test_buckets_that_mended_captions_change(versions: tuple[Any, Any]) -> None:
    before, after = versions
    for by, message in (
        ("text", r"bucket \(8, 2\) has 50 samples in the state and 42 here\nbucket \(27, 2\) has 0 .* and 2 here"),
        (
            tc.by_length("text", [7, 16]),
            r"streams=.*\nbucket 7 has 10 samples in the state and 8 here\n"
            r"bucket 16 has 50 samples in the state and 42 here\nbucket inf has 0 samples in the state and 10 here\n"
            r".*call set_epoch$",
        ),
    ):
        state = tc.Loader(before, 4, bucket_by=by).state_dict()
        with pytest.raises(ValueError, match=message):
            tc.Loader(after, 4, bucket_by=by).load_state_dict(state)


@pytest.mark.parametrize("number", [0, 1])
def test_states_of_an_older_release(cache: Any, more: Any, number: int) -> None:
    """Written down before states had summaries of keys."""
    state, expected = STATES[number], FOLLOWING[number]
    buckets: dict[str, Any] = {"cache": cache, "bucket_by": "y"}
    options = {"mix": {"a": (cache, 0.7), "b": (more, 0.3)}} if number else buckets
    loader = tc.Loader(batch_size=4, shuffle=True, collate="list", **options)
    loader.load_state_dict(state)
    found = [" ".join(dict.fromkeys(info.keys)) for _, info in loader.with_info()]
    assert found == expected
    with pytest.raises(ValueError, match=r"a different dataset: .*; this loader has 23 samples, keys \w+$"):
        tc.Loader(cache[::-1], 4).load_state_dict(state)


def test_errors_for_other_keys(cache: Any, more: Any) -> None:
    state = tc.Loader(cache, 4).state_dict()
    assert len(json.dumps(state)) < 700
    without = [i for i in range(COUNT) if i != 7]
    for view, message in (
        (cache[without], "first 7 keys are the same; the first that differs here is '008'"),
        (
            cache[without],
            "of 16 keys that the state remembers, 1[56] are here; 1 or more keys were removed, 0 or more added",
        ),
        (
            cache[[*range(COUNT), 3]],
            "all 23 keys of the state are here first; 1 added after them, from '003' on; the view cache.:23. can load",
        ),
        (
            cache[:20],
            "first 20 keys are the same, and no more follow here; .*3 or more keys were removed, 0 or more added",
        ),
        (
            cache[::-1],
            "keys differ from the start; the first that differs here is '022'; .* 16 are here, in another order",
        ),
        (more, "keys differ from the start; the first that differs here is '100'; of 16 keys .*, 0 are here$"),
    ):
        with pytest.raises(ValueError, match=f"(?s)the state belongs to a different dataset: 23 samples, .*{message}"):
            tc.Loader(view, 4).load_state_dict(state)
    mixed = tc.Loader(mix={"a": cache, "b": more}).state_dict()
    with pytest.raises(ValueError, match=r"keys \w+\ncache 1 of mix: the first 2 keys are the same; .*'103'"):
        tc.Loader(mix={"a": cache, "b": more[[0, 1, *range(3, 9)]]}).load_state_dict(mixed)
    for damaged in ("1", "23:AAAA", "23:!", "x:", state["keys"].replace("23", "2300"), "-1:"):
        with pytest.raises(ValueError, match="is not a summary of keys"):
            tc.Loader(more, 4).load_state_dict(state | {"keys": damaged})
    for missing in (None, [], ["23:"], "", "23: 23:"):
        with pytest.raises(ValueError, match=r"this loader has 9 samples, keys \w+$"):
            tc.Loader(more, 4).load_state_dict(state | {"keys": missing})


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": "blocks"}, {"bucket_by": "latent"}], ids=str)
def test_a_view_without_added_keys_loads_the_state(tmp_path: Path, options: dict[str, Any]) -> None:
    """The error names this remedy, and only where keys may only have been added."""
    captions = {f"{i:03d}": f"photo {i}" for i in range(40)}
    before = build(tmp_path / "v1", captions)
    appended = build(tmp_path / "v2", captions | {"100": "new", "101": "newer"}, reuse=tmp_path / "v1")
    pairs = list(captions.items())
    inserted = build(tmp_path / "v3", dict([*pairs[:8], ("100", "new"), *pairs[8:22], ("101", "newer"), *pairs[22:]]))
    loader = tc.Loader(before, 4, collate="list", **options)
    whole = steps([loader], 20)
    loader.set_epoch(0)
    steps([loader], 3)
    state = loader.state_dict()
    views = [
        (appended, appended[:40], r"from '100' on; the view cache\[:40\] can load the state$"),
        (
            inserted,
            inserted.filter(lambda entry: entry.key in before),
            r"; if keys were only added, the view cache.filter",
        ),
    ]
    for after, view, message in views:
        with pytest.raises(ValueError, match=message):
            tc.Loader(after, 4, **options).load_state_dict(state)
        if after is inserted and options.get("shuffle") == "blocks":
            continue  # the order depends on the shards
        resumed = tc.Loader(view, 4, collate="list", **options)
        resumed.load_state_dict(state)
        assert steps([resumed], 17) == whole[3:]
    for other in (before[1:], before[::-1]):
        with pytest.raises(ValueError, match="a different dataset") as raised:
            tc.Loader(other, 4).load_state_dict(tc.Loader(before, 4).state_dict())
        assert "cache.filter" not in str(raised.value)


def summary(keys: list[str]) -> str:
    return summary_of(keys, xxhash.xxh3_128())


def test_what_a_summary_tells_of_many_keys() -> None:
    saved = summary(KEYS)
    assert len(saved) < 280
    assert difference(saved, KEYS) == ""
    for here, first, moved in (
        (
            KEYS[:700] + KEYS[703:],
            "one of '00679' to '00705', or the next one",
            "3 or more keys were removed, 0 or more added",
        ),
        (
            [*KEYS[:300], "x", "y", *KEYS[300:900], *KEYS[905:]],
            "one of '00281' to '00301', or",
            "5 or more keys were removed, 2 or more",
        ),
        ([key + "a" for key in KEYS], "differs here is one of '00000a' to '00022a', or the next one", ", 0 are here"),
    ):
        text = difference(saved, here)
        assert first in text
        assert moved in text


def test_a_summary_of_many_keys_hashes_every_key_once() -> None:
    keys, digest, expected = [str(i) for i in range(300_000)], xxhash.xxh3_128(), xxhash.xxh3_128()
    saved = summary_of(keys, digest)
    for key in keys:
        expected.update(key.encode() + b"\0")
    assert digest.hexdigest() == expected.hexdigest()
    assert difference(saved, keys) == ""
    changed = [*keys[:299_000], "new", *keys[299_001:]]
    assert difference(saved, changed).startswith(
        "the first 295312 keys are the same; the first that differs here is one of "
    )


@given(st.integers(0, 200), st.data())
def test_the_first_difference_is_told(count: int, data: st.DataObject) -> None:
    keys = KEYS[:count]
    saved = summary(keys)
    assert difference(saved, keys) == ""
    at = data.draw(st.integers(0, count))
    here = [
        *keys[:at],
        *data.draw(st.sampled_from([["new"], [], ["new", "newer"]])),
        *keys[at + data.draw(st.integers(0, 1)) :],
    ]
    text = difference(saved, here)
    if here[:count] == keys:
        added = f"all {count} keys of the state are here first; {len(here) - count} added after them, from 'new' on"
        added += f"; the view cache[:{count}] can load the state"
        assert text == (added if here != keys else "")
        return
    same, _, rest = text.partition("; ")
    begin = 0 if same.startswith("the keys differ from the start") else int(same.split()[2])
    end = (
        min(edge for edge in [count * number // 64 for number in range(65)] if edge > begin)
        if count > 64
        else begin + 1
    )
    assert begin <= at <= end
    assert begin == len(here) or repr(here[begin]) in rest
