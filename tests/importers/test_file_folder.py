"""Folders of files of numpy, torch and safetensors, one sample for each stem."""

from __future__ import annotations

import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from tests.cli.command import run
from tests.importers.folders import Gadget, assert_left_out, imported, saved
from tests.same import assert_same


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def test_files_of_one_stem_are_joined(folder: Path, tmp_path: Path) -> None:
    for name in ("a", "deep/er/b.v2"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{name}.npy", np.arange(3))
        np.savez(folder / f"{name}.npz", x=np.ones(2, np.float16))
        torch.save({"text": torch.ones(2).bfloat16(), "n": 3}, folder / f"{name}.pt")
        safetensors.torch.save_file({"y": torch.zeros(1)}, folder / f"{name}.safetensors")
        (folder / f"{name}.pkl").write_bytes(pickle.dumps([np.ones(2), "a cat"]))
    np.save(folder / "one.npy", np.ones(2))  # its sample has the same structure
    found, report = imported(folder, tmp_path / "out")
    assert list(found) == ["a", "deep/er/b.v2", "one"]
    assert found.pop("one").keys() == {"npy"}
    assert (report.ok, report.unused) == (True, [])
    fingerprint = {"structure": "dicts by suffix", "format": "files", "source": str(folder)}
    assert report.fingerprint == fingerprint == tc.open(tmp_path / "out").fingerprint
    for value in found.values():
        assert set(value) == {"npy", "npz", "pt", "safetensors", "pkl"}
        assert_same(torch.arange(3), value["npy"])
        assert_same({"x": torch.ones(2).half()}, value["npz"])
        assert_same({"text": torch.ones(2).bfloat16(), "n": 3}, value["pt"])
        assert_same({"y": torch.zeros(1)}, value["safetensors"])
        assert_same([torch.ones(2, dtype=torch.float64), "a cat"], value["pkl"])


def test_a_new_file_that_changes_the_structure(folder: Path, tmp_path: Path) -> None:
    """A resumed import would store an array as `a`, and a dict as `b`."""
    np.save(folder / "a.npy", np.arange(3))
    tc.import_cache(folder, tmp_path / "out")
    np.save(folder / "b.npy", np.arange(3))
    torch.save(torch.ones(2), folder / "b.pt")
    with pytest.raises(tc.StaleCacheError, match="structure"):
        tc.import_cache(folder, tmp_path / "out", resume=True)


def test_an_npz_without_arrays(folder: Path, tmp_path: Path) -> None:
    np.savez(folder / "a.npz")
    np.savez(folder / "b.npz", x=np.ones(2))
    samples, report = imported(folder, tmp_path / "out")
    assert report.ok
    assert samples["a"] == {}
    assert_same({"x": torch.ones(2, dtype=torch.float64)}, samples["b"])


def test_safetensors_without_alignment(folder: Path, tmp_path: Path) -> None:
    """As old releases of safetensors wrote them."""
    header = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(57)
    (folder / "a.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + np.arange(2, dtype="<f4").tobytes()
    )
    found, _ = imported(folder, tmp_path / "out")
    assert_same({"x": torch.arange(2.0)}, found["a"])


def test_texts_become_members(folder: Path, tmp_path: Path) -> None:
    """As stable-audio-tools writes them: `{i}.npy` and `{i}.json`."""
    for name in ("000/1", "000/2"):
        (folder / name).parent.mkdir(exist_ok=True)
        np.save(folder / f"{name}.npy", np.ones((64, 8), np.float32))
        (folder / f"{name}.json").write_bytes(b'{"seconds_total": 3}')
    (folder / "000/1.txt").write_bytes("a café".encode())
    (folder / "000/1.caption").write_bytes(b"a cat")
    (folder / "000/1.png").write_bytes(b"\x89PNG")
    (folder / "details.json").write_text("{}")
    found, report = imported(folder, tmp_path / "out")
    assert_same([torch.ones(64, 8), torch.ones(64, 8)], list(found.values()))
    assert report.unused == ["000/1.png", "details.json"]
    with tc.open(tmp_path / "out") as cache:
        assert [bytes(each) for each in cache.read_members([0, 1], "json")] == [b'{"seconds_total": 3}'] * 2
        assert bytes(cache.read_members([0], "txt")[0]) == "a café".encode()
        assert bytes(cache.read_members([0], "caption")[0]) == b"a cat"


def test_names_that_differ_in_case(folder: Path, tmp_path: Path) -> None:
    """Stems that do so are different samples; suffixes that do so are ambiguous."""
    np.save(folder / "Photo.npy", np.ones(1))
    np.save(folder / "photo.npy", np.ones(2))
    (folder / "c.NPY").write_bytes((folder / "photo.npy").read_bytes())
    found, _ = imported(folder, tmp_path / "out")
    assert {name: len(value) for name, value in found.items()} == {"Photo": 1, "photo": 2, "c": 2}
    np.save(folder / "c.npy", np.ones(3))
    with pytest.raises(tc.FormatError, match=r"c.NPY, c.npy differ only in case"):
        tc.import_cache(folder, tmp_path / "more")


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_in_recycled_memory(folder: Path, tmp_path: Path, order: Any) -> None:
    arrays = [np.arange(100_000, dtype=np.float32).reshape(1000, 100, order=order) + i for i in range(3)]
    for i, array in enumerate(arrays):
        np.save(folder / f"{i}.npy", array)
    found, _ = imported(folder, tmp_path / "out", num_workers=1)
    assert_same(list(map(torch.from_numpy, arrays)), list(found.values()))


@pytest.mark.parametrize("dtype", [str, object])
def test_single_texts_in_npz_become_str(folder: Path, tmp_path: Path, dtype: type) -> None:
    """As arrays, texts of different lengths have different dtypes, and could not form a batch."""
    prompts = ["a cat", "two \U0001f408", ""]
    for i, prompt in enumerate(prompts):
        texts = {"prompt": np.array(prompt, dtype), "tags": np.array(["a", "b"])}
        np.savez(folder / f"{i}.npz", x=np.ones(2, np.float16), **texts)
    if dtype is object:
        with pytest.raises(tc.FormatError, match=r"0.npz: array 'prompt': .* --trust"):
            tc.import_cache(folder, tmp_path / "stopped")
    found, _ = imported(folder, tmp_path / "out", trust=dtype is object)
    assert [sample["prompt"] for sample in found.values()] == prompts
    assert isinstance(found["0"]["prompt"], str)
    assert_same(np.array(["a", "b"]), found["0"]["tags"])
    with tc.open(tmp_path / "out") as cache:
        assert cache.read_batch([0, 1, 2])["prompt"] == prompts
    np.save(folder / "a.npy", np.array("a cat"))
    (folder / "b.pkl").write_bytes(pickle.dumps({"prompt": np.array("a cat")}))
    found, _ = imported(folder, tmp_path / "more", trust=dtype is object)
    assert (found["a"], found["b"]) == ("a cat", {"prompt": "a cat"})


def test_a_structure_beside_the_tensors_of_many_samples(folder: Path, tmp_path: Path) -> None:
    """A file of tensors whose structure is a pickle beside it is no sample."""
    for name in ("train", "good"):
        safetensors.torch.save_file({"0.x": torch.ones(2), "1.x": torch.ones(2)}, folder / f"{name}.safetensors")
    (folder / "train.skeleton.pkl").write_bytes(pickle.dumps([{"x": "0.x"}, {"x": "1.x"}]))
    assert_left_out(folder, "train.skeleton.pkl", "has the structure of the tensors in train.safetensors", ["good"])


def test_object_arrays_need_trust(folder: Path, tmp_path: Path) -> None:
    np.save(folder / "a.npy", np.array([{"x": 1}, None]), allow_pickle=True)
    with pytest.raises(tc.FormatError, match=r"a.npy: .*pickled objects"):
        tc.import_cache(folder, tmp_path / "out")
    found, _ = imported(folder, tmp_path / "out", trust=True)
    assert found == {"a": [{"x": 1}, None]}


@pytest.mark.parametrize("suffix", ["pkl", "pickle", "ckpt"])
def test_pickles(folder: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `pickle.dump`, and of `torch.save`, which ComfyUI uses for `.pkl` files, and EAGLE for `.ckpt` files."""
    monkeypatch.chdir(tmp_path)
    (folder / f"a.{suffix}").write_bytes(pickle.dumps({"x": "text"}))
    torch.save({"x": torch.ones(2)}, folder / f"b.{suffix}")
    found, _ = imported(folder, tmp_path / "out")
    assert_same([{"x": "text"}, {"x": torch.ones(2)}], list(found.values()))
    (folder / f"c.{suffix}").write_bytes(pickle.dumps(Gadget()))
    torch.save(Gadget(), folder / f"d.{suffix}")
    found, report = imported(folder, tmp_path / "more", on_error="skip")
    assert list(found) == ["a", "b"]
    assert all("--trust" in each.what for each in report.skipped)
    assert not Path("hacked").exists()
    (folder / f"e.{suffix}").write_bytes(pickle.dumps(torch.nn.Linear(2, 1)))
    torch.save(torch.nn.Linear(2, 1), folder / f"f.{suffix}")
    found, _ = imported(folder, tmp_path / "trusted", trust=True)
    assert Path("hacked").exists()
    assert set(found["e"]) == set(found["f"]) == {"weight", "bias"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_files_of_torch_before_1_6(folder: Path, tmp_path: Path, protocol: int) -> None:
    """Several pickles in a row, of which the first one is a number."""
    torch.save({"x": torch.ones(2)}, folder / "a.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    with pytest.raises(tc.FormatError, match="torch 1.6; .*--trust"):
        tc.import_cache(folder, tmp_path / "out")
    found, _ = imported(folder, tmp_path / "out", trust=True)
    assert_same({"a": {"x": torch.ones(2)}}, found)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pkl", 2 * pickle.dumps(1, 0), "a.pkl"),
        ("a.pkl", 2 * pickle.dumps(1, 4), "a.pkl"),
        ("a.npy", 2 * saved(np.arange(3), numpy=True), r"a.npy: .*follow the array, which ends at byte 152"),
    ],
    ids=["protocol 0", "protocol 4", "npy"],
)
def test_several_values_in_one_file(
    folder: Path, tmp_path: Path, trust: bool, name: str, content: bytes, message: str
) -> None:
    """`pickle.load` and numpy would read only the first one."""
    (folder / name).write_bytes(content)
    with pytest.raises(tc.FormatError, match=message):
        tc.import_cache(folder, tmp_path / "out", trust=trust)


def test_an_extracted_shard(folder: Path, tmp_path: Path) -> None:
    """`tar xf` is the exact way out of a cache, and this the way back, next to other files."""
    shared = torch.arange(3).bfloat16()
    samples = {
        "dir/photo (1)": {"a.b": shared, "a": {"b": shared, "s": {1, "x"}, "t": np.array(["é"])}, "f": (float("nan"),)},
        "b": [torch.zeros(0, 3, dtype=torch.complex128), None],
    }
    with tc.ShardWriter(tmp_path / "cache") as sink:
        for name, sample in samples.items():
            sink.write(tc.safe_key(name), sample, jpg=b"\xff\xd8", **{"v2.json": b"{}"})
    with tarfile.open(next((tmp_path / "cache").glob("*.tar"))) as tar:
        tar.extractall(folder, filter="data")
    np.save(folder / "other.npy", np.ones(2))
    report = tc.import_cache(folder, tmp_path / "again")
    assert (report.num_written, report.unused) == (3, [])
    (folder / "other.npy").unlink()
    tc.import_cache(folder, tmp_path / "exact")
    with tc.open(tmp_path / "cache") as one, tc.open(tmp_path / "exact") as two:
        assert sorted(one.keys()) == sorted(two.keys())
        for key in sorted(one.keys()):
            assert_same(tc.realize(one[key]), tc.realize(two[key]))
            assert two.read_members([key], "v2.json") == [b"{}"]
    said = run("diff", tmp_path / "cache", tmp_path / "exact").stdout
    assert "2 samples equal, 0 changed" in said


def test_an_extracted_shard_in_a_folder_with_any_name(folder: Path, tmp_path: Path) -> None:
    skeleton, tensors = tc.encode_sample({"x": torch.ones(3)})
    for place in ("Früh am Tag", "long" * 20, "plain.v2"):
        (folder / place).mkdir()
        (folder / place / "a.skel.pyd").write_bytes(skeleton)
        (folder / place / "a.safetensors").write_bytes(tensors)
    assert tc.import_cache(folder, tmp_path / "out").num_written == 3
    with tc.open(tmp_path / "out") as cache:
        assert set(cache.keys()) == {"plain.v2/a", tc.safe_key("Früh am Tag/a"), tc.safe_key("long" * 20 + "/a")}
        assert cache.original_name(tc.safe_key("long" * 20 + "/a")) == "long" * 20 + "/a"
        assert_same({"x": torch.ones(3)}, tc.realize(cache["plain.v2/a"]))


def test_extracted_shards_that_are_refused(folder: Path, tmp_path: Path) -> None:
    skeleton, tensors = tc.encode_sample({"x": torch.ones(3)})
    contents = {
        "damaged.skel.pyd": skeleton,
        "damaged.safetensors": tensors[:-1] + b"\1",
        "half.skel.pyd": skeleton,
        "named.text.skel.pyd": skeleton,
        "named.text.safetensors": tensors,
        "good.skel.pyd": skeleton,
        "good.safetensors": tensors,
        "gadget.skel.pyd": pickle.dumps(print),
        "gadget.safetensors": tensors,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    found, report = imported(folder, tmp_path / "out", on_error="skip")
    assert list(found) == ["good"]
    assert {each.name for each in report.skipped} == {"damaged", "half", "named", "gadget"}
