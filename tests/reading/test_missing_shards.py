"""A shard that is not there: an error of this project that is FileNotFoundError, with manifest, shard and remedy."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import write


@pytest.mark.parametrize("link", [True, False])
def test_a_manifest_lists_it(tmp_path: Path, link: bool) -> None:
    write(tmp_path, 4, per_shard=2)
    os.remove(tmp_path / "000001.tar")
    if link:
        (tmp_path / "000001.tar").symlink_to("nowhere")
    for source in (tmp_path, tmp_path / "manifest.json", [tmp_path]):
        with pytest.raises(FileNotFoundError, match=r"manifest\.json.*'000001\.tar'.*tc\.repair") as caught:
            tc.open(source)
        assert isinstance(caught.value, tc.MissingShardError)
        assert isinstance(caught.value, tc.FormatError)
        assert (caught.value.kind, caught.value.errno) == ("missing", errno.ENOENT)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), again.errno) == (tc.MissingShardError, str(caught.value), errno.ENOENT)
    fault = tc.verify(tmp_path).faults[0]
    assert (fault.kind, os.path.basename(fault.shard)) == ("missing", "000001.tar")
    assert tc.repair(tmp_path, tmp_path / "out").num_missing
    assert list(tc.open(tmp_path / "out").keys()) == ["000", "001"]


def test_it_went_since(tmp_path: Path) -> None:
    path = write(tmp_path, 2)
    cache = tc.open(tmp_path)
    other, listed_nowhere = (pickle.loads(pickle.dumps(each)) for each in (cache, tc.open(path)))
    os.remove(path)
    message = r"000000\.tar: the shard does not exist"
    for each in (cache, other, cache[::-1], tc.join([cache])):
        for read in (lambda each=each: each[0], lambda each=each: each.read_batch([1])):
            with pytest.raises(
                tc.MissingShardError, match=rf"{message}, but \S+/manifest\.json lists it; .*tc\.repair"
            ):
                read()
    with pytest.raises(tc.MissingShardError, match=f"{message}; copy it again$"):
        listed_nowhere[0]
