"""Exported files have what the cache has, bit for bit, stay in their folder, and are complete or absent."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.cli.command import json_of, run
from tests.cli.commands import Output, the_server
from tests.importers.folders import imported
from tests.same import assert_same
from tests.strategies import TORCH_DTYPES
from wds_tensorcache.integrations.exporting.export_cache import export_cache
from wds_tensorcache.integrations.exporting.export_list import LIST


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
    run("export", tmp_path / "cache", tmp_path / "out", "--as", "npz")
    for i in range(4):
        name = tmp_path / "out" / "dir" / f"photo ({i})"
        assert json.loads(Path(f"{name}.values.json").read_text())["caption"] == f"photo {i}"
        assert Path(f"{name}.json").exists() == bool(i % 2)
    assert json.loads((tmp_path / "out" / "dir" / "photo (3).json").read_text()) == {"i": 3}


def test_webdataset(tmp_path: Path, samples: dict[str, Any]) -> None:
    run("export", tmp_path / "cache", tmp_path / "out", "--as", "webdataset")
    url = str(tmp_path / "out" / "samples.tar")
    found = {sample["__key__"]: sample for sample in wds.WebDataset(url, shardshuffle=False)}
    assert list(found) == [tc.safe_key(name) for name in samples]
    for number, name in enumerate(samples):
        members = found[tc.safe_key(name)]
        assert ("jpg" in members) == bool(number % 2)
        assert tarfile.is_tarfile(url)


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
    files = files_in(tmp_path / "parent")
    assert sorted(torch.load(path)["x"].item() for path in files) == list(range(len(names)))
    assert all((tmp_path / "parent" / "out") in path.parents for path in files)
    assert len({str(path).casefold() for path in files}) == len(names)
    assert len(result["renamed"]) >= len(NAMES) - 1
    assert sorted(os.listdir(tmp_path)) == ["cache", "parent"]


@pytest.mark.parametrize(
    ("kind", "sample", "widened", "as_text"),
    [
        ("npz", {"x": torch.ones(2), "when": {1, 2}}, {}, {"when": ("set", "{1, 2}")}),
        ("npz", {"x": torch.ones(2), "y": {"z.a": float("nan")}}, {}, {"y.z.a": ("float", "nan")}),
        ("safetensors", {"x": np.array(["a", "bc"])}, {"x": "uint32"}, {}),
        ("safetensors", {"x": torch.zeros(2, dtype=torch.complex128)}, {"x": "float64"}, {}),
        ("npz", {"x": torch.zeros(2, dtype=torch.complex32)}, {"x": "float16"}, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_what_a_file_holds_in_another_form(
    tmp_path: Path, kind: str, sample: Any, widened: Any, as_text: dict[str, tuple[str, str]]
) -> None:
    """The command names it, and an import has the original."""
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", sample)
    result = json_of("export", tmp_path / "cache", tmp_path / "out", "--as", kind)
    assert result["widened"] == widened
    assert result["as_text"] == {name: cls for name, (cls, _) in as_text.items()}
    if as_text:
        texts = json.loads((tmp_path / "out" / "k.json").read_text())
        assert texts == {name: text for name, (_, text) in as_text.items()}
    said = run("export", tmp_path / "cache", tmp_path / "other", "--as", kind).stderr
    assert all(name in said for name in (*widened, *as_text))
    found, _ = imported(tmp_path / "out", tmp_path / "again")
    assert_same(sample, found["k"])


def test_a_sample_that_contains_itself(tmp_path: Path) -> None:
    sample: list[Any] = [torch.ones(1)]
    sample.append(sample)
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", sample)
    said = run("export", tmp_path / "cache", tmp_path / "out", "--as", "npz", status=1).stderr
    assert "sample 'k': is nested too deeply, or contains itself; use pt" in said
    assert files_in(tmp_path / "out") == []
    run("export", tmp_path / "cache", tmp_path / "pt")
    assert_same(sample, imported(tmp_path / "pt", tmp_path / "again")[0]["k"])


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
    assert "--resume" in run("export", tmp_path / "cache", out, "--as", "npz", status=2).stderr
    result = json_of("export", tmp_path / "cache", out, "--as", "npz", "--resume")
    assert (result["num_present"], result["num_written"]) == (before, 300 - before)
    expected = sorted(f"k{i:03d}.{suffix}" for i in range(300) for suffix in ("npz", "txt"))
    assert [path.name for path in files_in(out)] == expected
    for i in range(300):
        assert (np.load(out / f"k{i:03d}.npz")["x"] == i).all()
        assert (out / f"k{i:03d}.txt").read_text() == str(i)


def foreign(path: Path, keys: list[str]) -> Path:
    """Write a tar as another program would, with any keys."""
    skeleton, tensors = tc.encode_sample({"x": torch.ones(3)})
    with tarfile.open(path, "w") as archive:
        for key in keys:
            for suffix, content in (("skel.pyd", skeleton), ("safetensors", tensors), ("txt", key.encode())):
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def files_in(folder: Path) -> list[Path]:
    """Return the paths of the samples' files, without the list of an export."""
    return sorted(path for path in folder.rglob("*") if not path.is_dir() and path.name != LIST)


