"""Exported files have what the cache has, bit for bit, stay in their folder, and are complete or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.cli.command import json_of, run
from tests.importers.folders import imported
from tests.same import assert_same
from wds_tensorcache.integrations.export import export_cache


def nested(i: int) -> dict[str, Any]:
    return {
        "latent": torch.randn(4, 3 + i),
        "text": {"states": torch.randn(5, 3).bfloat16(), "mask": torch.ones(5, dtype=torch.bool)},
        "pair": [torch.tensor(i), torch.zeros(0, 2).half()],
        "caption": f"photo {i}",
        "size": (64, i),
        "nothing": None,
    }


@pytest.fixture
def samples(tmp_path: Path) -> dict[str, Any]:
    made = {f"dir/photo ({i})": nested(i) for i in range(4)}
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        for number, (name, sample) in enumerate(made.items()):
            sink.write(tc.safe_key(name), sample, **({"jpg": b"\xff\xd8", "json": {"i": number}} if number % 2 else {}))
    return made


def test_pt(tmp_path: Path, samples: dict[str, Any]) -> None:
    run("export", tmp_path / "cache", tmp_path / "out")
    for name, sample in samples.items():
        assert_same(sample, torch.load(tmp_path / "out" / f"{name}.pt", weights_only=True))
    assert (tmp_path / "out" / "dir" / "photo (1).jpg").read_bytes() == b"\xff\xd8"
    found, _ = imported(tmp_path / "out", tmp_path / "again")
    assert found.keys() == samples.keys()
    for name, sample in samples.items():
        assert_same(sample, found[name])


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_tensors_by_name(tmp_path: Path, samples: dict[str, Any], kind: str) -> None:
    with tc.open(tmp_path / "cache") as cache:
        view = cache.filter(
            lambda entry: entry.key.endswith(("(0)", "%280%29", "%282%29"))
        )  # those without other members
        report = export_cache(view, tmp_path / "out", kind)
    assert report.num_written == 2
    assert report.widened == ({"text.states": "float32"} if kind == "npz" else {})
    for i in (0, 2):
        name = f"dir/photo ({i})"
        sample, path = samples[name], tmp_path / "out" / f"{name}.{kind}"
        expected = {
            "latent": sample["latent"],
            "text.states": sample["text"]["states"],
            "text.mask": sample["text"]["mask"],
            "pair.0": sample["pair"][0],
            "pair.1": sample["pair"][1],
        }
        if kind == "npz":
            found: dict[str, Any] = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
            expected["text.states"] = expected["text.states"].float()
        else:
            found = safetensors.torch.load_file(path)
        assert_same(expected, {name: found[name] for name in expected})
        assert found.keys() == expected.keys()
        values = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert values == {"caption": f"photo {i}", "size": [64, i], "nothing": None}


def test_values_and_members_with_one_name(tmp_path: Path, samples: dict[str, Any]) -> None:
    found = run("export", tmp_path / "cache", tmp_path / "out", "--as", "npz", status=1)
    assert "has a member 'json'" in found.stderr


def test_webdataset(tmp_path: Path, samples: dict[str, Any]) -> None:
    run("export", tmp_path / "cache", tmp_path / "out", "--as", "webdataset")
    url = str(tmp_path / "out" / "samples.tar")
    found = {sample["__key__"]: sample for sample in wds.WebDataset(url, shardshuffle=False)}
    assert list(found) == [tc.safe_key(name) for name in samples]
    for number, (name, sample) in enumerate(samples.items()):
        members = found[tc.safe_key(name)]
        assert ("jpg" in members) == bool(number % 2)
        assert tarfile.is_tarfile(url)
        again, _ = imported(tmp_path / "out", tmp_path / f"again{number}")
        assert_same(sample, again[tc.safe_key(name)])


NAMES = [
    "../up",
    "/etc/passwd",
    "a/../../b",
    "x" * 300,
    "ä" * 150,
    "CON",
    "nul.txt",
    "a:b",
    "a\\b",
    ".hidden",
    "dot.",
    "new\nline",
    "",
]


def test_names_that_are_no_file_names(tmp_path: Path) -> None:
    """Nothing is written outside the folder; also names that differ only in case make several files."""
    names = [*NAMES, "Case", "case", "CASE", "\udcff"]
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        for number, name in enumerate(names):
            sink.write(tc.safe_key(name), {"x": torch.tensor(number)})
    result = json_of("export", tmp_path / "cache", tmp_path / "parent" / "out")
    files = [path for path in (tmp_path / "parent").rglob("*") if path.is_file()]
    assert sorted(torch.load(path)["x"].item() for path in files) == list(range(len(names)))
    assert all((tmp_path / "parent" / "out") in path.parents for path in files)
    assert len({str(path).casefold() for path in files}) == len(names)
    assert len(result["renamed"]) >= len(NAMES) - 1
    assert sorted(os.listdir(tmp_path)) == ["cache", "parent"]


@pytest.mark.parametrize(
    ("kind", "sample", "message"),
    [
        ("npz", {"x": torch.ones(2), "when": {1, 2}}, "'when' is a set, which JSON cannot hold"),
        ("npz", {"x": torch.ones(2), "y": float("nan")}, "'y' is a float"),
        ("safetensors", {"x": np.array(["a", "bc"])}, "'x' is an array of <U2"),
        ("npz", {"x": torch.zeros(2, dtype=torch.complex32)}, "'x' is torch.complex32"),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_samples_that_a_file_cannot_hold(tmp_path: Path, kind: str, sample: Any, message: str) -> None:
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", sample)
    with tc.open(tmp_path / "cache") as cache, pytest.raises(tc.EncodeError, match=f"sample 'k': {message}"):
        export_cache(cache, tmp_path / "out", kind)
    assert os.listdir(tmp_path / "out") == []


def test_a_name_that_numpy_uses(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", {"file": torch.ones(2), "args": torch.zeros(1)})
    with tc.open(tmp_path / "cache") as cache:
        export_cache(cache, tmp_path / "out", "npz")
    assert set(np.load(tmp_path / "out" / "k.npz")) == {"file", "args"}


def test_a_killed_export_resumes(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        for i in range(300):
            sink.write(f"k{i:03d}", {"x": torch.full((20_000,), i)}, txt=str(i))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "wds_tensorcache.cli", "export", str(tmp_path / "cache"), str(out), "--as", "npz"]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while child.poll() is None and len(list(out.glob("*.npz"))) < 20:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = len(list(out.glob("*.npz")))
    assert "--resume" in run("export", tmp_path / "cache", out, "--as", "npz", status=1).stderr
    result = json_of("export", tmp_path / "cache", out, "--as", "npz", "--resume")
    assert (result["num_present"], result["num_written"]) == (before, 300 - before)
    assert sorted(os.listdir(out)) == sorted(f"k{i:03d}.{suffix}" for i in range(300) for suffix in ("npz", "txt"))
    for i in range(300):
        assert (np.load(out / f"k{i:03d}.npz")["x"] == i).all()
        assert (out / f"k{i:03d}.txt").read_text() == str(i)


def test_wrong_arguments(tmp_path: Path, samples: dict[str, Any]) -> None:
    with tc.open(tmp_path / "cache") as cache:
        with pytest.raises(ValueError, match="expected one of 'pt'"):
            export_cache(cache, tmp_path / "out", "pickle")
        with pytest.raises(ValueError, match="export it again"):
            export_cache(cache, tmp_path / "out", "webdataset", resume=True)
    run("export", tmp_path / "nowhere", tmp_path / "out", status=1)
