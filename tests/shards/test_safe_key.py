"""Keys of any text: legal for every reader, different where the texts are, and back."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import example, given
from hypothesis import strategies as st

import wds_tensorcache as tc

# ASCII without dots and white space, a plain path, no name that readers skip
IS_LEGAL = re.compile(r"(?!__)[A-Za-z0-9_%-]+(/[A-Za-z0-9_%-]+)*").fullmatch
AWKWARD = [
    "", " ", ".", "..", "/", "//", "_", "__", "___x", "__x/y", "a/", "/a", "a//b", "a/../b", "a/b", "a/__b", "%", "%25", "%2",
    "%empty", "empty", "a%-" + "0" * 40, "photo (1).v2", "IMG_1.JPG", "img_1.jpg", "n01/n01_2.JPEG", "ä", "a\u0308", "\0",
    "\n", "\ud800", "\udcff", "\ud83d\ude00", "😀", "C:\\x", "s3://bucket/key", "a" * 80, "a" * 81, "." * 26, "." * 27,
    "a" * 100_000, "a" * 99_999 + "b", "é" * 60, "x/" * 39 + "y/z", "x/" * 18 + "y/" * 40,
]  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=())) | st.text("_/.%a-\ud800é", max_size=40) | st.sampled_from(AWKWARD)


def back(key: str) -> str | None:
    """Return the original name from the text of a key; None if it was too long."""
    if "%-" not in key:
        return tc.original_name(key)
    with pytest.raises(tc.InvalidKeyError, match="only a hash of its name"):
        tc.original_name("".join(key))
    return None


@pytest.mark.parametrize("wrong", [None, 5, b"a"])
def test_only_text(wrong: Any) -> None:
    for function in (tc.safe_key, tc.original_name):
        with pytest.raises(TypeError, match=f"as a str, got a {type(wrong).__name__}"):
            function(wrong)


@given(TEXTS, TEXTS)
@example("%empty", "")
@example("a" * 38 + "%-" + "0" * 40, "a" * 81)
def test_any_text(one: str, other: str) -> None:
    for name in (one, other):
        made = tc.safe_key(name)
        assert IS_LEGAL(made)
        assert len(f"{made}.safetensors") <= 100
        assert tc.original_name(made) == name
        assert back(made) in (name, None)
        assert back(made) == name or len(name.encode("utf-8", "surrogatepass")) > 29
        assert tc.safe_key(made) == made or "%" in made
    assert (tc.safe_key(one) == tc.safe_key(other)) == (one == other)


def test_all_awkward_names_have_different_keys() -> None:
    assert len(set(map(tc.safe_key, AWKWARD))) == len(AWKWARD)


@pytest.mark.parametrize("name", ["000017", "a/b", "n01440764/n01440764_10026", "IMG-1_x", "_a", "a" * 88])
def test_plain_names_stay(name: str) -> None:
    assert tc.safe_key(name) == name == tc.original_name(name)


def test_what_it_looks_like() -> None:
    assert tc.safe_key("photo (1).v2") == "photo%20%281%29%2Ev2"
    assert tc.safe_key("é" * 60)[-42:-40] == "%-"


@pytest.mark.parametrize(
    "made", ["%", "%2", "%zz", "%61", "%2f", "a.b", "%C3", "a%2Fb", "", "%ED", "ä", "\ud800", "%-", "__a"]
)
def test_keys_of_another_origin(made: str) -> None:
    with pytest.raises(tc.InvalidKeyError, match=r"was not made by tc\.safe_key"):
        tc.original_name(made)


def test_what_is_not_text() -> None:
    name: Any = Path("a")
    with pytest.raises(TypeError, match="expected the name as a str, got a PosixPath"):
        tc.safe_key(name)


def test_a_refused_key_names_the_remedy(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path) as sink, pytest.raises(tc.InvalidKeyError, match=r"tc\.safe_key"):
        sink.write("photo.1", 0)


def test_every_reader_reads_them(tmp_path: Path) -> None:
    keys = {tc.safe_key(name): i for i, name in enumerate(AWKWARD)}
    with tc.ShardWriter(tmp_path / "a.tar", fsync=False) as sink:
        for key, i in keys.items():
            sink.write(key, {"i": i}, json=i)
    assert tc.verify(tmp_path).ok
    with tc.open(tmp_path) as cache:
        assert list(cache.keys()) == list(keys)
        assert [back(key) in (name, None) for key, name in zip(cache.keys(), AWKWARD, strict=True)] == [True] * len(
            keys
        )
        assert [cache[key]["i"] for key in keys] == list(keys.values())
    found = {
        sample["__key__"]: int(sample["json"]) for sample in wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    }
    assert found == keys
    with tarfile.open(tmp_path / "a.tar") as archive:
        archive.extractall(tmp_path / "x", filter="data")
    assert len(list((tmp_path / "x").rglob("*.json"))) == len(keys)
