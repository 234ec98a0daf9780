"""Samples that zeros have overwritten: what tells of them is never written again without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.shards.damage import members, sample, write
from tests.shards.tars import BLOCK, build

BESIDE = ["idx", "manifest", "idx of version 1.1"]


def write_with(folder: Path, beside: str, **options: bool) -> Path:
    """Write a shard of 12 samples, of which nothing but `beside` will tell."""
    path = write(folder, 12, dali_index=beside != "manifest", manifest=beside == "manifest", **options)
    if "1.1" in beside:
        idx = path.with_suffix(".idx")
        first, *lines = idx.read_text().splitlines()
        lines = [" ".join(f for i, f in enumerate(line.split()) if i % 4 < 3) for line in lines]
        idx.write_text("\n".join([first.replace("1.2", "1.1"), *lines, ""]))
    return path


def erase_from(path: Path, name: str) -> int:
    begin = members(path)[name][0] - BLOCK
    content = path.read_bytes()
    path.write_bytes(content[:begin] + bytes(len(content) - begin))
    return begin


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("had_footer", [True, False])
@pytest.mark.parametrize(
    ("beside", "name"),
    [*((beside, name) for beside in BESIDE for name in ("000.skel.pyd", "005.skel.pyd")), ("idx", "011.jpg")],
)
def test_index_refuses(tmp_path: Path, beside: str, had_footer: bool, name: str) -> None:
    path = write_with(tmp_path, beside, footer=had_footer)
    begin, before = erase_from(path, name), contents(tmp_path)
    with pytest.raises(tc.TarFormatError, match=r"tc\.repair") as caught:
        tc.write_index(path)
    assert (caught.value.kind, caught.value.offset) == ("lost", begin)
    assert contents(tmp_path) == before
    assert not tc.verify(tmp_path).ok


@pytest.mark.parametrize("beside", BESIDE)
def test_writers_that_go_on_refuse(tmp_path: Path, beside: str) -> None:
    path = write_with(tmp_path, beside, footer=False)
    erase_from(path, "005.skel.pyd")
    before = contents(tmp_path)
    with pytest.raises(tc.TarFormatError, match=r"tc\.repair") as caught:
        tc.ShardWriter(tmp_path / "%06d.tar", footer=False, resume=True, manifest=beside == "manifest")
    assert caught.value.kind == "lost"
    with pytest.raises(tc.TarFormatError, match=r"tc\.repair"):
        tc.drop(tmp_path, tmp_path / "out", ["001"])
    assert contents(tmp_path) == before


@pytest.mark.parametrize("beside", ["idx", "manifest"])
def test_of_another_state(tmp_path: Path, beside: str) -> None:
    """Written again, shorter or longer, by a writer that leaves the sidecars as they are, and zeros up to a record of tar."""
    for count in (1, 20):
        folder = tmp_path / f"{count}"
        path = write_with(folder, beside, footer=False)
        other = write(tmp_path / f"other {count}", count, footer=False, dali_index=False, manifest=False)
        path.write_bytes(other.read_bytes() + bytes(2048))
        assert list(tc.write_index(path).keys) == [f"{i:03d}" for i in range(count)]


@pytest.mark.parametrize("text", ["", "v1.2 1\n", "v1.2 1\njpg x y a.jpg\n", "v9 1\njpg 9000 1 a.jpg\n", "\xff\0"])
def test_an_idx_that_says_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(build([("a.json", b"1")]) + bytes(9000))
    (tmp_path / "a.idx").write_text(text, "latin-1")
    tc.write_index(path)
    assert tc.verify(path).ok


def test_a_shard_that_an_index_accounts_for(tmp_path: Path) -> None:
    """A wrong count is mended where no room is left for members."""
    path = write(tmp_path, 3)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"nsamples": 3', '"nsamples": 9'))
    tc.write_index(path)
    assert tc.verify(tmp_path).ok


MADE = {"model": "vae", "revision": "c3"}


@pytest.mark.parametrize("had_footer", [True, False])
@pytest.mark.parametrize("has_manifest", [True, False])
def test_fingerprints_are_kept(tmp_path: Path, has_manifest: bool, had_footer: bool) -> None:
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, fingerprint=MADE, footer=had_footer or not has_manifest, manifest=has_manifest) as sink:
        sink.write("a", sample(0))
    for _ in range(2):
        assert tc.write_index(path).fingerprint == MADE
        assert tc.open(path, expect=MADE).fingerprint == MADE
        if has_manifest:
            assert tc.open(tmp_path, expect=MADE).fingerprint == MADE
            listed = json.loads((tmp_path / "manifest.json").read_text())["tensorcache"]["fingerprints"]
            assert listed == {"x.tar": MADE}
            assert tc.verify(tmp_path).ok


def test_fingerprints_beside_a_damaged_footer(tmp_path: Path) -> None:
    """An index whose digest fails says nothing: the manifest does, if it lists the shard."""
    for has_manifest in (True, False):
        path = tmp_path / f"{has_manifest}" / "x.tar"
        with tc.ShardWriter(path, fingerprint=MADE, manifest=has_manifest) as sink:
            sink.write("a", sample(0))
        content = path.read_bytes()
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
        assert tc.write_index(path).fingerprint == (MADE if has_manifest else None)


def test_a_fingerprint_of_another_file_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tc.ShardWriter(path, fingerprint=MADE, manifest=False) as sink:
        sink.write("a", sample(0))
    tc.write_index(path)
    write(tmp_path / "other", 2, footer=False).rename(path)
    assert tc.write_index(path).fingerprint is None
