"""Headers of members that are too large to be written by a test."""

from __future__ import annotations

import tarfile

import pytest

from tests.shards.tars import GIB
from wds_tensorcache.shards.tar import build_tar_header


@pytest.mark.parametrize("nbytes", [0, 1, 8**11 - 1, 8**11, 10**10 - 1, 10**10, 123 * 1024 * GIB])
@pytest.mark.parametrize("name", ["a.b", "d/" + "x" * 92 + ".json", "x" * 90 + "." + "y" * 9])
def test_headers_of_every_size(name: str, nbytes: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.uname, member.gname = nbytes, 0o444, "bigdata", "bigdata"
    assert build_tar_header(name, nbytes) == member.tobuf(tarfile.PAX_FORMAT)
