"""Every key is found where it is, in shards of any keys in any order, and caches are joined by such keys."""

from __future__ import annotations

import random
import tarfile
from collections.abc import Sequence
from io import BytesIO
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import wds_tensorcache as tc


def write_cache(folder: Path, shards: Sequence[Sequence[str]]) -> Path:
    """Write samples with these keys and their place as content, with tarfile: `ShardWriter` refuses some of the keys."""
    folder.mkdir()
    places = count()
    for number, keys in enumerate(shards):
        with tarfile.open(folder / f"{number:03d}.tar", "w") as archive:
            for key in keys:
                encoded = tc.encode_sample(next(places))
                for suffix, content in zip(("skel.pyd", "safetensors"), encoded, strict=True):
                    member = tarfile.TarInfo(f"{key}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, BytesIO(content))
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


@given(
    shards_of_keys.map(lambda shards: list(dict.fromkeys(chain(*shards)))),
    st.randoms(use_true_random=False),
    st.integers(0, 3),
)
@example(["a"], random.Random(0), 3)
def test_joined_samples_have_equal_keys(names: list[str], rng: random.Random, change: int) -> None:
    others = rng.sample(names, len(names))
    if change == 1 and others:
        others[-1] += "?"
    if change == 2 and others:
        others.append("?")
    shards, other_shards = [names[: len(names) // 3], names[len(names) // 3 :]], [others, []]
    if change == 3 and others:
        other_shards[1] = [others[0]]
    with TemporaryDirectory() as folder:
        parts = {"a": write_cache(Path(folder) / "a", shards), "b": write_cache(Path(folder) / "b", other_shards)}
        if change and others:
            with pytest.raises(KeyError, match="lacks|occurs twice"):
                tc.join(parts)
        else:
            with tc.join(parts) as joined:
                assert list(joined) == [{"a": place, "b": others.index(name)} for place, name in enumerate(names)]
