"""Members made with only pickle, safetensors and webdataset decode through `tc.decode()`."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.same import assert_same

PICKLERS = [pickle.Pickler, pickle._Pickler]  # type: ignore[attr-defined]
every_pickle = pytest.mark.parametrize(("base", "protocol"), [(base, number) for base in PICKLERS for number in (4, 5)])


def pickle_by_hand(value: Any, base: type, protocol: int) -> tuple[bytes, dict[str, Any]]:
    """Return a skeleton written by FORMAT.md's rules for other tools, and its tensors and arrays by name."""
    named: dict[str, Any] = {}

    class Skeleton(base):  # type: ignore[misc]
        def reducer_override(self, part: Any) -> Any:
            kind = {torch.Tensor: "tensor", np.ndarray: "ndarray"}.get(type(part))
            if kind is None:
                return NotImplemented
            name = f"mine.{len(named)}"
            named[name] = part
            return format, (f"{kind}:{name}",)

    file = io.BytesIO()
    Skeleton(file, protocol).dump(value)
    return file.getvalue(), named


def save_with_torch(named: dict[str, Any]) -> bytes:
    return safetensors.torch.save({name: torch.as_tensor(value) for name, value in named.items()})


def save_with_numpy(named: dict[str, Any]) -> bytes:
    return safetensors.numpy.save({name: np.asarray(value) for name, value in named.items()})


def read_back(skeleton: bytes, tensors: bytes, folder: Path, **decode: Any) -> Any:
    """Write a shard without this package, and read it with our stage."""
    path = str(folder / "by_hand.tar")
    with wds.TarWriter(path, encoder=False) as sink:
        sink.write({"__key__": "a", "skel.pyd": skeleton, "safetensors": tensors})
    # read to its end, so that the file is closed
    samples = list(wds.DataPipeline(wds.SimpleShardList([path]), wds.tarfile_to_samples()))
    (sample,) = tc.decode(**decode)(samples)
    return sample["tensorcache"]


def tensors_and_arrays() -> dict[str, Any]:
    tensor, array = torch.arange(6.0).view(2, 3), np.arange(4, dtype=np.int16)
    return {"a": tensor, "b": [array, (tensor, {"c": torch.tensor(7), "d": array})], "e": np.zeros((0, 2), np.float32)}


@pytest.mark.parametrize("save", [save_with_torch, save_with_numpy])
def test_tensors_and_arrays(save: Callable[..., bytes], tmp_path: Path) -> None:
    skeleton, named = pickle_by_hand(tensors_and_arrays(), pickle.Pickler, 4)
    tensors = save(named)
    assert_same(tensors_and_arrays(), read_back(skeleton, tensors, tmp_path, lazy=False))
    lazy = read_back(skeleton, tensors, tmp_path)
    assert_same(tensors_and_arrays(), tc.realize(lazy))
    assert (type(lazy["a"]), type(lazy["b"][0])) == (tc.LazyTensor, tc.LazyArray)
    assert lazy["a"].name == "mine.0"
    with pytest.raises(tc.FormatError, match="by_hand.tar: sample 'a': members .* cannot be verified"):
        read_back(skeleton, tensors, tmp_path, verify=True)


PLAIN: dict[str, Any] = {
    "constants": [None, True, False, ...],
    "ints": [0, 255, 256, 65535, 65536, -1, -129, 1 << 31, -(1 << 63), 1 << 600, -(1 << 3000)],
    "floats": [0.0, -0.0, 1.5, float("inf"), float("nan"), 5e-324],
    "complex": 1.5 - 2j,
    "text": ["", "a", "é€𝄞", "\ud800", "x" * 300, "ü" * 100_000, "tensor:mine.0"],
    "bytes": [b"", b"a", bytes(300), bytes(200_000), bytearray(b"abc")],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), tuple(range(10))],
    "sets": [set(), {1, "a", None}, frozenset(), frozenset({(1, 2), b"x"})],
    "ordered": OrderedDict([("z", 1), ("a", [2])]),
    "default": defaultdict(list, {"x": [1]}),
    "deques": [deque([1, 2]), deque([3], maxlen=4)],
    "times": [datetime(2024, 2, 29, 1, 2, 3, 4), datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=-5)))],
    "decimals": [Decimal("1.10"), Decimal("-Infinity")],
    "keys": {1: "int", None: "none", (1, "a"): "tuple", 2.5: "float", b"b": "bytes", frozenset({1}): "frozenset"},
    "spans": [slice(1, None, 2), range(1, 10, 3)],
    "many": list(range(3000)),
    "torch": [torch.Size([2, 0]), torch.bfloat16, torch.device("cuda", 1), torch.Size([])],
}


@every_pickle
def test_values(base: type, protocol: int) -> None:
    only_torch = [torch.rand(3).bfloat16(), torch.rand(2).to(torch.float8_e4m3fn)]
    sample = {**PLAIN, "x": tensors_and_arrays(), "dtypes": only_torch}
    skeleton, named = pickle_by_hand(sample, base, protocol)
    assert_same(sample, tc.decode_sample(skeleton, save_with_torch(named)))


@every_pickle
def test_aliases_and_cycles(base: type, protocol: int) -> None:
    tensor, shared = torch.arange(3), ["shared"]
    loop: list[Any] = [tensor, shared, {"again": (tensor, shared)}]
    loop.append(loop)
    through_tuple: list[Any] = []
    through_tuple.append((through_tuple, shared))
    sample = {"loop": loop, "tuple": through_tuple[0], "dict": {}}
    sample["dict"]["me"] = sample
    skeleton, named = pickle_by_hand(sample, base, protocol)
    assert len(named) == 1
    result = tc.decode_sample(skeleton, save_with_torch(named))
    assert_same(sample, result)
    assert result["loop"][3] is result["loop"]


@pytest.mark.parametrize("protocol", range(4))
def test_older_protocols_are_refused(protocol: int) -> None:
    skeleton, named = pickle_by_hand([torch.arange(3)], pickle.Pickler, protocol)
    with pytest.raises(tc.FormatError, match="not a pickle of protocol 4 or 5"):
        tc.decode_sample(skeleton, save_with_torch(named))


def test_stock_rewrites_of_our_members() -> None:
    sample = {**diffusion_sample(3), "wide": torch.rand(2, dtype=torch.complex128), "array": np.array(["ab", "é"])}
    skeleton, tensors = tc.encode_sample(sample)
    rewritten = safetensors.torch.save(safetensors.torch.load(tensors))
    assert b"__metadata__" not in rewritten
    assert_same(sample, tc.decode_sample(skeleton, rewritten))
    assert_same(sample, tc.decode_sample(skeleton, rewritten, lazy=False))
    assert_same(sample, tc.decode_sample(pickletools.optimize(skeleton), tensors))
    with pytest.raises(tc.FormatError, match="cannot be verified"):
        tc.decode_sample(skeleton, rewritten, verify=True)


def test_stock_rewrite_that_keeps_our_metadata_is_not_a_pair(tmp_path: Path) -> None:
    skeleton, tensors = tc.encode_sample(diffusion_sample(3))
    (tmp_path / "a.safetensors").write_bytes(tensors)
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as opened:
        rewritten = safetensors.torch.save({name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata())  # noqa: SIM118
    with pytest.raises(tc.FormatError, match="do not belong together"):
        tc.decode_sample(skeleton, rewritten)
