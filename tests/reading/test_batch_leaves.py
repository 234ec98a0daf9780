"""The small values of a batch, and samples that do not fit into one batch."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import damage, write

ABC = ["a", "b", "c"]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    samples = [{"x": torch.tensor([i]), "name": name, "size": (i, [name])} for i, name in enumerate(ABC)]
    return write(tmp_path, samples, max_samples=2)


def test_leaves_are_like_lists(cache: Any) -> None:
    for _ in range(3):  # later by template
        names = cache.read_batch(range(3))["name"]
        assert len(names) == 3
        assert (names[0], names[-1], names[1:]) == ("a", "c", ["b", "c"])
        assert list(names) == names.tolist() == ABC
        assert names == ABC
        assert names != ["a"]
        assert names == cache.read_batch(["000", "001", "002"])["name"]
        assert repr(names) == repr(ABC)
        assert type(pickle.loads(pickle.dumps(names))) is type(names)
        assert pickle.loads(pickle.dumps(names)) == ABC
        with pytest.raises(TypeError, match="unhashable"):
            hash(names)
        assert cache.read_batch([2, 0])["size"] == [(2, ["c"]), (0, ["a"])]


def write_named(folder: Path, tensor: str) -> tuple[str, str, int]:
    """Write three samples with names; return their folder, the shard of the first two, and where the name of '001' ends in it.

    The names of tensors differ by test: templates are learned by them, for all caches of a process.
    """
    samples = [{tensor: torch.tensor([i]), "name": f"{name} of {tensor}"} for i, name in enumerate(ABC)]
    written = write(folder, samples, max_samples=2)
    path = min(map(str, Path(written).glob("*.tar")))
    name = f"b of {tensor}".encode()
    return written, path, Path(path).read_bytes().index(name) + len(name)


def test_skeletons_are_read_on_first_use_only(tmp_path: Path) -> None:
    folder, path, end = write_named(tmp_path / "a", "first use")
    for _ in range(3):
        with tc.open(folder) as cache:
            batch = cache.read_batch([0, 1, 2, 1])
            before = damage(path, end, b"\xff" * 2)
            again = cache.read_batch([0, 1, 2, 1])  # the structure is known
            assert again["first use"].tolist() == batch["first use"].tolist() == [[0], [1], [2], [1]]
            for leaves in (batch["name"], again["name"]):
                for use in (list, repr):
                    with pytest.raises(tc.FormatError, match="sample '001'"):
                        use(leaves)
            damage(path, end, before)
            assert batch["name"] == [f"{name} of first use" for name in "abcb"]
    folder, path, end = write_named(tmp_path / "b", "tensors alone")
    with tc.open(folder) as cache:
        for _ in range(3):
            cache.read_tensors([2])
        damage(path, end, b"\xff" * 2)
        assert cache.read_tensors([1, 0])["tensors alone"].tolist() == [[1], [0]]  # a sample of this form was read
        for read in (lambda: cache.read_batch([1, 0]), lambda: cache[1]):
            with pytest.raises(tc.FormatError, match="sample '001'"):
                read()


def test_samples_of_equal_tensors_and_other_keys(tmp_path: Path) -> None:
    """The index tells these apart by nothing; the first sample's skeleton does."""
    samples = [{"x": torch.tensor([i]), "even" if i % 2 == 0 else "odd": i} for i in range(8)]
    with tc.open(write(tmp_path, samples, max_samples=3)) as cache:
        for _ in range(3):
            for first, name in enumerate(("even", "odd")):
                for numbers in ([first, first + 2], [first + 4, first], [first + 6, first + 6]):
                    batch = cache.read_batch(numbers)
                    assert list(batch) == ["x", name]
                    assert batch[name] == numbers
            with pytest.raises(tc.BatchError, match="'001' has nothing at 'even'"):
                cache.read_batch([0, 1])["even"].tolist()


