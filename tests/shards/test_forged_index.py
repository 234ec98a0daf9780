"""An index with a right digest that is not true: of a stranger, or of another shard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.cli.command import run
from tests.reading.batches import write as write_samples
from tests.shards import damage
from tests.shards.footers import U8, U64, Change, end_of, forge, forge_names, put, rename, replace


def write(path: Path) -> Path:
    # samples 0 and 2 have one layout, 1 and 3 another one of as many bytes
    xs = [torch.full((2, 8) if i % 2 else (8, 2), i, dtype=torch.uint8) for i in range(4)]
    samples = {f"k{i}": {"x": x, "i": i} for i, x in enumerate(xs)}
    write_samples(path, samples, lambda i: {"txt": f"text {i}"}, manifest=False, dali_index=False)
    return path


@pytest.mark.parametrize("places", [(0,), (1,), (2,), (0, 1, 2)], ids=["first", "middle", "last", "all"])
def test_a_sidecar_of_another_shard_of_the_same_length_is_refused(tmp_path: Path, places: tuple[int, ...]) -> None:
    for folder, keys in {"a": "012", "b": ["x" if i in places else str(i) for i in range(3)]}.items():
        samples = {f"{folder if key == 'x' else 'k'}{i}": {"x": torch.full((8,), i)} for i, key in enumerate(keys)}
        write_samples(tmp_path / folder / "x.tar", samples, footer=False, manifest=False, dali_index=False)
    path = tmp_path / "a" / "x.tar"
    tc.write_index(path, dali_index=False)
    os.utime(path.with_name("x.tar.index"))
    (tmp_path / "b" / "x.tar").replace(path)
    with pytest.raises(tc.FormatError, match="x.tar: .*lists 'k.*' of .* where the shard has 'b.*is stale") as caught:
        tc.open(path)
    assert caught.value.kind == "index"
    assert any(fault.kind == "index" for fault in tc.verify(path).faults)
    run("index", path.parent if places == (0,) else path)
    assert [int(tensor[0]) for tensor in tc.open(path).read_batch(range(3), collate="list")["x"]] == [0, 1, 2]


REFUSED: dict[str, tuple[Change, str]] = {
    "tensors outside": (put("cache.0.tensors_begin", 3, 1 << 40), "outside the archive"),
    "tensors before the first header": (put("cache.0.tensors_begin", 0, 511), "outside the archive"),
    "a member that ends outside": (put("member.0.nbytes", 3, 5000), "beyond the archive"),
    "no such layout": (put("cache.0.layout", 3, 99), "layout that does not exist"),
    "no such form": (replace(layouts__form=np.full(2, 7, U8)), "form that does not exist"),
    "more shapes": (replace(layouts__dims=np.ones(9, U8)), "dimensions do not match their forms"),
    "fewer digests": (replace(cache__0__digest=np.ones(2, U64)), "unequal lengths"),
    "rows that fall": (replace(cache__0__rows=np.array([0, 2, 1, 3], U8)), "impossible rows"),
    "a row outside": (replace(cache__0__rows=np.array([0, 1, 2, 4], U8)), "impossible rows"),
    "keys that end too soon": (replace(keys__text=np.full(9, 65, U8)), "keys that overlap"),
    "empty keys": (replace(keys__ends=np.array([0, 2, 4, 8], U8)), "empty keys"),
    "an array is missing": (lambda arrays: arrays.pop("cache.0.digest"), "incomplete"),
    "skeletons that overlap": (replace(cache__0__skeleton_nbytes=np.array([11000, 8000, 5000, 2000], U64)), "overlap"),
    "huge shapes": (replace(layouts__dims=np.full(4, (1 << 64) - 1, U64)), "impossible size"),
    "a huge beginning": (replace(layouts__data_begin=np.full(2, (1 << 64) - 8, U64)), "impossible size"),
    "an array of floats": (replace(keys__ends=np.ones(4)), r"the array 'keys.ends': 'F64\[4\]"),
}


NAMES: list[dict[str, Any]] = [
    {"caches": 5}, {"caches": [[]]}, {"caches": ["Ä"]}, {"caches": ["", ""]}, {"caches": ["", "a"]}, {"caches": None},
    {"members": [5]}, {"members": ["txt", "gif"]}, {"members": ["TXT"]}, {"members": ["\ud800"]},
    {"forms": 5}, {"forms": []}, {"forms": [[["x", "U8"]]]}, {"forms": [[["x", [], 2]]]}, {"forms": [[["x", "U9", 2]]]},
    {"forms": [[["x", "U8", True]]]}, {"forms": [[["x", "U8", 65]]]}, {"forms": [[["x", "U8", -1]]]},
    {"forms": [[[5, "U8", 2]]]}, {"forms": [[["x", "U8", 1]] * 2], "references": [["tensor:x"] * 2]},
    {"references": []}, {"references": [["tenxor:x"]]}, {"references": [["tensor:y"]]},
    {"further": []}, {"further": [[["x", "x"]]]}, {"further": [[["y", "z"]]]}, {"further": [[[1, "x"]]]},
    {"further": [[["y", "x"], ["y", "x"]]]}, {"fingerprint": 5},
]  # fmt: skip
REFUSED |= {f"{names}": (rename(**names), "index") for names in NAMES}
TEXTS = [b"", b"\xff", b"[" * 100_000, b"[]", b"null", b"{}"]
REFUSED |= {f"{text[:9]!r}": (replace(names=np.frombuffer(text, U8)), "the index") for text in TEXTS}


@pytest.mark.parametrize("kind", REFUSED)
def test_impossible_arrays_and_names_are_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "x.tar")
    change, message = REFUSED[kind]
    forge(path, change)
    with pytest.raises(tc.FormatError, match=f"x.tar: .*({message})"):
        tc.open(path)


def test_repair_believes_no_index_that_swaps_keys(tmp_path: Path) -> None:
    path = damage.write(tmp_path / "a", 4, dali_index=False, manifest=False)
    forge(path, replace(keys__text=np.frombuffer(b"000002001003", U8)))
    places = damage.members(path)
    for name in ("001.skel.pyd", "001.safetensors"):
        damage.flip(path, places[name][0] - 300)
    tc.repair(path, tmp_path / "out")
    with tc.open(tmp_path / "out") as cache:
        prompts = {key: value["prompt"] for key, value in zip(cache.keys(), cache, strict=True)}
    assert prompts == {key: f"photo {int(key)}" for key in ("000", "002", "003")}


def test_arrays_of_any_width_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar")
    forge(path, lambda arrays: arrays.update({n: a.astype(U64) for n, a in arrays.items() if n.startswith("cache")}))
    with tc.open(path) as cache:
        assert [bool((cache.read_batch([i])["x"] == i).all()) for i in range(4)] == [True] * 4


def test_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(bytes(1024))
    assert list(tc.write_index(path, dali_index=False).keys) == []
    path.write_bytes(path.read_bytes() + Path(f"{path}.index").read_bytes())
    assert end_of(path) == 0
    none = np.empty(0, U64)
    columns = ("skeleton_begin", "skeleton_nbytes", "tensors_begin", "layout", "digest")
    forge(path, lambda arrays: arrays.update({f"cache.0.{column}": none for column in columns}))
    forge_names(path, caches=[""])
    with tc.open(path) as cache:
        assert (len(cache), list(cache), cache.schema) == (0, [], {})
    content = path.read_bytes()
    forge(path, replace(keys__text=np.full(1, 65, U8)))
    with pytest.raises(tc.FormatError, match="keys that overlap"):
        tc.open(path)
    for ndim in (64, 65, -1, True):  # without samples, no dimensions contradict it
        path.write_bytes(content)
        forge_names(path, forms=[[["x", "U8", ndim]]], references=[["tensor:x"]])
        if ndim == 64:
            tc.open(path).close()
        else:
            with pytest.raises(tc.FormatError, match="impossible value for form"):
                tc.open(path)
