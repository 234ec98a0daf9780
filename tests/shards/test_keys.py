"""Every key is found where it is, in shards of any keys in any order, and caches are joined by such keys."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.shards.tars import build, halves


def write_cache(folder: Path, shards: Sequence[Sequence[str]]) -> Path:
    """Write samples with these keys and their place as content, by hand: `ShardWriter` refuses some of the keys."""
    folder.mkdir()
    places = count()
    for number, keys in enumerate(shards):
        members = [half for key in keys for half in halves(key, next(places))]
        (folder / f"{number:03d}.tar").write_bytes(build(members))
    return folder


# keys that are equal but for their ends, that have zeros, or that are longer or shorter than words of 4 and 8 bytes
pieces = st.sampled_from(["a", "b", "\x01", "\udcff", "0", "9", "é", "same", "folder/x", "x" * 130])
keys = st.lists(pieces, min_size=1, max_size=4).map("".join)
numbered = st.sampled_from(["%d", "%06d", "k%d", "a/long/folder/%08d"]).map(lambda form: [form % i for i in range(12)])
shards_of_keys = st.lists(st.lists(keys, max_size=6, unique=True) | numbered, min_size=1, max_size=4).filter(any)


@given(shards_of_keys, st.randoms(use_true_random=False))
@example([["a", "z", "c"], ["z"]], random.Random(0))
@example([["b", "c"], ["a"]], random.Random(0))
@example([["9", "10"], ["11", "12"]], random.Random(0))
def test_keys_are_found_as_in_a_dictionary(shards: list[list[str]], rng: random.Random) -> None:
    places: dict[str, list[int]] = {}
    for place, key in enumerate(chain(*shards)):
        places.setdefault(key, []).append(place)
    with TemporaryDirectory() as folder, tc.open(write_cache(Path(folder) / "cache", shards)) as cache:
        assert list(cache.keys()) == list(chain(*shards))
        chosen = [place for place in range(len(cache)) if rng.random() < 0.7]
        view = cache[chosen]
        for key in {*places, *(key[:-1] for key in places), *(key + "a" for key in places), "7"}:
            assert (key in cache) == (key in places)
            if len(found := places.get(key, [])) == 1:
                assert cache[key] == found[0]
            else:
                with pytest.raises(KeyError, match="no sample|in several shards"):
                    cache[key]
            assert (key in view) == any(place in chosen for place in found)


def test_caches_are_joined_by_their_keys_and_not_by_their_texts(tmp_path: Path) -> None:
    parts = {name: write_cache(tmp_path / name, [keys]) for name, keys in (("x", ["a", "aa"]), ("y", ["aa", "a"]))}
    assert list(tc.join(parts)) == [{"x": 0, "y": 1}, {"x": 1, "y": 0}]
