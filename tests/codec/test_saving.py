"""Lazy tensors in files and processes that know nothing of them: torch.save, pickle, copy, numpy."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wds_tensorcache as tc

SAMPLE: dict[str, Any] = {
    "half": torch.arange(4.0).bfloat16().reshape(2, 2),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 3),
    "plain": [1, "a", (2.0, None)],
}


def lazy_sample() -> Any:
    return tc.decode_sample(*tc.encode_sample(SAMPLE))


def save(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")  # torch's, of all but 2
# torch.load takes no tensor of protocol 4 with weights_only=True
@pytest.mark.parametrize(("protocol", "weights_only"), [(2, True), (3, True), (2, False), (4, False), (5, False)])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_torch_load_takes_what_torch_save_wrote(protocol: int, zipped: bool, weights_only: bool) -> None:
    lazy = lazy_sample()
    lazy["again"] = lazy["half"]
    file = save(lazy, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    loaded = torch.load(file, weights_only=weights_only)
    for name, value in SAMPLE.items():
        if isinstance(value, torch.Tensor):
            assert type(loaded[name]) is torch.Tensor
            assert loaded[name].dtype == value.dtype
            assert torch.equal(loaded[name], value)
        else:
            assert loaded[name] == value
    assert loaded["again"] is loaded["half"]


def test_alone_and_of_a_file(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "a.tar") as writer:
        writer.write("0", SAMPLE)
    with tc.open(tmp_path) as cache:
        saved = save(cache[0]["half"])
    (tmp_path / "a.tar").unlink()
    assert torch.equal(torch.load(saved), SAMPLE["half"])


def test_arrays_fail_when_they_are_saved() -> None:
    lazy = tc.decode_sample(*tc.encode_sample({"x": np.arange(3)}))
    for value in (lazy["x"], lazy):
        with pytest.raises(TypeError, match=r"torch.load refuses numpy arrays; save torch.from_numpy\(x.load\(\)\)"):
            save(value)
    array = torch.load(save(tc.realize(lazy)), weights_only=False)["x"]
    assert array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_and_copy_keep_them_lazy(protocol: int) -> None:
    lazy = tc.decode_sample(*tc.encode_sample({**SAMPLE, "array": np.arange(3)}))
    for again in (pickle.loads(pickle.dumps(lazy, protocol)), copy.deepcopy(lazy), copy.copy(lazy)):
        assert type(again["half"]) is tc.LazyTensor
        assert type(again["array"]) is tc.LazyArray
        assert torch.equal(again["half"].load(), SAMPLE["half"])
        assert again["array"].load().tolist() == [0, 1, 2]


def test_other_processes() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert torch.equal(pool.map(tc.realize, [lazy_sample()])[0]["half"], SAMPLE["half"])


def test_numpy_saves_their_values(tmp_path: Path) -> None:
    lazy = tc.decode_sample(*tc.encode_sample({"x": np.arange(3), "t": torch.arange(2)}))
    np.savez(tmp_path / "a.npz", **lazy)
    np.save(tmp_path / "a.npy", lazy["x"])
    with np.load(tmp_path / "a.npz") as found:
        assert found["x"].tolist() == [0, 1, 2]
        assert found["t"].tolist() == [0, 1]
    assert np.load(tmp_path / "a.npy").tolist() == [0, 1, 2]