def test_containers_are_kept(tmp_path: Path) -> None:
    def sample(i: int) -> Any:
        x, inner = torch.tensor([i]), {"y": torch.tensor(-i)}
        loop: list[Any] = [x]
        loop.append(loop)
        return {
            "a": x,
            "b": [x, inner],
            "c": inner,
            "loop": loop,
            "ordered": OrderedDict(b=x, a=i),
            "default": defaultdict(list, {1: x}),
            "deque": deque([x, i], maxlen=5),
            "tuple": (x, (i, x)),
            (1, "k"): {"empty": {}, "none": []},
            "set": {i},
        }

    with tc.open(write(tmp_path, [sample(i) for i in range(4)])) as cache:
        for collate in ("stack", "list"):
            batch = cache.read_batch([2, 3], collate=collate)
            parts = batch["a"], batch["b"][0], batch["loop"][0], batch["ordered"]["b"], batch["default"][1]
            assert [[int(row) for row in part] for part in parts] == [[2, 3]] * 5
            assert batch["a"] is not batch["b"][0]  # a transform may overwrite one of them
            assert batch["c"] is batch["b"][1]
            assert batch["loop"][1] is batch["loop"]
            kinds = [type(batch[name]) for name in ("ordered", "default", "deque", "tuple")]
            assert kinds == [OrderedDict, defaultdict, deque, tuple]
            assert (list(batch["ordered"]), batch["default"].default_factory) == (["b", "a"], list)
            assert (batch["deque"].maxlen, type(batch["tuple"][1]), batch[1, "k"]["empty"]) == (5, tuple, {})


X = torch.zeros(2)
UNFIT: list[Any] = [
    ({"x": torch.zeros(3)}, "stack", r"is \[2\] in sample '000', but \[3\] in '002'; use collate='pad' or"),
    ({"x": torch.zeros(2, 1)}, "stack", r"is \[2\] in sample '000', but \[2, 1\] in '002'; use collate='list', or"),
    ({"x": torch.zeros(2, 1)}, "pad", r"is \[2\] in sample '000', but \[2, 1\] in '002', and .* use collate='list'"),
    ({"x": X.half()}, "list", r"'x' is tensor of torch.float32 in sample '000', but .*float16 in '002'"),
    ({"x": np.zeros((2, 2), "f4")}, "list", r"'x' is tensor of torch.float32 .*, but ndarray of float32 in '002'"),
    ({"y": X}, "stack", r"sample '002' has no tensor 'x', but '000' has"),
    ({"x": [X]}, "list", r"sample '000' has neither tensor 'x.0' of the batch, nor None in its place"),
    ({"x": X, "a": 5}, "stack", "sample '002' has a value at 'a', but '000' has a dict .*: their structures differ"),
    ({"x": X}, "stack", "sample '002' has nothing at 'a', but '000' has a dict of length 1: their structures differ"),
]


@pytest.mark.parametrize(("other", "collate", "message"), UNFIT, ids=str)
def test_samples_that_do_not_fit(tmp_path: Path, other: Any, collate: str, message: str) -> None:
    good = {"x": X, "a": {"b": [1]}}
    with tc.open(write(tmp_path, [good, good, other])) as cache:
        assert cache.read_batch([0, 1], collate=collate)["a"]["b"] == [[1], [1]]
        for numbers in ([0, 1, 2], [0, 2, 1, 2]):
            with pytest.raises(tc.BatchError, match=message):
                cache.read_batch(numbers, collate=collate)["a"]["b"].tolist()
        if "structures differ" in message:
            assert cache.read_tensors([0, 2])["x"].shape == (2, 2)


@pytest.mark.parametrize(
    ("collate", "kind", "is_ragged"),
    [("stack", "tensor", False), ("list", "ndarray", True), ("pad", "tensor", True), (list, "ndarray", False)],
)
def test_bools_that_are_none(tmp_path: Path, collate: Any, kind: str, is_ragged: bool) -> None:
    rows = [torch.ones(20 + i * is_ragged, 2, dtype=torch.bool) for i in range(3)]
    folder = write(tmp_path, [{"ok": row if kind == "tensor" else row.numpy()} for row in rows])
    path = next(Path(folder).glob("*.tar"))
    at = [match.start() for match in re.finditer(b"\x01{40,}", path.read_bytes())][1]
    with tc.open(folder) as cache:
        damage(str(path), at + 3, b"\x07")
        assert len(cache.read_batch([0, 2], collate=collate)) == (2 if collate is list else 1)
        message = rf"tensor 'ok' of a batch with sample '00{int(is_ragged)}': a bool .* other than 0 and 1"
        with pytest.raises(tc.FormatError, match=message):
            cache.read_batch([0, 1], collate=collate)
