"""Samples that a template writes have the bytes that `SkeletonWriter` writes, and the same errors."""

from __future__ import annotations

import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.strategies import NUMPY_DTYPES, TORCH_DTYPES, arrays, keys, plain, tensors
from wds_tensorcache.codec import sample as codec
from wds_tensorcache.codec.skeleton import write_template
from wds_tensorcache.codec.skeleton.write_template import family_of


@pytest.fixture(autouse=True)
def no_families_from_other_tests() -> Iterator[None]:
    write_template._FAMILIES.clear()
    yield
    write_template._FAMILIES.clear()


def outcome(sample: Any, **options: Any) -> Any:
    """Return the two members of a sample, or its error."""
    try:
        return tc.encode_sample(sample, **options)
    except Exception as error:
        return type(error), str(error)


def outcome_anew(sample: Any, **options: Any) -> Any:
    """Return what `outcome` returns, without a template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "family_of", lambda sample: None)
        return outcome(sample, **options)


def is_matched(sample: Any) -> bool:
    family = family_of(sample)
    return family is not None and family.write(sample, 64) is not None


def learn(sample: Any) -> None:
    for _ in range(2):
        assert outcome(sample) == outcome_anew(sample)


texts = st.sampled_from(["", "a", "ab", "format", "builtins", "tensor:a", "\0" + "1\0", "ab" * 200])
raws = st.sampled_from([b"", b"a", b"ab", b"format", b"ab" * 200])
Leaves = st.SearchStrategy[Any]
# containers of strategies: samples of one family draw from the same strategy in the same place
structures: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([plain, texts, raws, tensors(), arrays()]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys | texts, inner, max_size=4),
    ),
    max_leaves=8,
)


def fill(draw: st.DrawFn, structure: Any) -> Any:
    if type(structure) is dict:
        return {key: fill(draw, item) for key, item in structure.items()}
    if type(structure) in (list, tuple):
        return type(structure)(fill(draw, item) for item in structure)
    return draw(structure)


@st.composite
def families(draw: st.DrawFn) -> list[Any]:
    structure = draw(structures)
    return [fill(draw, structure) for _ in range(5)]


@given(families())
def test_samples_of_one_structure(samples: list[Any]) -> None:
    write_template._FAMILIES.clear()
    for sample in [*samples, *samples]:
        assert outcome(sample) == outcome_anew(sample)


T = torch.arange(6.0)
BASE = {"ab": {"cd": "text", "n": 5}, "t": T, "l": [1, (2.5, T[:2])]}


def changed(**items: Any) -> dict[str, Any]:
    return {**BASE, **items}


class Text(str):
    pass


MATCHED = {
    "the same": BASE,
    "short texts": changed(ab={"cd": "n", "n": "n"}),
    "other atoms": changed(ab={"cd": None, "n": 1 << 300}, l=[True, (b"ab", T[3:])]),
    "bytes like a key": changed(ab={"cd": b"ab", "n": "xy"}, l=[b"cd", (b"text", T.clone())]),
    "bytes like a text": changed(ab={"cd": "xy", "n": b"xy"}),
    "a surrogate": changed(ab={"cd": "\ud800", "n": -0.0}),
    "a long text": changed(ab={"cd": "x" * 70_000, "n": float("nan")}),
    "a marker": changed(ab={"cd": "\0005\0", "n": -1}),
    "another shape": changed(t=torch.ones(2, 3)),
    "no dimensions": changed(t=torch.tensor(1.0)),
    "an empty tensor": changed(t=torch.ones(0, 7)),
    "not contiguous": changed(t=torch.ones(2, 3).T),
    "expanded": changed(t=torch.ones(1).expand(4)),
    "from the middle of a storage": changed(t=T[2:4]),
    "with gradients": changed(t=torch.ones(2, requires_grad=True)),
    "views of one storage": changed(t=T[1:], l=[1, (2, T[1:])]),
    "negated": changed(t=torch.ones(2, dtype=torch.complex64).conj().imag),
    "many dimensions": changed(t=torch.ones([1] * 60)),
}


@pytest.mark.parametrize("sample", MATCHED.values(), ids=MATCHED)
def test_samples_that_match(sample: Any) -> None:
    learn(BASE)
    assert is_matched(sample)
    for align in (64, 8, 4096):
        assert outcome(sample, align=align) == outcome_anew(sample, align=align)


LOOP: list[Any] = [1]
LOOP.append((LOOP, T))
PAIR = (2.5, T[:2])
NOT_MATCHED = {
    "a text twice": changed(ab={"cd": "xy", "n": "xy"}),
    "bytes twice": changed(ab={"cd": b"xy", "n": b"xy"}),
    "a text like a key": changed(ab={"cd": "ab", "n": 5}),
    "a text like a reference": changed(ab={"cd": "tensor:t", "n": 5}),
    "a text like a global": changed(ab={"cd": "format", "n": 5}),
    "a tensor twice": changed(l=[1, (2.5, T)]),
    "a container twice": changed(ab=PAIR, l=[1, PAIR]),
    "another order": {"ab": BASE["ab"], "l": BASE["l"], "t": T},
    "another order within": changed(ab={"n": 5, "cd": "text"}),
    "another key": changed(ab={"cd": "text", "m": 5}),
    "a key of a subclass": changed(ab={Text("cd"): "text", "n": 5}),
    "a key of another type": changed(ab={"cd": "text", 5: 5}),
    "one more": changed(l=[1, (2.5, T[:2]), 3]),
    "one less": changed(l=[1]),
    "an ordered dict": changed(ab=OrderedDict(BASE["ab"])),
    "a list for a tuple": changed(l=[1, [2.5, T[:2]]]),
    "a container for an atom": changed(ab={"cd": [], "n": 5}),
    "a tensor for an atom": changed(ab={"cd": T[:1], "n": 5}),
    "an atom for a tensor": changed(t=5),
    "a listed type": changed(ab={"cd": 1j, "n": 5}),
    "a scalar of numpy": changed(ab={"cd": np.float64(1.5), "n": 5}),
    "a parameter": changed(t=torch.nn.Parameter(T)),
    "an array": changed(t=T.numpy()),
    "another dtype": changed(t=T.double()),
    "a stored dtype": changed(t=T.to(torch.complex128)),
    "a lazy tensor": changed(t=tc.decode_sample(*tc.encode_sample(T))),
    "in itself": changed(l=LOOP),
    "an object": changed(ab={"cd": object, "n": 5}),
    "a text of a subclass": changed(ab={"cd": Text("x"), "n": 5}),
    "a meta tensor": changed(t=T.to("meta")),
    "a sparse tensor": changed(t=T.to_sparse()),
    "a tensor subclass": changed(t=T.as_subclass(type("Mine", (torch.Tensor,), {}))),
    "too many dimensions": changed(t=torch.ones([1] * 65)),
    "an impossible shape": changed(t=torch.empty(0, 1 << 60)),
}


@pytest.mark.parametrize("sample", NOT_MATCHED.values(), ids=NOT_MATCHED)
def test_samples_that_do_not_match(sample: Any) -> None:
    learn(BASE)
    assert not is_matched(sample)
    assert outcome(sample) == outcome_anew(sample)
    assert is_matched(BASE)  # one such sample changes nothing
    for _ in range(40):
        assert outcome(sample) == outcome_anew(sample)
    assert outcome(BASE) == outcome_anew(BASE)


def test_freed_storage() -> None:
    learn(BASE)
    sample = changed(t=torch.ones(3))
    sample["t"].untyped_storage().resize_(0)
    assert not is_matched(sample)
    with pytest.raises(tc.EncodeError, match="value at 't': .* its storage was freed"):
        tc.encode_sample(sample)
    sample["t"].untyped_storage().resize_(12)  # as trainers do that shard parameters


@pytest.mark.parametrize("view", [lambda t: t.view(4, 4).t(), lambda t: t[::2]])
def test_storages_of_strided_tensors_can_still_be_resized(view: Any) -> None:
    learn(BASE)
    plain = torch.arange(16.0)
    tc.encode_sample(changed(t=view(plain)))
    plain.untyped_storage().resize_(0)


def test_tensors_without_memory_are_refused() -> None:
    learn(BASE)

    def encode(tensor: torch.Tensor) -> torch.Tensor:
        for sample in (changed(t=tensor), {"other": [tensor]}, {"other": [tensor.bfloat16()]}):
            with pytest.raises(tc.EncodeError, match="no memory"):
                tc.encode_sample(sample)
        return tensor

    torch.func.functionalize(encode)(torch.arange(3.0))


@pytest.mark.parametrize("align", [0, -8, 12])
def test_alignments_that_are_refused(align: int) -> None:
    learn(BASE)
    for _ in range(2):
        assert outcome(BASE, align=align) == outcome_anew(BASE, align=align)
        assert outcome(BASE, align=align)[0] is ValueError


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_dtypes(dtype: torch.dtype) -> None:
    samples = [{"x": torch.arange(16 * n, dtype=torch.uint8).remainder(2).view(dtype), "y": n} for n in (1, 1, 2)]
    for sample in samples:
        assert outcome(sample) == outcome_anew(sample)
    assert is_matched(samples[0])


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_numpy_dtypes(dtype: np.dtype[Any]) -> None:
    samples = [{"x": np.zeros(n, dtype), "y": n} for n in (1, 1, 2)]
    for sample in samples:
        assert outcome(sample) == outcome_anew(sample)
    assert is_matched(samples[0])


def test_wide_elements_come_first() -> None:
    sample = {"a": T.half(), "b": [T.double(), T.to(torch.uint8)], "c": T, "d": T.numpy().astype(">f8")}
    learn(sample)
    assert is_matched(sample)
    assert outcome(sample) == outcome_anew(sample)


@pytest.mark.parametrize(
    "sample",
    [
        {"ab": ["ab", T]},
        {"a": PAIR, "b": PAIR},
        {"a": T, "b": T},
        {"a\0b": "x"},
        {"a": 1j},
        {1: 2},
        [T] * 200,
        [[i] for i in range(60)],
        LOOP,
        T,
        "text",
        5,
    ],
    ids=[
        "fetched",
        "shared",
        "same tensor",
        "NUL",
        "listed",
        "int",
        "long",
        "large",
        "loop",
        "tensor",
        "text",
        "int alone",
    ],
)
def test_samples_without_a_template(sample: Any) -> None:
    for _ in range(9):
        assert outcome(sample) == outcome_anew(sample)
    assert not is_matched(sample)


def test_empty_tuples_are_one_object() -> None:
    sample = {"a": (), "b": [()], "c": {}, "d": []}
    learn(sample)
    assert is_matched(sample)
    assert outcome(sample) == outcome_anew(sample)


def test_a_new_structure_is_learnt_at_its_second_sample() -> None:
    for value in (1, [1], {"a": 1}, (1, "x")):
        sample = {"x": value, "t": T}
        assert outcome(sample) == outcome_anew(sample)
        assert not is_matched(sample)
        learn(sample)
        assert is_matched(sample)


def test_learning_becomes_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = []
    real = write_template._learn
    monkeypatch.setattr(write_template, "_learn", lambda *args: learned.append(1) or real(*args))
    for length in range(1, 200):
        assert outcome({"x": [0] * length}) == outcome_anew({"x": [0] * length})
    assert len(learned) == 7  # 2, 4, 8, …, 128
    family = family_of({"x": 0})
    assert family is not None
    assert (family.template, family.num_misses) == (None, 199)


def test_few_families_are_remembered() -> None:
    for number in range(600):
        tc.encode_sample({f"key {number}": 1})
    assert 0 < len(write_template._FAMILIES) <= 256


def test_classes_in_allow_have_no_templates() -> None:
    learn(BASE)
    for sample in (BASE, changed(t=Text("x"))):
        assert outcome(sample, allow=[Text]) == outcome_anew(sample, allow=[Text])


def test_nothing_of_a_sample_is_kept() -> None:
    sample = {"x": torch.ones(3), "y": ["text", {"z": 1}]}
    died = weakref.ref(sample["x"])
    learn(sample)
    learn(sample)
    del sample
    assert died() is None


def test_repeated_writes_copy_nothing() -> None:
    sample = {"x": torch.ones(1000), "y": 1}
    learn(sample)
    encoded = codec.encode_views(sample, {})
    sample["x"][0] = 7
    assert bytes(encoded.buffers[0][:4]) == np.float32(7).tobytes()


def test_a_sample_that_another_thread_changes() -> None:
    """A trace function does what the thread does: between two lines, it changes the order of a dict or the length of a list."""
    inner = {"key": "k1", "n": 1}
    sample: dict[str, Any] = {"x": inner, "l": [4, T], "t": T.clone()}
    chance = random.Random(0)

    def change(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != write_template.__file__:
            return None
        if chance.random() < 0.1:
            key = next(iter(inner))
            inner[key] = inner.pop(key)
        elif chance.random() < 0.01:
            sample["l"][2:] = [5] * (len(sample["l"]) == 2)
        return change

    before = sys.gettrace()
    for number in range(1000):
        if number % 5 == 0:
            write_template._FAMILIES.clear()
            learn(sample)
        sys.settrace(change)
        try:
            members = tc.encode_sample(sample)
        finally:
            sys.settrace(before)
        found = tc.decode_sample(*members)
        assert found["x"] == {"key": "k1", "n": 1}
        assert found["l"][0] == 4
        assert found["l"][2:] in ([], [5])


def test_shards_are_the_same(tmp_path: Path) -> None:
    def write(folder: Path) -> list[bytes]:
        with tc.ShardWriter(folder / "%03d.tar", max_samples=50, fsync=False) as writer:
            for index in range(180):
                ragged = {"x": torch.ones(index % 7, 2), "words": ["ab"] * (index % 3), "n": index * 100}
                members = {"other.tensorcache": ragged} if index % 5 else {}
                writer.write(f"{index:06d}", diffusion_sample(index), json={"n": index}, **members)
        return [path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".json"]

    new = write(tmp_path / "new")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "family_of", lambda sample: None)
        old = write(tmp_path / "old")
    assert len(new) == 8
    assert new == old
    assert is_matched(diffusion_sample(9))
