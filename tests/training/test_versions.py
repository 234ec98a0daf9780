"""Checkpoints resume on a new version of a cache with the same keys, and are refused for other keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.training.loaders import ranks, steps

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