@pytest.mark.parametrize("kind", ["pt", "npz", "safetensors"])
def test_keys_that_lead_out_of_the_folder(tmp_path: Path, kind: str) -> None:
    """A tar by another program may have any key; `tc.original_name` does not know them."""
    keys = ["../up", str(tmp_path / "absolute"), "a/../../b", "x" * 300, "new\nline", "esc\x1b[31m", "CON", "ok"]
    keys += ["/".join(["deep"] * 300), "../../" * 20 + str(tmp_path / "far").lstrip("/")]
    source = foreign(tmp_path / "in.tar", keys)
    result = json_of("export", source, tmp_path / "parent" / "out", "--as", kind)
    assert result["num_written"] == len(keys)
    assert sorted(os.listdir(tmp_path)) == ["in.tar", "parent"]
    assert os.listdir(tmp_path / "parent") == ["out"]
    texts = [path.read_bytes().decode() for path in files_in(tmp_path / "parent" / "out") if path.suffix == ".txt"]
    assert sorted(texts) == sorted(keys)
    assert all(str(path).isprintable() for path in files_in(tmp_path / "parent"))
    assert set(result["renamed"]) == set(keys) - {"ok"}
    said = run("export", source, tmp_path / "again", "--as", kind)
    assert said.stdout.isascii()
    assert all(line.isprintable() for line in said.stderr.split("\n"))


def test_a_tar_that_leads_out_of_its_folder(tmp_path: Path) -> None:
    source = foreign(tmp_path / "in.tar", ["ok", "../up"])
    assert "'../up'" in run("export", source, tmp_path / "out", "--as", "webdataset", status=1).stderr
    assert files_in(tmp_path / "out") == []


def test_members_with_names_that_are_no_file_names(tmp_path: Path) -> None:
    source = tmp_path / "in.tar"
    foreign(source, ["a"])
    with tarfile.open(source, "a") as archive:
        archive.addfile(tarfile.TarInfo("a.x\x1b[31m"))
    assert "cannot be the end of a file's name" in run("export", source, tmp_path / "out", status=1).stderr
    assert files_in(tmp_path / "out") == []


def test_samples_whose_files_would_have_one_name(tmp_path: Path) -> None:
    """By their members, as a folder of another sample, by case, or by the form of accents."""
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write(tc.safe_key("a"), {"x": torch.tensor(0)}, **{"v2.txt": b"0", "v2.pt": b"0"})
        sink.write(tc.safe_key("a.v2"), {"x": torch.tensor(1)}, txt=b"1")
        sink.write(tc.safe_key("b/c"), {"x": torch.tensor(2)}, txt=b"2")
        sink.write(tc.safe_key("b.pt/c"), {"x": torch.tensor(3)}, txt=b"3")
        sink.write(tc.safe_key("b"), {"x": torch.tensor(4)}, txt=b"4")
        sink.write(tc.safe_key("\u00e9"), {"x": torch.tensor(5)}, txt=b"5")
        sink.write(tc.safe_key("e\u0301"), {"x": torch.tensor(6)}, txt=b"6")
        sink.write(tc.safe_key("\u00c9"), {"x": torch.tensor(7)}, txt=b"7")
        sink.write(tc.safe_key("A.V2"), {"x": torch.tensor(8)}, txt=b"8")
    result = json_of("export", tmp_path / "cache", tmp_path / "out")
    assert result["num_written"] == 9
    files = files_in(tmp_path / "out")
    assert len(files) == 9 * 2 + 1
    assert sorted(
        torch.load(path)["x"].item() for path in files if path.suffix == ".pt" and path.read_bytes() != b"0"
    ) == [*range(9)]
    for path in files:
        if path.suffix == ".txt" and path.name != "a.v2.txt":
            assert torch.load(path.with_name(path.name[:-4] + ".pt"))["x"] == int(path.read_text())
    folded = {unicodedata.normalize("NFC", str(path).casefold()) for path in files}
    assert len(folded) == len(files)


