"""Our encoder and decoder in webdataset's own writers and pipelines."""

from __future__ import annotations

import gc
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image
from torch.utils.data import DataLoader

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.same import assert_same
from tests.shards.tars import build_with_tarfile


def read(path: str, *stages: Any, **options: Any) -> list[dict[str, Any]]:
    source = wds.SimpleShardList(path)
    return list(wds.DataPipeline(source, wds.tarfile_to_samples(), *stages, tc.decode(**options)))


def test_round_trip(shard: str) -> None:
    for options in ({}, {"verify": True}, {"lazy": False}):
        samples = read(shard, **options)
        assert [sample["__key__"] for sample in samples] == [f"{i:03d}" for i in range(10)]
        for i, sample in enumerate(samples):
            assert sample.keys() == {"__key__", "__url__", "tensorcache", "json"} | (sample.keys() & {"__local_path__"})
            assert sample["__url__"] == shard
            assert sample["json"] == {"label": i}
            assert_same(diffusion_sample(i), sample["tensorcache"])
    assert isinstance(samples[0]["tensorcache"]["latent"]["samples"], torch.Tensor)


def test_other_members_are_decoded_as_webdataset_does(write_shard: Any) -> None:
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    sample = {"png": image, "json": {"a": [1]}, "txt": "né", "pyd": {"a": (1, {2})}, "bin": b"raw"}
    path = write_shard([{"__key__": "a", "tensorcache": 0, **sample}])
    stock = next(iter(wds.WebDataset(path, shardshuffle=False).decode("pil")))
    (ours,) = read(path)
    (pictured,) = list(wds.DataPipeline(wds.SimpleShardList(path), wds.tarfile_to_samples(), tc.decode("pil")))
    for field in ("json", "txt", "pyd", "bin"):
        assert ours[field] == stock[field], field
    assert isinstance(pictured["png"], Image.Image)
    assert np.array_equal(pictured["png"], stock["png"])
    assert isinstance(ours["png"], bytes)

    def upper(extension: str, raw: bytes) -> Any:
        return raw.decode().upper() if extension == ".txt" else None

    (handled,) = list(wds.DataPipeline(wds.SimpleShardList(path), wds.tarfile_to_samples(), tc.decode(upper)))
    assert handled["txt"] == "NÉ"
    (only,) = read(path, only=["json"])
    assert (only["json"], only["txt"]) == ({"a": [1]}, "né".encode())


def test_other_samples_pass_through(write_shard: Any) -> None:
    import safetensors.torch

    foreign = safetensors.torch.save({"w": torch.ones(1)}, {"made": "elsewhere"})
    samples = [{"__key__": "a", "safetensors": foreign, "txt": "x"}, {"__key__": "b", "lora.safetensors": foreign}]
    first, second = read(write_shard(samples))
    assert (first["safetensors"], first["txt"]) == (foreign, "x")
    assert second["lora.safetensors"] == foreign


def broken(tmp_path: Path, how: str) -> str:
    (a, b), (c, d) = (tc.encode_sample({"x": torch.full((2,), float(i))}) for i in range(2))
    cases = {
        "no tensors": [("k.skel.pyd", a)],
        "no skeleton": [("k.safetensors", b)],
        "no named skeleton": [("k.text.safetensors", b)],
        "other half": [("k.skel.pyd", a), ("k.safetensors", d)],
        "damaged": [("k.skel.pyd", a[:-3] + b"\x00.."), ("k.safetensors", b)],
        "cut": [("k.skel.pyd", a), ("k.safetensors", b[:-1])],
    }
    path = tmp_path / "bad.tar"
    path.write_bytes(build_with_tarfile([*cases[how], ("l.safetensors", d), ("l.skel.pyd", c)]))
    return str(path)


def test_an_error_closes_the_shard(tmp_path: Path) -> None:
    path = broken(tmp_path, "other half")
    gc.disable()
    try:
        with pytest.raises(tc.FormatError, match="do not belong together"):
            read(path)
        opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        assert os.path.realpath(path) not in opened
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no tensors", "bad.tar: sample 'k': member 'safetensors' is missing, but 'skel.pyd'"),
        ("no skeleton", "bad.tar: sample 'k': member 'skel.pyd' is missing, but 'safetensors'"),
        ("no named skeleton", "bad.tar: sample 'k': member 'text.skel.pyd' is missing, but 'text.safetensors'"),
        ("other half", "bad.tar: sample 'k': members 'skel.pyd' and 'safetensors': .*do not belong together"),
        ("damaged", "bad.tar: sample 'k': members 'skel.pyd' and 'safetensors'"),
        ("cut", "bad.tar: sample 'k': members 'skel.pyd' and 'safetensors': the tensors end at byte"),
    ],
)
def test_broken_samples_name_shard_key_and_member(tmp_path: Path, how: str, message: str) -> None:
    path = broken(tmp_path, how)
    with pytest.raises(tc.FormatError, match=message):
        read(path)
    seen: list[Exception] = []

    def keep_on(exc: Exception) -> bool:
        seen.append(exc)
        return True

    (good,) = read(path, handler=keep_on)
    assert good["__key__"] == "l"
    assert torch.equal(good["tensorcache"]["x"], torch.ones(2) * 0 + 1)
    assert [type(exc) for exc in seen if isinstance(exc, tc.FormatError)] == [type(seen[0])]
    assert read(path, handler=lambda exc: False) == []


