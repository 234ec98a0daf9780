"""Exported files have what the cache has, stay in their folder, and appear together."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import tarfile
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.children import wait_until
from tests.cli.command import json_of, run
from tests.cli.commands import the_server
from tests.importers.folders import imported
from tests.reading.batches import write as write_samples
from tests.same import assert_same
from tests.shards.tars import build_with_tarfile, halves


def nested(i: int) -> dict[str, Any]:
    return {
        "latent": torch.randn(4, 3 + i),
        "text": {"states": torch.randn(5, 3).bfloat16(), "mask": torch.ones(5, dtype=torch.bool)},
        "pair": [torch.tensor(i), torch.zeros(0, 2).half()],
        "words": np.array(["a", "bc"]),
        "caption": f"photo {i}",
        "size": (64, i),
        "nothing": None,
    }


def write(folder: Path, samples: dict[str, Any], members: Any = lambda i: {}, **same: Any) -> Path:
    """Write samples by names; `members` returns those of a sample with a number, and all have the members `same`."""
    named = {tc.safe_key(name): sample for name, sample in samples.items()}
    write_samples(folder / "%06d.tar", named, lambda i: members(i) | same)
    return folder


def foreign(path: Path, keys: Iterable[str], suffix: str = "txt") -> Path:
    """Write a tar as another program would, with any keys."""
    members = [[*halves(key, {"x": torch.ones(3)}), (f"{key}.{suffix}", key.encode())] for key in keys]
    path.write_bytes(build_with_tarfile([member for of_sample in members for member in of_sample]))
    return path


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


@pytest.fixture
def samples(tmp_path: Path) -> dict[str, Any]:
    made = {f"dir/photo ({i})": nested(i) for i in range(4)}
    write(tmp_path / "cache", made, lambda i: {"jpg": b"\xff\xd8", "json": {"i": i}} if i % 2 else {})
    return made


def test_pt(tmp_path: Path, samples: dict[str, Any]) -> None:
    said = run("export", tmp_path / "cache", tmp_path / "out")
    assert (said.stdout, said.stderr) == ("4 samples written\n", "")
    for name, sample in samples.items():
        assert_same(sample, torch.load(tmp_path / "out" / f"{name}.pt", weights_only=False))
    assert (tmp_path / "out" / "dir" / "photo (1).jpg").read_bytes() == b"\xff\xd8"
    found, _ = imported(tmp_path / "out", tmp_path / "again")
    assert list(found) == list(samples)


def test_npz(tmp_path: Path, samples: dict[str, Any]) -> None:
    result = json_of("export", tmp_path / "cache", tmp_path / "out", "--as", "npz")
    assert (result["num_written"], result["widened"], result["as_text"]) == (4, {"text.states": "float32"}, {})
    for i, (name, sample) in enumerate(samples.items()):
        path = tmp_path / "out" / f"{name}.npz"
        expected = {
            "latent": sample["latent"].numpy(),
            "text.states": sample["text"]["states"].float().numpy(),
            "text.mask": sample["text"]["mask"].numpy(),
            "pair.0": sample["pair"][0].numpy(),
            "pair.1": sample["pair"][1].numpy(),
            "words": sample["words"],
        }
        assert_same(expected, dict(np.load(path)))
        values = json.loads(path.with_suffix(".values.json").read_text())
        assert values == {"caption": f"photo {i}", "size": [64, i], "nothing": None}
        assert path.with_suffix(".json").exists() == bool(i % 2)
    assert json.loads((tmp_path / "out" / "dir" / "photo (3).json").read_text()) == {"i": 3}


def test_safetensors(tmp_path: Path) -> None:
    """Names have the keys as they are, tensors may occur twice, and metadata is in the file again."""
    x = torch.randn(4)
    sample = {"down.0.weight": x, "same": [x, x], "é%": torch.ones(2).bfloat16(), "raw": np.arange(3), "n": {"k": 1}}
    metadata = json.dumps({"step": "3"}).encode()
    with tc.ShardWriter(tmp_path / "cache") as sink:
        sink.write("k", sample, **{"metadata.json": metadata})
        sink.write("alone", x)
    run("export", tmp_path / "cache", tmp_path / "out", "--as", "safetensors")
    with safetensors.safe_open(tmp_path / "out" / "k.safetensors", "pt") as file:
        assert file.metadata() == {"step": "3"}
        found = {name: file.get_tensor(name) for name in sorted(file.keys())}
    expected = {"down.0.weight": x, "raw": torch.arange(3), "same.0": x, "same.1": x, "é%": sample["é%"]}
    assert_same({name: tensor.clone() for name, tensor in expected.items()}, found)
    assert json.loads((tmp_path / "out" / "k.json").read_text()) == {"n.k": 1}
    assert_same({"value": x}, safetensors.torch.load_file(tmp_path / "out" / "alone.safetensors"))
    assert [path.name for path in files_in(tmp_path / "out")] == ["alone.safetensors", "k.json", "k.safetensors"]


def test_webdataset(tmp_path: Path, samples: dict[str, Any]) -> None:
    run("export", tmp_path / "cache", tmp_path / "out", "--as", "webdataset")
    url = str(tmp_path / "out" / "samples.tar")
    found = {sample["__key__"]: sample for sample in wds.WebDataset(url, shardshuffle=False)}
    assert list(found) == [tc.safe_key(name) for name in samples]
    for number, (name, sample) in enumerate(samples.items()):
        members = found[tc.safe_key(name)]
        assert_same(sample, torch.load(io.BytesIO(members["pth"]), weights_only=False))
        assert ("jpg" in members) == bool(number % 2)


DTYPES = [torch.bfloat16, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2fnuz]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_dtypes_that_numpy_lacks(tmp_path: Path) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    sample = {str(dtype): bits.view(torch.uint8).view(dtype) for dtype in DTYPES}
    write(tmp_path / "cache", {"k": sample})
    result = json_of("export", tmp_path / "cache", tmp_path / "out", "--as", "npz")
    wide = {name: "complex64" if "complex" in name else "float32" for name in sample}
    assert result["widened"] == wide
    for name, array in np.load(tmp_path / "out" / "k.npz").items():
        assert_same(sample[name].to(getattr(torch, wide[name])), torch.from_numpy(array))


def test_values_that_json_cannot_hold(tmp_path: Path) -> None:
    values = {"set": {1, 2}, "float": float("nan"), "bytes": b"ab", "list": [{3}]}
    writable = {"a.b": "\udcff", "name": "é字", "label": np.int64(3), "sizes": [np.float32(0.5), np.bool_(True)]}
    write(tmp_path / "cache", {"k": {"x": torch.ones(2), "y": values | writable}})
    said = run("export", tmp_path / "cache", tmp_path / "out", "--as", "npz").stderr
    assert all(
        f"y.{name} is a {name}, which JSON cannot hold: the files have a short text of it" in said for name in values
    )
    expected = {f"y.{name}": repr(value) for name, value in values.items()} | {"y.a.b": "\udcff", "y.name": "é字"}
    expected |= {"y.label": 3, "y.sizes": [0.5, True]}
    assert json.loads((tmp_path / "out" / "k.json").read_text(encoding="utf-8")) == expected


def cyclic() -> dict[str, Any]:
    inner: list[Any] = [torch.zeros(1)]
    inner.append(inner)
    return {"inner": inner}


def shared() -> dict[str, Any]:
    inner: list[Any] = [torch.zeros(1)]
    for _ in range(30):
        inner = [inner, inner]
    return {"inner": inner}


@pytest.mark.parametrize(
    ("kind", "sample", "message"),
    [
        ("npz", cyclic(), "contains itself"),
        ("safetensors", shared(), "65,536 values"),
        ("npz", {"texts": ["a" * (1 << 20)] * 32}, "one object too often"),
        ("npz", {"k" * 70_000: torch.zeros(1)}, "10,000 char"),
        ("npz", {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, "two values would have the name 'a.b'"),
        ("safetensors", {1: torch.ones(1), "1": 3}, "two values would have the name '1'"),
        ("npz", {"a\0b": torch.ones(1)}, r"a tensor has the name 'a\x00b'"),
        ("safetensors", {"__metadata__": torch.ones(1)}, "a tensor has the name '__metadata__'"),
        (
            "safetensors",
            {"x": torch.zeros(2, dtype=torch.complex128)},
            "cannot hold it: ValueError(\"tensor 'x' is torch.complex128",
        ),
        ("safetensors", {"x": torch.zeros(2).to(torch.float8_e8m0fnu)}, "tensor 'x' is torch.float8_e8m0fnu"),
        ("safetensors", {"x": np.array(["a"])}, "a safetensors file cannot hold it"),
    ],
)
def test_samples_that_only_pt_can_hold(tmp_path: Path, kind: str, sample: Any, message: str) -> None:
    write(tmp_path / "cache", {"k": sample})
    said = run("export", tmp_path / "cache", tmp_path / "out", "--as", kind, status=1).stderr
    assert message in said
    assert "sample 'k'" in said
    assert "use pt" in said
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize(("kind", "suffix"), [("safetensors", "values.json"), ("webdataset", "pth"), ("pt", "pt")])
def test_members_with_the_name_of_a_file(tmp_path: Path, kind: str, suffix: str) -> None:
    write(tmp_path / "cache", {"k": {"x": torch.ones(1)}}, **{suffix: b"mine", "json": b"{}"})
    said = run("export", tmp_path / "cache", tmp_path / "out", "--as", kind, status=1).stderr
    assert f"sample 'k': has a member {suffix!r}" in said
    assert os.listdir(tmp_path) == ["cache"]


NAMES = ["../up", "/etc/passwd", "a/../../b", "x" * 300, "a:b", "a\\b", ".hidden", "new\nline", "", "\udcff"]
KEYS = ["../up", "a/../../b", "x" * 300, "ä" * 150, "写" * 80, "new\nline", "esc\x1b[31m", "in/./up", "a//b"]


def test_keys_that_lead_out_of_the_folder(tmp_path: Path) -> None:
    """A tar by another program may have any key, and `tc.original_name` may return any name."""
    far = "../../" * 20 + str(tmp_path / "far").lstrip("/")
    keys = [*KEYS, "/".join(["deep"] * 300), str(tmp_path / "absolute"), far]
    for key in keys:
        source = foreign(tmp_path / "in.tar", ["ok", key])
        said = run("export", source, tmp_path / "out", "--as", "webdataset", status=1)
        assert "use another kind" in said.stderr
        assert os.listdir(tmp_path) == ["in.tar"]
    keys += map(tc.safe_key, NAMES)
    source = foreign(tmp_path / "in.tar", [*keys, "ok"])
    result = json_of("export", source, tmp_path / "parent" / "out")
    assert sorted(os.listdir(tmp_path)) == ["in.tar", "parent"]
    assert os.listdir(tmp_path / "parent") == ["out"]
    files = files_in(tmp_path / "parent" / "out")
    assert sorted(path.read_bytes().decode() for path in files if path.suffix == ".txt") == sorted([*keys, "ok"])
    assert all(str(path).isprintable() for path in files)
    assert set(result["renamed"]) == set(keys)
    said = run("export", source, tmp_path / "again")
    assert all(line.isprintable() for line in said.stderr.split("\n"))


def test_members_with_names_that_are_no_file_names(tmp_path: Path) -> None:
    said = run("export", foreign(tmp_path / "in.tar", "a", "x\x1b[31m"), tmp_path / "out", status=1)
    assert "cannot be the end of a file's name" in said.stderr
    assert os.listdir(tmp_path) == ["in.tar"]


def test_a_tar_with_a_key_twice(tmp_path: Path) -> None:
    for i in range(2):
        write(tmp_path / f"{i}", {"k": {"x": torch.tensor(i)}})
    with tc.open([tmp_path / "0", tmp_path / "1"]) as cache:
        with pytest.raises(tc.EncodeError, match="occurs twice"):
            tc.export_cache(cache, tmp_path / "tar", "webdataset")
        tc.export_cache(cache, tmp_path / "out", "pt")
    assert sorted(torch.load(path)["x"].item() for path in files_in(tmp_path / "out")) == [0, 1]


def test_samples_whose_files_would_have_one_name(tmp_path: Path) -> None:
    """By their members, as a folder of another sample, by case, or by the form of accents."""
    names = ["a", "a.v2", "b/c", "b.pt/c", "b", "\u00e9", "e\u0301", "\u00c9", "A.V2"]
    samples = {name: {"x": torch.tensor(i)} for i, name in enumerate(names)}
    write(tmp_path / "cache", samples, lambda i: {"txt": str(i)} | ({} if i else {"v2.txt": b"0", "v2.pt": b"0"}))
    assert json_of("export", tmp_path / "cache", tmp_path / "out")["num_written"] == len(names)
    files = files_in(tmp_path / "out")
    assert len(files) == 2 * len(names) + 2
    found = {torch.load(path)["x"].item(): path for path in files if path.suffix == ".pt" and path.name != "a.v2.pt"}
    assert sorted(found) == [*range(len(names))]
    assert all(path.with_suffix(".txt").read_text() == str(i) for i, path in found.items())
    assert len({unicodedata.normalize("NFC", str(path).casefold()) for path in files}) == len(files)


def test_folders_that_are_refused(tmp_path: Path, samples: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "dir").symlink_to(tmp_path)
    assert "is not empty" in run("export", tmp_path / "cache", tmp_path / "out", status=2).stderr
    monkeypatch.chdir(tmp_path)
    for url in ("s3://bucket/files", "https://user:secret@example.org/x?signature=1"):
        said = run("export", tmp_path / "cache", url, status=2).stderr
        assert "local folder" in said
        assert "secret" not in said
        assert "signature" not in said
    assert sorted(os.listdir(tmp_path)) == ["cache", "out"]
    with tc.open(tmp_path / "cache") as cache, pytest.raises(ValueError, match="expected one of 'pt'"):
        tc.export_cache(cache, tmp_path / "new", "pickle")
    with pytest.raises(TypeError, match="expected a cache"):
        tc.export_cache(str(tmp_path), tmp_path / "new", "pt")  # type: ignore[arg-type]


def is_large(folder: Path) -> bool:
    nbytes = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # a temporary file gets its name in this moment
            nbytes += path.stat().st_size
    return nbytes > 1e6


@pytest.mark.parametrize(
    ("kind", "signum"), [("webdataset", signal.SIGKILL), ("pt", signal.SIGINT), ("npz", signal.SIGKILL)]
)
def test_an_export_that_ends_early(tmp_path: Path, kind: str, signum: int) -> None:
    """The folder does not exist until the same command has continued; a changed cache is exported anew."""
    cache = write(tmp_path / "cache", {f"k{i:03d}": {"x": torch.full((15_000,), i)} for i in range(300)}, txt="a cat")
    for attempt in range(20):  # an export may be complete before the signal arrives
        out = tmp_path / f"out{attempt}"
        with the_server().running("export", cache, out, "--as", kind, cwd=tmp_path) as (process, _):
            wait_until(lambda: out.exists() or any(map(is_large, tmp_path.glob(f".{out.name}.*"))))  # noqa: B023
            os.kill(process.pid, signum)
            if process.wait() != 0:
                break
    else:
        pytest.fail("no export was interrupted")
    assert not out.exists()
    if kind == "npz":
        write(tmp_path / "other", {f"k{i:03d}": {"x": torch.full((15_000,), -i)} for i in range(300)}, txt="a cat")
        assert json_of("export", tmp_path / "other", out, "--as", kind)["num_present"] == 0
        assert (np.load(out / "k299.npz")["x"] == -299).all()
    else:
        (hidden,) = tmp_path.glob(f".{out.name}.*")
        (hidden / ".k299.pt.0123abcd.tmp").write_bytes(b"half")
        result = json_of("export", cache, out, "--as", kind)
        assert (result["num_present"] > 0) == (kind == "pt")
        assert result["num_present"] + result["num_written"] == 300
    if kind == "webdataset":
        with tarfile.open(out / "samples.tar") as archive:
            assert len(archive.getnames()) == 600
    else:
        names = sorted(f"k{i:03d}.{end}" for i in range(300) for end in (kind, "txt"))
        assert [path.name for path in files_in(out)] == names
    assert not list(tmp_path.glob(f".{out.name}.*"))


def test_members_that_change_before_an_export_continues(tmp_path: Path) -> None:
    """They are exported anew, although the tensors are the same."""

    def stop(done: int, total: int | None) -> None:
        if done == 2:
            raise KeyboardInterrupt

    samples = {f"k{i}": {"x": torch.full((3,), i)} for i in range(4)}
    with tc.open(write(tmp_path / "cache", samples, txt="a cat")) as cache, pytest.raises(KeyboardInterrupt):
        tc.export_cache(cache, tmp_path / "out", "pt", progress=stop)
    with tc.open(write(tmp_path / "edited", samples, txt="a dog")) as cache:
        assert tc.export_cache(cache, tmp_path / "out", "pt").num_present == 0
    assert {path.read_text() for path in (tmp_path / "out").glob("*.txt")} == {"a dog"}


def test_names_in_a_join_that_change_before_an_export_continues(tmp_path: Path) -> None:
    def stop(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    left, right = (write(tmp_path / name, {"k": {"x": torch.ones(1)}, "l": {"x": torch.ones(1)}}) for name in "ab")
    with tc.open(left) as a, tc.open(right) as b:
        with pytest.raises(KeyboardInterrupt):
            tc.export_cache(tc.join({"a": a, "b": b}), tmp_path / "out", "pt", progress=stop)
        assert tc.export_cache(tc.join({"b": a, "a": b}), tmp_path / "out", "pt").num_present == 0


@pytest.mark.parametrize("kind", ["pt", "webdataset"])
def test_a_full_disk(tmp_path: Path, kind: str) -> None:
    """The error names the file that could not be written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tc.open(write(tmp_path / "cache", {"k": {"x": torch.zeros(50_000)}})) as cache:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # has the same effect
        try:
            with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/.*/(k\.pt|samples\.tar)'"):
                tc.export_cache(cache, tmp_path / "out", kind)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_shared_dataset_that_changes_before_an_export_continues(tmp_path: Path) -> None:
    def stop(done: int, total: int | None) -> None:
        if done == 2:
            raise KeyboardInterrupt

    for value in (0, 1):
        items = [{"x": torch.full((3,), value)} for _ in range(4)]
        shared = tc.SharedDataset(items, f"export-{value}-{os.getpid()}", directory=tmp_path)
        with shared, contextlib.suppress(KeyboardInterrupt):
            tc.export_cache(tc.join({"a": shared}), tmp_path / "out", "pt", progress=None if value else stop)
    assert [torch.load(tmp_path / "out" / f"{i}.pt")["a"]["x"][0] for i in range(4)] == [1, 1, 1, 1]


def test_caches_that_are_not_exported_are_named(tmp_path: Path) -> None:
    """Samples without the cache, and other caches of the samples."""
    with tc.ShardWriter(tmp_path / "cache", max_samples=4) as sink:
        for i in range(6):
            sink.write(f"{i}", **({"tensorcache": {"x": torch.ones(1)}} if i % 2 else {}), jpg=b"\xff\xd8\xff")
    said = run("export", tmp_path / "cache", tmp_path / "out")
    assert said.stdout.splitlines()[-1] == "3 samples written"
    assert "3 samples in the shards have no such cache, and were not exported" in said.stderr
    write(tmp_path / "two", {"k": {"x": torch.ones(1)}}, **{"text.tensorcache": {"y": torch.ones(2)}})
    run("export", tmp_path / "two", tmp_path / "either", status=2)
    said = run("export", tmp_path / "two", tmp_path / "text", "--cache", "text")
    assert "the samples also have the caches '', which were not exported: export them with --cache" in said.stderr
    assert list(torch.load(tmp_path / "text" / "k.pt")) == ["y"]