def test_a_folder_that_is_not_empty(tmp_path: Path, samples: dict[str, Any]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "dir").symlink_to(tmp_path)
    assert "is not empty" in run("export", tmp_path / "cache", tmp_path / "out", status=2).stderr
    said = run("export", tmp_path / "cache", tmp_path / "out", "--resume", status=1).stderr
    assert "has no files of an interrupted export" in said
    run("export", tmp_path / "cache", tmp_path / "good")
    shutil.copy(tmp_path / "good" / LIST, tmp_path / "out")
    assert "link" in run("export", tmp_path / "cache", tmp_path / "out", "--resume", status=2).stderr
    assert sorted(os.listdir(tmp_path)) == ["cache", "good", "out"]


def test_resume_refuses_files_of_another_cache(tmp_path: Path) -> None:
    """Another cache may have the same keys, shapes, and lengths of values."""
    for number in range(2):
        with tc.ShardWriter(tmp_path / str(number), fsync=False) as sink:
            sink.write("k", {"x": torch.tensor(number)})
    run("export", tmp_path / "0", tmp_path / "out")
    assert json_of("export", tmp_path / "0", tmp_path / "out", "--resume")["num_present"] == 1
    said = run("export", tmp_path / "1", tmp_path / "out", "--resume", status=1).stderr
    assert "are of another cache" in said
    assert (
        "are pt, not npz" in run("export", tmp_path / "0", tmp_path / "out", "--resume", "--as", "npz", status=1).stderr
    )
    (tmp_path / "out" / LIST).write_text("{")
    assert (
        "is not a list of exported files"
        in run("export", tmp_path / "0", tmp_path / "out", "--resume", status=1).stderr
    )
    assert torch.load(tmp_path / "out" / "k.pt")["x"] == 0


@pytest.mark.parametrize(
    "url", ["s3://bucket/files", "https://user:secret@example.org/x?signature=1", "gs://b", "hf://a/b"]
)
@pytest.mark.parametrize("kind", ["pt", "webdataset"])
def test_urls_are_refused(
    tmp_path: Path, samples: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: str, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run("export", tmp_path / "cache", url, "--as", kind, status=2).stderr
    assert "local folder" in said
    assert "secret" not in said
    assert "signature" not in said
    assert os.listdir(tmp_path) == ["cache"]


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    """Bit for bit and dtype for dtype; the file itself has the same numbers if it lacks a dtype."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    sample: dict[str, Any] = {
        "bf16": bits.view(torch.bfloat16),
        "f16": bits.view(torch.float16),
        "f32": torch.tensor([0x7FA00001, -1, 0, 1 << 31], dtype=torch.int64).to(torch.int32).view(torch.float32),
        **{str(dtype)[6:]: torch.arange(6).to(dtype).reshape(2, 3) for dtype in (
            torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
            torch.uint64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)},
        "scalar": torch.tensor(1.5), "none": torch.zeros(0, 4), "a/b": torch.ones(1), "a.b": torch.ones(2), "": torch.ones(3),
    }  # fmt: skip
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", sample)
    for kind in ("pt", "npz", "safetensors", "webdataset"):
        result = json_of("export", tmp_path / "cache", tmp_path / kind, "--as", kind)
        found, _ = imported(tmp_path / kind, tmp_path / f"{kind}-again")
        assert_same(sample, found["k"])
        wide = {"bf16", "float8_e4m3fn", "float8_e5m2"} if kind == "npz" else set()
        others = {"complex128": "float64"} if kind == "safetensors" else dict.fromkeys(wide, "float32")
        assert result["widened"] == others
        if kind not in ("npz", "safetensors"):
            continue
        load: Any = np.load if kind == "npz" else safetensors.torch.load_file
        held = load(tmp_path / kind / f"k.{kind}")
        assert set(held) == {name or "value" for name in sample}
        for name, tensor in sample.items():
            value = torch.as_tensor(held[name or "value"])
            if name == "bf16" and name in wide:
                assert_same((bits.to(torch.int32) << 16).view(torch.float32), value)
            elif name in wide:
                assert_same(tensor.float(), value, path=name)
            elif name in others:
                assert_same(torch.view_as_real(tensor), value, path=name)
            else:
                assert_same(tensor, value, path=name)


@pytest.mark.parametrize("dtype", [each for each in TORCH_DTYPES if "float8" in str(each)], ids=str)
def test_every_float8_in_npz(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also each NaN, of which there are several."""
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", {"x": codes})
    run("export", tmp_path / "cache", tmp_path / "out", "--as", "npz")
    if "e8m0" not in str(dtype):
        numbers = torch.from_numpy(np.load(tmp_path / "out" / "k.npz")["x"])
        assert torch.equal(numbers.nan_to_num(777.0), codes.float().nan_to_num(777.0))
    assert_same({"x": codes}, imported(tmp_path / "out", tmp_path / "again")[0]["k"])


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_names_in_files(tmp_path: Path, kind: str) -> None:
    """They are the paths, with the keys as they are; if two would be equal, they are the names in the cache."""
    state = {"down.0.weight": torch.ones(2), "up%": torch.zeros(3)}
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("flat", state)
        sink.write("nested", {"model": state, "step": 3, "loss.ema": 0.5})
        sink.write("equal", {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)})
        sink.write("number", {1: torch.ones(1), "1": torch.ones(2)})
        sink.write("reserved", {"__metadata__": torch.ones(1)})
        sink.write("control", {"new\nline": torch.ones(1), "a.b": torch.ones(2)})
    run("export", tmp_path / "cache", tmp_path / "out", "--as", kind)
    load: Any = np.load if kind == "npz" else safetensors.torch.load_file
    held = {name: set(load(tmp_path / "out" / f"{name}.{kind}")) for name in ("flat", "nested", "equal", "control")}
    assert held == {
        "flat": {"down.0.weight", "up%"},
        "nested": {"model.down.0.weight", "model.up%"},
        "equal": {"a.b", "a%2Eb"},
        "control": {"new%0Aline", "a%2Eb"},
    }
    assert json.loads((tmp_path / "out" / "nested.json").read_text()) == {"step": 3, "loss.ema": 0.5}
    assert not (tmp_path / "out" / "flat.structure").exists()
    run("import", tmp_path / "out", tmp_path / "again")
    run("diff", tmp_path / "cache", tmp_path / "again")


