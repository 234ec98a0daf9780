"""A shard without an index whose end zeros have overwritten: `tc.open` warns if the `.idx` lists members after the end."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import members, sample
from tests.shards.tars import BLOCK


def write(folder: Path, count: int = 30, *, footer: bool = False, dali_index: bool = True) -> Path:
    with tc.ShardWriter(
        folder / "%06d.tar", max_samples=10, fsync=False, footer=footer, manifest=False, dali_index=dali_index
    ) as sink:
        for i in range(count):
            sink.write(f"{i:03d}", sample(i), json={"label": i})
    return folder


def erase_from(path: Path, begin: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:begin] + bytes(len(content) - begin))


@pytest.mark.parametrize("footer", [True, False], ids=["footer", "no footer"])
@pytest.mark.parametrize("left", [0, 3])
def test_open_warns(tmp_path: Path, left: int, footer: bool) -> None:
    folder = write(tmp_path, footer=footer)
    path = folder / "000001.tar"
    lost = members(path)[f"{10 + left:03d}.skel.pyd"][0]
    erase_from(path, lost - BLOCK)
    message = (
        rf"{re.escape(str(path))}: byte {lost - BLOCK}: zeros, although 000001\.idx lists a member at byte {lost}: readers "
        rf"stop there, and see no member from here on; `tensorcache verify` .*; delete {re.escape(str(folder))}/000001\.idx if"
    )
    with pytest.warns(UserWarning, match=message) as found:
        cache = tc.open(folder)
    assert [each.filename for each in found] == [__file__]
    assert len(cache) == 20 + left
    with pytest.raises(tc.TarFormatError, match="zeros, although 000001") as caught:
        tc.export_cache(cache, tmp_path / "out", "pt")
    assert (caught.value.kind, caught.value.offset) == ("lost", lost - BLOCK)
    assert not tc.verify(folder).ok


def test_no_warning(tmp_path: Path) -> None:
    """An `.idx` of another file, a damaged one, none, or a folder in its place."""
    long, short = write(tmp_path / "long", 10), write(tmp_path / "short", 4)
    path, idx = short / "000000.tar", short / "000000.idx"
    whole, texts = path.read_bytes(), [(long / "000000.idx").read_text(), "", "v9", idx.read_text(), None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for padding in (0, 9000):
            path.write_bytes(whole + bytes(padding))
            for text in texts:
                idx.unlink(missing_ok=True) if text is None else idx.write_text(text)
                assert len(tc.open(path)) == 4
        idx.mkdir()
        assert len(tc.open(path)) == 4
