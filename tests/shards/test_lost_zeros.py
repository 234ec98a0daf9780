"""Samples that zeros have overwritten: if the manifest lists them, no reader or tool leaves them out unnoticed."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import contents_of, members, sample, write
from tests.shards.tars import BLOCK

MADE = {"model": "vae", "revision": "c3"}


def erase_from(path: Path, name: str) -> int:
    begin = members(path)[name][0] - BLOCK
    content = path.read_bytes()
    path.write_bytes(content[:begin] + bytes(len(content) - begin))
    return begin


@pytest.mark.parametrize("had_footer", [True, False])
@pytest.mark.parametrize("name", ["000.skel.pyd", "005.skel.pyd"])
def test_zeros_up_to_the_end(tmp_path: Path, had_footer: bool, name: str) -> None:
    path = write(tmp_path / "a", 12, footer=had_footer)
    begin, before = erase_from(path, name), contents_of(tmp_path)
    calls = {
        "index": lambda: tc.write_index(path),
        "resume": lambda: tc.ShardWriter(tmp_path / "a" / "%06d.tar", footer=False, resume=True),
        "drop": lambda: tc.drop(path.parent, tmp_path / "out", ["001"]),
        "export": lambda: tc.export_cache(tc.open(path), tmp_path / "out", "pt"),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of `open`
        for call in calls.values() if name[2] != "0" else [calls["index"]]:
            with pytest.raises(tc.TarFormatError, match=r"zeros after [05] .*tc\.repair") as caught:
                call()
            assert (caught.value.kind, caught.value.offset) == ("lost", begin)
    assert contents_of(tmp_path) == before
    assert not tc.verify(path.parent).ok
    with pytest.raises(tc.FormatError, match="but the manifest lists 12"):
        list(tc.open(path.parent))


def test_open_warns(tmp_path: Path) -> None:
    path = write(tmp_path, 12)
    begin = erase_from(path, "005.skel.pyd")
    with pytest.warns(
        UserWarning, match=rf"byte {begin}: zeros after 5 samples, although manifest\.json lists 12"
    ) as caught:
        assert len(tc.open(path)) == 5
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("count", [1, 20])
def test_a_manifest_of_another_file_is_not_believed(tmp_path: Path, count: int) -> None:
    """Written again, shorter or longer, by a writer that leaves the manifest as it is, and zeros up to a record of tar."""
    path = write(tmp_path / "a", 12, footer=False)
    other = write(tmp_path / "other", count, footer=False, dali_index=False, manifest=False)
    path.write_bytes(other.read_bytes() + bytes(2048))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(tc.open(path)) == count
    assert list(tc.write_index(path).keys) == [f"{i:03d}" for i in range(count)]


def test_a_wrong_count_is_corrected_where_no_member_can_be_lost(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"nsamples": 3', '"nsamples": 9'))
    tc.write_index(path)
    assert tc.verify(tmp_path).ok


@pytest.mark.parametrize("had_footer", [True, False])
@pytest.mark.parametrize("has_manifest", [True, False])
def test_write_index_keeps_fingerprints(tmp_path: Path, has_manifest: bool, had_footer: bool) -> None:
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, fingerprint=MADE, footer=had_footer or not has_manifest, manifest=has_manifest) as sink:
        sink.write("a", sample(0))
    for _ in range(2):
        assert tc.write_index(path).fingerprint == MADE
        for source in [path, tmp_path] if has_manifest else [path]:
            assert tc.open(source, expect=MADE).fingerprint == MADE
            assert tc.verify(source).ok
    if had_footer:  # an index whose digest fails is ignored; the manifest has the fingerprint, too
        content = path.read_bytes()
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
        Path(f"{path}.index").unlink()
        assert tc.write_index(path).fingerprint == (MADE if has_manifest else None)


def test_a_fingerprint_of_another_file_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, fingerprint=MADE, manifest=False) as sink:
        sink.write("a", sample(0))
    tc.write_index(path)
    write(tmp_path / "other", 2, footer=False).rename(path)
    assert tc.write_index(path).fingerprint is None
