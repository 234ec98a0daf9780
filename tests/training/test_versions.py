"""Checkpoints resume on a new version of a cache with the same keys, and are refused for other keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.training.loaders import ranks, steps


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
    for by in ("text", tc.by_length("text", [7, 16])):
        state = tc.Loader(before, 4, bucket_by=by).state_dict()
        with pytest.raises(ValueError, match="its buckets, shards or window have changed"):
            tc.Loader(after, 4, bucket_by=by).load_state_dict(state)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": "blocks"}, {"bucket_by": "latent"}], ids=str)
def test_a_view_without_added_keys_loads_the_state(tmp_path: Path, options: dict[str, Any]) -> None:
    """The error names this remedy."""
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
    for after, view in (
        (appended, appended[:40]),
        (inserted, inserted.filter(lambda entry: entry.key in before)),
    ):
        with pytest.raises(
            ValueError, match=r"40 samples, keys \w+; this loader has 42 samples, keys \w+. If samples were only added"
        ):
            tc.Loader(after, 4, **options).load_state_dict(state)
        if after is inserted and options.get("shuffle") == "blocks":
            continue  # the order depends on the shards
        resumed = tc.Loader(view, 4, collate="list", **options)
        resumed.load_state_dict(state)
        assert steps([resumed], 17) == whole[3:]
