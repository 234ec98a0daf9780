"""Errors about unknown names list the known ones, similar names first, at a bounded length and cost."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import folder_of, write

TEXTS, ALPHAS = [{"state": torch.zeros(1 + i % 3, 2)} for i in range(120)], ({}, {"alpha": torch.zeros(1)})
SAMPLES = {f"{i:06d}": {"latent": torch.zeros(4), "text": text, **ALPHAS[i % 2]} for i, text in enumerate(TEXTS)}
folder = folder_of(SAMPLES, members=lambda i: {"json": {"i": i}, "jpg": b""}, max_samples=50)


def test_messages_are_bounded(tmp_path: Path) -> None:
    """The names that are like the wanted one come first, and only a few others."""
    names = [f"{i}{'x' * 500}" for i in range(2000)] + [f"abc{i}" for i in range(20)]
    with tc.open(write(tmp_path, [{name: torch.zeros(1) for name in names[::-1]}])) as cache:
        for wanted, first in (("y" * 10_000, "abc19"), ("abc7x", "abc7")):
            with pytest.raises(KeyError, match=f"there are '{first}', .* and 2,012 more") as raised:
                cache.select(wanted)
            assert len(str(raised.value)) < 1000


def test_a_key_without_its_folders_names_the_key_in_them(tmp_path: Path) -> None:
    keys = [f"a/a_long_name_of_a_folder/sub{i % 2}/{i:04d}" if i % 9 == 6 else f"{i:03d}0" for i in range(60)]
    write(tmp_path, {key: {"x": torch.zeros(1)} for key in keys}, max_samples=60)
    for key in ("0006", "b/0006"):
        with pytest.raises(KeyError, match="there are 'a/a_long_name_of_a_folder/sub0/0006', "):
            tc.open(tmp_path)[key]


ERRORS: list[Any] = [
    (lambda c: c.select("laten"), KeyError, "unknown tensor 'laten'; there are 'latent', 'text.state', 'alpha'"),
    (lambda c: tc.Loader(c, bucket_by="txt.state"), KeyError, "unknown tensor 'txt.state'; there are 'text.state', "),
    (
        lambda c: tc.Loader(c, bucket_by="alpha"),
        KeyError,
        r"'000000' has no tensor 'alpha'; it has .*: cache.filter\(lambda entry: 'alpha' in entry.shapes\)",
    ),
    (
        lambda c: tc.Loader(c, choose={"x": "txet.*"}),
        tc.BatchError,
        "choose={'x': …}: unknown tensor 'txet.\\*'; there are .*; the first sample has 'latent', 'text'",
    ),
    (lambda c: c.nest([0], {"laten": None}), KeyError, "sample '000000' has no tensor 'laten'; it has 'latent', "),
    (lambda c: tc.join({"a": c}).nest([0], {"b.latent": None}), KeyError, "'b.latent'; there are 'a.latent', "),
    (lambda c: c["00001"], KeyError, "no sample '00001' among the 120 samples; there are '0000.1', .* and 112 more"),
    (lambda c: c[:0]["x"], KeyError, "no sample 'x' among the 0 samples; there are none"),
    (lambda c: tc.join([c, c], keys={"x": {}}), ValueError, "an entry for 'x', expected .* the first: 1"),
    (lambda c: tc.join({"a": c, "b": c}, keys={"a": {}}), ValueError, "an entry for 'a', expected names .* first: 'b'"),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS)
def test_each_error(cache: Any, call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(cache)


def test_entries(cache: Any) -> None:
    joined = tc.join({"a": cache})
    for use, message in (
        (lambda: cache.filter(lambda entry: entry.shapes["laten"][0] > 2), "'laten'; it has 'latent', 'text.state'"),
        (lambda: tc.Loader(cache, bucket_by=lambda entry: entry.shapes["alpha"]), "'alpha'; it has "),
        (lambda: joined.filter(lambda entry: entry.shapes["a.laten"]), "'a.laten'; it has 'a.latent', 'a.text.state'"),
    ):
        with pytest.raises(KeyError, match=f"sample '000000' has no tensor {message}"):
            use()
    assert len(cache.filter(lambda entry: "alpha" in entry.shapes)) == 60
    entries: list[Any] = []
    cache[:1].filter(lambda entry: entries.append(pickle.loads(pickle.dumps(entry))))
    assert entries[0].shapes == {"latent": (4,), "text.state": (1, 2)}
    assert entries[0].shapes.get("alpha") is None
    with pytest.raises(KeyError, match="sample '000000' has no tensor 'b'"):
        entries[0].shapes["b"]
    with pytest.raises(TypeError, match="filter takes a function of an entry, got 'latent'; select takes names"):
        cache.filter("latent")


def test_shared_datasets(tmp_path: Path) -> None:
    with tc.SharedDataset([{"latent": torch.zeros(2)}] * 30, "names", directory=tmp_path) as shared:
        for use, message in (
            (lambda: shared["30"], r"no sample '30'; the keys are .*: '.*' and 22 more"),
            (lambda: shared["007"], r"no sample '007'; the keys are indices .*: '0', '7', .* and 22 more"),
            (lambda: shared.nest([0], {"laten": None}), "sample '0' has no tensor 'laten'; it has 'latent'"),
            (lambda: shared.filter(lambda entry: entry.shapes["laten"]), "'0' has no tensor 'laten'; it has 'latent'"),
        ):
            with pytest.raises(KeyError, match=message):
                use()
