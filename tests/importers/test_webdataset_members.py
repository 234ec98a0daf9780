"""Tars of webdataset's own writer, with its own encoders."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.importers.folders import imported
from tests.same import assert_same
from wds_tensorcache.integrations.importers.formats import choose_format
from wds_tensorcache.integrations.importers.import_cache import import_cache
from wds_tensorcache.integrations.importers.source_folder import SourceFolder

JPEG = b"\xff\xd8\xff not a picture"


def write(path: Path, samples: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with wds.TarWriter(str(path)) as sink:
        for key, members in samples.items():
            sink.write({"__key__": key, **members})


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def test_members_by_name(tmp_path: Path) -> None:
    latent, text = np.random.default_rng(0).normal(size=(4, 8, 8)), torch.randn(7, 16).bfloat16()
    members = {"latent.npy": latent, "text.pth": text, "jpg": JPEG, "json": {"label": 3}, "txt": "a cat"}
    write(tmp_path / "in" / "a.tar", {f"dir/k{i}": members for i in range(3)})
    found, report = imported(tmp_path / "in", tmp_path / "out")
    assert report.format == "webdataset"
    assert list(found) == ["dir/k0", "dir/k1", "dir/k2"]
    assert_same({"latent": torch.from_numpy(latent), "text": text}, found["dir/k1"])
    with tc.open(tmp_path / "out") as cache:
        more = [cache.read_members([1], suffix)[0] for suffix in ("jpg", "json", "txt")]
    assert [bytes(each) for each in more] == [JPEG, b'{"label": 3}', b"a cat"]


@pytest.mark.parametrize("suffix", ["pyd", "pickle", "pkl"])
def test_one_pickle(tmp_path: Path, suffix: str) -> None:
    value = {"prompt": "a cat", "sizes": [(1, 2), 3.5, None], "raw": b"\0\xff"}
    write(tmp_path / "in" / "a.tar", {"k": {suffix: value if suffix == "pyd" else pickle.dumps(value)}})
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert_same(value, found["k"])


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    arrays = {"a": np.arange(5), "b": np.array(2, np.float32)}
    members = {"npz": arrays, "ten": [np.ones((2, 3), np.float32)], "npy": np.arange(3.0), "pth": {"x": torch.ones(2)}}
    write(tmp_path / "in" / "a.tar", {"k": members})
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert found["k"].keys() == members.keys()
    assert_same({name: torch.from_numpy(array) for name, array in arrays.items()}, dict(found["k"]["npz"]))
    assert_same([torch.ones(2, 3)], list(found["k"]["ten"]))
    assert_same(members["pth"], found["k"]["pth"])


def test_equal_keys_in_several_tars(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / "in" / f"s{number}.tar", {"k": {"npy": np.full(3, number)}})
    found, _ = imported(tmp_path / "in", tmp_path / "out")
    assert {name: value.tolist() for name, value in found.items()} == {"s0/k": [0] * 3, "s1/k": [1] * 3}


class Gadget:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


@pytest.mark.parametrize("suffix", ["pyd", "pkl", "pth"])
def test_pickles_do_not_run(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = saved(Gadget()) if suffix == "pth" else pickle.dumps({"x": 1, "y": Gadget()})
    write(tmp_path / "in" / "a.tar", {"good": {"npy": np.ones(3)}, "k": {suffix: raw}})
    with pytest.raises(tc.UnsafeSkeletonError, match=r"a.tar: sample 'k'.*system.*--trust"):
        import_cache("in", "stopped")
    found, report = imported(Path("in"), Path("out"), on_error="skip")
    assert (list(found), report.num_skipped) == (["good"], 1)
    assert not Path("hacked").exists()
    import_cache("in", "trusted", trust=True)
    assert Path("hacked").exists()


def test_trusted_pickles_of_arrays(tmp_path: Path) -> None:
    """As `.pyd` members of most people are: numpy's pickles name functions of numpy."""
    value = {"latent": np.ones((2, 3), np.float32), "text": torch.ones(2).half()}
    write(tmp_path / "in" / "a.tar", {"k": {"pyd": value}})
    with pytest.raises(tc.UnsafeSkeletonError, match="--trust"):
        import_cache(tmp_path / "in", tmp_path / "stopped")
    found, _ = imported(tmp_path / "in", tmp_path / "out", trust=True)
    assert_same({"latent": torch.ones(2, 3), "text": value["text"]}, found["k"])


def test_bad_tars(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.tar", {f"k{i}": {"npy": np.full(1000, i)} for i in range(4)})
    raw = (tmp_path / "in" / "a.tar").read_bytes()
    (tmp_path / "in" / "cut.tar").write_bytes(raw[: len(raw) // 2].replace(b"k", b"c"))
    (tmp_path / "in" / "text.tar").write_bytes(b"hello")
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert {"k0", "k1", "k2", "k3"} <= found.keys()
    assert {each.name for each in report.skipped} >= {"cut.tar", "text.tar"}


def test_shards_of_this_package_are_not_imported(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "a.tar") as sink:
        sink.write("k", {"x": torch.ones(2)}, npy=b"")
    with pytest.raises(ValueError, match="none of its"):
        choose_format(SourceFolder(str(tmp_path)))


def test_names_without_a_suffix(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "a.tar", "w") as tar:
        for name in ("k.npy", "README"):
            content = io.BytesIO()
            np.save(content, np.ones(3))
            info = tarfile.TarInfo(name)
            info.size = len(content.getvalue())
            content.seek(0)
            tar.addfile(info, content)
    found, report = imported(tmp_path / "in", tmp_path / "out", on_error="skip")
    assert list(found) == ["k"]
    assert "has no suffix" in report.skipped[0].what
