"""Reads of a small cache by url, by each kind of request that this package makes, and their faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write

# the third is `me:hunter2`, as it is sent
SECRETS = ("secret", "hunter2", "bWU6aHVudGVyMg", "S1GNATURE", "test-access-key", "v3ry-s3cret-k3y")
PASS = {"headers": {}}  # a fault that is none


def write_shard(folder: Path, seed: int = 0) -> dict[str, bytes]:
    """Write a cache of one sample, `a.tar`, whose length does not depend on the seed; return its files."""
    x = torch.randint(256, (130,), dtype=torch.uint8, generator=torch.Generator().manual_seed(100 * seed))
    write(folder / "a.tar", {"0": {"x": x, "seed": seed}}, dali_index=False)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_cache(url: str) -> dict[str, Any]:
    """Return the first sample of a cache."""
    with tc.open(url) as cache:
        sample = cache[0]
        return {"x": sample["x"].load().tolist(), "seed": sample["seed"]}


def read_stream(url: str) -> dict[str, Any]:
    """Return the raw members of the first sample of the shard in a folder."""
    folder, mark, query = url.partition("?")
    shard = {"url": f"{folder}/a.tar{mark}{query}"}
    (sample,) = tc.tarfile_to_samples()([shard])
    return {**sample, "__url__": None}


@dataclass(frozen=True)
class Kind:
    """A kind of request: the file, the number of earlier requests for it, and a read of a folder that makes it."""

    file: str
    num_before: int
    read: Callable[[str], dict[str, Any]]

    def script(self, folder: str, query: str, *faults: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
        """Return the faults of the reads of `folder?query`."""
        return {f"{folder}/{self.file}?{query}": [*[PASS] * self.num_before, *faults]}


# "head" and "stat" begin at the first byte, "tail" ends at the last one, "range" and "whole range" are in the middle
KINDS = {
    "head": Kind("manifest.json", 0, read_cache),
    "tail": Kind("a.tar", 0, read_cache),
    "range": Kind("a.tar", 2, read_cache),
    "stat": Kind("a.tar", 0, read_stream),
    "whole range": Kind("a.tar", 1, read_stream),
}


def outcomes(calls: Sequence[Callable[[], object]]) -> list[Any]:
    """Return the results or errors of calls that run at the same time."""

    def outcome(call: Callable[[], object]) -> object:
        try:
            return call()
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(32) as executor:
        return list(executor.map(outcome, calls))


def refused(kind: Any, call: Callable[..., object], *args: Any) -> Any:
    """Return the error that a call raises; neither it nor any error in its traceback shows a secret."""
    with pytest.raises(kind) as caught:
        call(*args)
    error: BaseException | None = caught.value
    while error is not None:
        texts = (str(error), repr(error), repr(error.__dict__), "".join(getattr(error, "__notes__", [])))
        assert not any(secret in text for secret in SECRETS for text in texts)
        error = error.__cause__ or error.__context__
    return caught.value