def test_samples_decoded_by_wds_decode_are_refused(shard: str) -> None:
    with pytest.raises(tc.FormatError, match=r"decoded already; use tc.decode\(\) instead of wds.decode\(\)"):
        read(shard, wds.decode())


def test_a_stage_that_is_not_called(shard: str) -> None:
    stock = wds.WebDataset(shard, shardshuffle=False)
    for pipeline in (tc.ResumablePipeline(shard, tc.decode), stock.compose(tc.decode)):
        with pytest.raises(TypeError, match=r"got generator, expected handlers, .* call it: tc\.decode\(\)"):
            next(iter(pipeline))
    with pytest.raises(TypeError, match=r"call it: tc\.tarfile_to_samples\(\)"):
        list(wds.DataPipeline(wds.SimpleShardList(shard), tc.tarfile_to_samples, tc.decode()))
    with (
        pytest.raises(TypeError, match=r"encoder=tc\.encoder\(\)"),
        wds.TarWriter(io.BytesIO(), encoder=tc.encoder) as sink,
    ):
        sink.write({"__key__": "0", "tensorcache": {"x": 1}})
    with pytest.raises(Exception, match="^") as raised:
        list(wds.WebDataset(shard, shardshuffle=False).decode(tc.decode()))
    assert "pass .compose(tc.decode()) in place of .decode" in str(raised.value.__cause__ or raised.value)


def same(sample: Any) -> Any:
    return sample


def double(sample: dict[str, Any]) -> torch.Tensor:
    return sample["tensorcache"]["latent"]["samples"] * 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # fork, from Python 3.12 on
def test_workers(shard: str) -> None:
    stages = wds.SimpleShardList([shard, shard]), wds.split_by_worker, wds.tarfile_to_samples(), tc.decode()
    pipeline = pickle.loads(pickle.dumps(wds.DataPipeline(*stages)))  # as for workers that are spawned
    # without collate_fn, DataLoader's default_convert turns tuples into lists
    samples = list(DataLoader(pipeline, batch_size=None, collate_fn=same, num_workers=2))
    assert sorted(sample["__key__"] for sample in samples) == sorted(2 * [f"{i:03d}" for i in range(10)])
    for sample in samples:
        assert isinstance(sample["tensorcache"]["latent"]["samples"], tc.LazyTensor)
        assert_same(diffusion_sample(int(sample["__key__"])), sample["tensorcache"])
    batches = DataLoader(pipeline.compose(wds.map(double)), batch_size=5, num_workers=1)
    assert [batch.shape for batch in batches] == [(5, 1, 4, 8, 8)] * 4


def test_bad_keys_and_cache_names(write_shard: Any) -> None:
    for key, message in (("a.b", "dot"), (7, "non-empty str"), (None, "__key__ is None"), ("../a", "relative path")):
        with pytest.raises(tc.InvalidKeyError, match=message):
            write_shard([{"__key__": key, "tensorcache": 0}])
    for name in ("Text", "_a", "a.b", "skel", "pyd", "safetensors", "ü", ""):
        with pytest.raises(tc.InvalidKeyError, match="cache name"):
            write_shard([{"__key__": "a", f"{name}.tensorcache": 0}])


def test_errors_when_writing_name_sample_and_field(write_shard: Any) -> None:
    with pytest.raises(tc.EncodeError, match="sample 'a', field 'x.tensorcache': value at 'f': .*store plain values"):
        write_shard([{"__key__": "a", "x.tensorcache": {"f": print}}])
    for field in ("safetensors", "SAFETENSORS", "skel.pyd", "SKEL.PYD", "x.skel.pyd", "a.TensorCache"):
        with pytest.raises(tc.InvalidKeyError, match=rf"has members \['{field}'\], but these names are reserved"):
            write_shard([{"__key__": "a", "tensorcache": 0, field: b""}])
    with pytest.raises(tc.InvalidKeyError, match=r"has members \['JPG', 'jpg'\], .* or differ only in case"):
        write_shard([{"__key__": "a", "tensorcache": 0, "JPG": b"1", "jpg": b"2"}])  # no reader could open the shard
    for field in ("a/b", "", "a b", "é"):
        with pytest.raises(tc.InvalidKeyError, match="is not an extension"):
            write_shard([{"__key__": "a", "tensorcache": 0, field: b""}])


def test_base_encoder(write_shard: Any) -> None:
    path = write_shard([{"__key__": "a", "tensorcache": 0, "x.blob": 5}], base={"blob": lambda value: bytes([value])})
    assert read(path)[0]["x.blob"] == b"\x05"
    with pytest.raises(ValueError, match="no handler found"):
        write_shard([{"__key__": "a", "tensorcache": 0, "blob": 5}])