def test_one_tensor_twice(tmp_path: Path) -> None:
    x = torch.randn(4)
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", {"x": x, "same": x})
    run("export", tmp_path / "cache", tmp_path / "out", "--as", "safetensors")
    found = safetensors.torch.load_file(tmp_path / "out" / "k.safetensors")
    assert_same({"x": x.clone(), "same": x.clone()}, {name: found[name] for name in ("x", "same")})


@pytest.mark.parametrize(
    ("kind", "sample", "members", "message"),
    [
        ("npz", {"x": torch.ones(1)}, {"structure": b"mine"}, "has a member 'structure'"),
        ("webdataset", {"x": torch.ones(1)}, {"pth": b"mine"}, "has a member 'pth'"),
        ("pt", {"x": torch.ones(1)}, {"pt": b"mine"}, "has a member 'pt'"),
    ],
)
def test_names_that_the_file_cannot_have(
    tmp_path: Path, kind: str, sample: Any, members: dict[str, bytes], message: str
) -> None:
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", sample, **members)
    said = run("export", tmp_path / "cache", tmp_path / "out", "--as", kind, status=1).stderr
    assert message in said
    assert "sample 'k'" in said
    assert files_in(tmp_path / "out") == []


def test_values_that_are_not_utf8(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", {"x": torch.ones(1), "path": "\udcff\ud800"})
        sink.write("l", {"x": torch.ones(1), "path": "é字"})
    run("export", tmp_path / "cache", tmp_path / "out", "--as", "npz")
    assert json.loads((tmp_path / "out" / "k.json").read_text(encoding="utf-8")) == {"path": "\udcff\ud800"}
    assert "é字" in (tmp_path / "out" / "l.json").read_text(encoding="utf-8")


def test_one_of_several_caches(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", {"x": torch.ones(1)}, **{"text.tensorcache": {"y": torch.ones(2)}})
    run("export", tmp_path / "cache", tmp_path / "out", status=2)
    run("export", tmp_path / "cache", tmp_path / "out", "--cache", "text")
    assert list(torch.load(tmp_path / "out" / "k.pt")) == ["y"]


@pytest.mark.parametrize(
    ("kind", "signum"), [("webdataset", signal.SIGKILL), ("webdataset", signal.SIGINT), ("pt", signal.SIGINT)]
)
def test_an_export_that_ends_early(tmp_path: Path, kind: str, signum: int) -> None:
    """Nothing that is half: no tar, or whole files; then the next call writes the rest."""
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        for i in range(500):
            sink.write(f"k{i:03d}", {"x": torch.full((30_000,), i)}, txt=str(i))
    for attempt in range(20):  # an export may be complete before the signal arrives
        out = tmp_path / f"out{attempt}"
        with open(os.devnull) as null, Output() as said:
            process = the_server().start(
                ["export", str(tmp_path / "cache"), str(out), "--as", kind],
                (null.fileno(), said.fileno, said.fileno),
                tmp_path,
            )
            until = time.monotonic() + 60
            while time.monotonic() < until and _nbytes_in(out) < 1e6:
                time.sleep(0.001)
            os.kill(process.pid, signum)
            status = process.wait()
            if status == 0:
                continue
            assert status == (130 if signum == signal.SIGINT else -signum)
            assert said.read() == (b"interrupted\n" if signum == signal.SIGINT else b"")
        break
    else:
        pytest.fail("no export was interrupted")
    assert not (out / "samples.tar").exists()
    if kind == "webdataset":
        assert len(files_in(out)) == (signum == signal.SIGKILL)
    run("export", tmp_path / "cache", out, "--as", kind, *["--resume"] * (kind == "pt"))
    if kind == "webdataset":
        assert [path.name for path in files_in(out)] == ["samples.tar"]
        with tarfile.open(out / "samples.tar") as archive:
            assert len(archive.getnames()) == 1000
    else:
        expected = sorted(f"k{i:03d}.{suffix}" for i in range(500) for suffix in ("pt", "txt"))
        assert [path.name for path in files_in(out)] == expected
        assert all((torch.load(out / f"k{i:03d}.pt")["x"] == i).all() for i in range(0, 500, 50))


def _nbytes_in(folder: Path) -> int:
    nbytes = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # a temporary file gets its name in this moment
            nbytes += path.stat().st_size
    return nbytes


def test_wrong_arguments(tmp_path: Path, samples: dict[str, Any]) -> None:
    with tc.open(tmp_path / "cache") as cache:
        with pytest.raises(ValueError, match="expected one of 'pt'"):
            export_cache(cache, tmp_path / "out", "pickle")
        with pytest.raises(ValueError, match="export it again"):
            export_cache(cache, tmp_path / "out", "webdataset", resume=True)
    run("export", tmp_path / "nowhere", tmp_path / "out", status=2)
    run("export", tmp_path / "cache", tmp_path / "out", "--as", "webdataset", "--resume", status=2)


@pytest.mark.parametrize("kind", ["pt", "npz", "safetensors", "webdataset"])
@pytest.mark.parametrize("key", ["../../pwned", "/pwned", "a/../../pwned", "./pwned", "a//b"])
def test_keys_of_other_writers_stay_in_the_folder(tmp_path: Path, kind: str, key: str) -> None:
    """A tar of another program may have any names."""
    skeleton, tensors = tc.encode_sample({"x": torch.ones(2)})
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for suffix, content in (("skel.pyd", skeleton), ("safetensors", tensors)):
            info = tarfile.TarInfo(f"{key}.{suffix}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    out = tmp_path / "p" / "q" / "out"
    with tc.open(tmp_path / "a.tar") as cache, contextlib.suppress(tc.InvalidKeyError):
        export_cache(cache, out, kind)
    assert all(out in path.parents for path in tmp_path.rglob("*") if path.is_file() and path.name != "a.tar")
    files = files_in(out)
    assert len(files) == (kind != "webdataset")
    assert not Path("/pwned.pt").exists()


def test_a_tar_does_not_replace_a_member(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", {"x": torch.ones(2)}, pth=b"mine")
    with tc.open(tmp_path / "cache") as cache, pytest.raises(tc.EncodeError, match="has a member 'pth'"):
        export_cache(cache, tmp_path / "out", "webdataset")
    assert os.listdir(tmp_path / "out") == []


def cyclic() -> dict[str, Any]:
    inner: list[Any] = []
    inner.append(inner)
    return {"inner": inner, "x": torch.zeros(1)}


def shared() -> dict[str, Any]:
    inner: list[Any] = [torch.zeros(1)]
    for _ in range(30):
        inner = [inner, inner]
    return {"inner": inner}


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (cyclic, "contains itself"),
        (shared, "262,144 values"),
        (lambda: {"k" * 70_000: torch.zeros(1)}, "10,000 char"),
    ],
    ids=["cyclic", "shared", "long"],
)
def test_samples_that_only_pt_can_hold(tmp_path: Path, kind: str, sample: Any, message: str) -> None:
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        sink.write("k", sample())
    assert message in run("export", tmp_path / "cache", tmp_path / "out", "--as", kind, status=1).stderr
