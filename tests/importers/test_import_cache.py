"""An import loses nothing silently, whatever is bad, interrupted or hostile, and is the same for any number of threads."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zipfile
from collections import UserDict
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from tests.cli.command import json_of, run
from tests.importers.folders import Gadget, assert_left_out, imported, saved, write_files, write_tar
from tests.reading.batches import write

NAMES = [f"photo {i:04d}" for i in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of six good files."""
    return write_files(tmp_path / "in", len(NAMES))


def npz_with(*names: str, content: bytes, level: int = 0) -> bytes:
    out = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if level else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", kind, compresslevel=level) as archive:
        for name in names:
            archive.writestr(name, content)
    return out.getvalue()


ARRAY = saved(np.arange(100.0), numpy=True)
FIFTY = np.float64(50).tobytes()
DEEP: Any = torch.ones(1)
for _ in range(400):
    DEEP = [DEEP]
DEEP_PICKLE = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
ZEROS = bytes((1 << 26) + 1)  # more than any small file may expand to
BAD: dict[str, tuple[str, bytes, str]] = {
    "empty npz": ("a.npz", b"", "not a zip file"),
    "cut npz": ("a.npz", npz_with("x.npy", content=ARRAY)[:-30], "cannot be decoded"),
    "object array": ("a.npz", npz_with("x.npy", content=saved(np.array([Gadget()]), numpy=True)), "pickled objects"),
    "object npy": ("a.npy", saved(np.array([Gadget()]), numpy=True), "pickled objects"),
    "short array": ("a.npz", npz_with("x.npy", content=ARRAY[:-8]), "exceeds its file"),
    "no bytes": ("a.npy", ARRAY.replace(b"'<f8'", b"'|S0'").replace(b"(100,)", b"(999,)"), "exceeds its file"),
    "huge array": ("a.npy", ARRAY.replace(b"(100,)", b"(9" + b"9" * 15 + b",)")[:200], "a.npy"),
    "one name": ("a.npz", npz_with("x.npy", "y.npy", content=ARRAY).replace(b"y.npy", b"x.npy"), "have the same name"),
    "flipped bits": ("a.npz", npz_with("x.npy", content=ARRAY).replace(FIFTY, FIFTY[::-1]), "array 'x': is damaged"),
    "not an array": ("a.npz", npz_with("../x.txt", content=b"hello"), "is not an array"),
    "bomb": ("a.npz", npz_with("x.npy", content=ZEROS, level=1), "expand to"),
    "gzip bomb": ("a.pt", gzip.compress(ZEROS, 1), "expands to more than"),
    "cut gzip": ("a.pt", gzip.compress(saved({"x": torch.ones(100)}))[:-20], "cut short"),
    "damaged gzip": ("a.pt", gzip.compress(bytes(100))[:-8] + b"12345678", "gzip file is damaged"),
    "pickle as pt": ("a.pt", pickle.dumps(Gadget()), "names .*--trust"),
    "gadget in a zip": ("a.pt", saved({"x": torch.ones(2), "y": Gadget()}), "--trust"),
    "gadget in gzip": ("a.pth", gzip.compress(saved([Gadget()])), "--trust"),
    "module": ("a.pt", saved(torch.nn.Linear(2, 2)), "--trust"),
    "deep pickle": ("a.pt", npz_with("archive/data.pkl", content=DEEP_PICKLE), "nest"),
    "deep value": ("a.pt", saved(DEEP), "nest"),
    "text as safetensors": ("a.safetensors", b"hello, world", "a.safetensors"),
    "long header": ("a.safetensors", struct.pack("<Q", 1 << 62) + b"{}", "a.safetensors"),
    "a list as header": ("a.safetensors", struct.pack("<Q", 2) + b"[]", "a.safetensors"),
    "a surrogate": ("a.safetensors", b'\x22\0\0\0\0\0\0\0{"__metadata__":{"a":"\\ud800"}}    ', "a.safetensors"),
    "cut safetensors": ("a.safetensors", safetensors.torch.save({"x": torch.ones(9)})[:-4], "a.safetensors"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD.values(), ids=BAD)
def test_bad_files(
    folder: Path, tmp_path: Path, name: str, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "more").mkdir()
    (folder / "more" / name).write_bytes(content)
    assert_left_out(Path("in"), f"more/{name}", message, NAMES)
    _, report = imported(Path("in"), Path("out"), on_error="skip")
    assert (report.num_read, report.num_written, report.num_skipped) == (7, 6, 1)
    assert [skipped.files for skipped in report.skipped] == [(f"more/{name}",)]
    assert not Path("hacked").exists()


def test_links(folder: Path, tmp_path: Path) -> None:
    """Links to files inside the folder are followed, links out of it are not; folders are listed once."""
    (tmp_path / "secret.npy").write_bytes(ARRAY)
    (folder / "deep").mkdir()
    (folder / "deep" / "x.npy").write_bytes(ARRAY)
    for name, target in {
        "secret.npy": "../secret.npy",
        "all": "/",
        "none.npy": "nowhere.npy",
        "circle": ".",
        "again": "deep",
        "itself.npy": "itself.npy",
        "same.npy": "deep/x.npy",
    }.items():
        (folder / name).symlink_to(target)
    for number in range(12):
        (folder / "many" / str(number)).mkdir(parents=True)
        for other in range(12):
            (folder / "many" / str(number) / f"to {other}").symlink_to(f"../{other}")
    with pytest.raises(tc.FormatError, match="all: is a link out of the folder, as is 1 more; .* `cp -rL`"):
        tc.import_cache(folder, tmp_path / "stopped")
    found, report = imported(folder, tmp_path / "out", on_error="skip")
    assert {each.name for each in report.skipped} == {"all", "itself.npy", "none.npy", "secret.npy"}
    assert set(found) == {*NAMES, "deep/x", "same"}


@pytest.mark.parametrize("target", ["../secret.npy", "nowhere.npy"])
def test_only_links_that_are_not_followed(tmp_path: Path, target: str) -> None:
    """Also if no format is chosen, or none can be."""
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.npy").write_bytes(ARRAY)
    for number in range(3):
        (tmp_path / "in" / f"{number}.npy").symlink_to(target)
    fault = {"../secret.npy": "out of the folder, .*`cp -rL`", "nowhere.npy": "to no file, .*restore the file"}[target]
    for options, error in (({}, ValueError), ({"format": "files"}, tc.FormatError)):
        for on_error in ("stop", "skip"):
            with pytest.raises(error, match=f"0.npy: is a link {fault}") as caught:
                tc.import_cache(tmp_path / "in", tmp_path / "out", on_error=on_error, **options)  # type: ignore[arg-type]
            assert "as are 2 more" in str(caught.value)


def save_to_hub(repository: Path, files: dict[str, bytes]) -> Path:
    """Write files as the Hub's client stores a snapshot, with links to blobs; return the snapshot."""
    snapshot, blobs = repository / "snapshots" / "5f1e", repository / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = blobs / sha256(content).hexdigest()
        blob.write_bytes(content)
        blob.chmod(0o444)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    return snapshot


def test_links_of_the_hub(tmp_path: Path) -> None:
    """The Hub's cache has links to blobs of the same repository; links to another repository are refused."""
    names = ["a.npy", "deep/er/b.npy"]
    snapshot = save_to_hub(tmp_path / "datasets--a--b", dict.fromkeys(names, ARRAY))
    for folder, expected in ((snapshot, ["a", "deep/er/b"]), (snapshot / "deep", ["er/b"])):
        found, report = imported(folder, tmp_path / folder.name)
        assert (list(found), report.ok) == (expected, True)
    other = save_to_hub(tmp_path / "datasets--a--c", {"x.npy": ARRAY}) / "x.npy"
    (snapshot / "c.npy").symlink_to(other.resolve())
    with pytest.raises(tc.FormatError, match=r"c.npy: is a link out of the folder"):
        tc.import_cache(snapshot, tmp_path / "stopped")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """Reading a snapshot of a cache needs no copy; what replaces a file of it replaces the link, not the blob."""
    write(tmp_path / "cache" / "%06d.tar", [{"x": torch.full((3,), number)} for number in range(5)], max_samples=2)
    tc.write_index(tmp_path / "cache" / "000001.tar")  # a sidecar
    files = {path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir() if path.name[0] != "."}
    snapshot = save_to_hub(tmp_path / "datasets--a--b", files)

    def identities() -> dict[str, tuple[int, int, bytes]]:
        blobs = (snapshot / "../../blobs").iterdir()
        return {blob.name: (blob.stat().st_ino, blob.stat().st_mtime_ns, blob.read_bytes()) for blob in blobs}

    before = identities()
    assert tc.verify(snapshot).ok
    changes: list[Callable[[], object]] = [
        lambda: tc.write_index(snapshot / "000000.tar"),
        lambda: tc.write_index(snapshot / "000001.tar"),
        lambda: run("index", snapshot),
        lambda: tc.ShardWriter(snapshot, resume=True, max_samples=2).close(),
    ]
    for change in changes:
        change()
        assert identities() == before
        with tc.open(snapshot) as cache:
            assert cache.read_batch([4, 0])["x"][:, 0].tolist() == [4, 0]
    assert (snapshot / "000000.tar").is_symlink()
    write(snapshot / "%06d.tar", {"new": {"x": torch.zeros(3)}}, overwrite=True)
    assert identities() == before


def test_pipes_are_not_opened(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "pipe.npy")
    (folder / "._photo.npy").write_bytes(b"AppleDouble")
    found, report = imported(folder, tmp_path / "out")
    assert list(found) == NAMES
    assert report.unused == ["._photo.npy", "pipe.npy"]


def test_strange_names(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    names = ["a\nb", "\x1b[2Jx", "..x", "ä" * 60, "x" * 250, "-rf", "CON", "a\\b", "\udcff", " ", "a|b;c"]
    for name in names:
        (tmp_path / "in" / f"{name}.npy").write_bytes(ARRAY)
    tc.import_cache(tmp_path / "in", tmp_path / "out")
    with tc.open(tmp_path / "out") as cache:
        assert set(cache.keys()) == set(map(tc.safe_key, names))
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_sources_and_arguments_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello")
    write_tar(tmp_path / "tars" / "a.tar", {"a.npy": ARRAY})
    write_tar(tmp_path / "tars" / "nested" / "b.tar", {"b.npy": ARRAY})  # this would be lost
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (tmp_path / "in", {}, ValueError, "no file, of 1, belongs to a known format"),
        (tmp_path / "in", {"format": "files"}, ValueError, "has no samples of the format 'files'"),
        (tmp_path / "in", {"format": "koya"}, ValueError, "unknown format 'koya'; there are"),
        (tmp_path / "in", {"on_error": "ignore"}, ValueError, "expected 'stop' or 'skip'"),
        (tmp_path / "in", {"num_workers": 0}, ValueError, "expected at least 1"),
        (tmp_path / "nowhere", {}, FileNotFoundError, "nowhere does not exist"),
        ([tmp_path / "in", tmp_path / "in"], {}, ValueError, "import folders of other files one by one"),
        ([tmp_path / "tars", tmp_path / "tars/a.tar"], {}, ValueError, "tars is a folder, but patterns and"),
        (tmp_path / "t*", {}, ValueError, "tars is a folder, but patterns and"),
        ("https://example.org/a.tar", {}, ValueError, "only local shards can be imported"),
    ]
    for source, options, error, message in refused:
        with pytest.raises(error, match=message):
            tc.import_cache(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_page_lists_the_formats() -> None:
    page = (Path(__file__).parents[2] / "docs" / "importing.md").read_text()
    formats = json_of("import", "--list-formats")
    names = [each["format"] for each in formats]
    assert names == sorted(set(names))
    rows = [f"| `{each['format']}` | {each['files']} |" for each in formats]
    assert "\n".join(rows) in page, "\n".join(rows)


def test_members_with_names_of_caches(tmp_path: Path) -> None:
    write_tar(tmp_path / "in" / "a.tar", {"k.npy": ARRAY, "k.foo.tensorcache": b"x"})
    with pytest.raises(tc.FormatError, match=r"'foo.tensorcache' has a name that is reserved"):
        tc.import_cache(tmp_path / "in", tmp_path / "out")


class Deleting(UserDict[str, Any]):
    """A fingerprint that deletes a file when it is read, after the folder was listed."""

    def __iter__(self) -> Iterator[str]:
        Path(self["file"]).unlink(missing_ok=True)
        return super().__iter__()


def test_a_file_that_was_deleted(folder: Path, tmp_path: Path) -> None:
    (folder / "gone.npy").write_bytes(ARRAY)
    fingerprint = Deleting(file=str(folder / "gone.npy"))
    found, report = imported(folder, tmp_path / "out", on_error="skip", fingerprint=fingerprint)
    assert (list(found), [each.name for each in report.skipped]) == (NAMES, ["gone"])
    assert report.skipped[0].what == "gone: gone.npy: cannot be read: No such file or directory"


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_another_cache(tmp_path: Path, resume: bool) -> None:
    np.save(tmp_path / "0.npy", np.zeros(3))
    write(tmp_path / "out" / "train-%06d.tar", [{"x": 1}])
    message = r"train-000000\.tar is not a shard of this import; choose another folder"
    with pytest.raises(FileExistsError, match=message):
        tc.import_cache(tmp_path / "0.npy", tmp_path / "out", resume=resume)
    assert len(tc.open(tmp_path / "out")) == 1
    tc.import_cache(tmp_path / "0.npy", tmp_path / "out" / "val-%06d.tar", resume=resume)  # chosen by name
    with pytest.raises(FileExistsError, match=r"val-000000\.tar exists; .*--resume"):
        tc.import_cache(tmp_path / "0.npy", tmp_path / "out" / "val-%06d.tar")


def test_a_file_that_changes_during_the_import(tmp_path: Path) -> None:
    """After its shard was written; later shards may be newer than the file."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for i in range(8):
        np.save(source / f"{i}.npy", np.full(3, i))

    def change(done: int, total: int | None) -> None:
        shard, file = out / "000000.tar", source / "0.npy"
        while shard.exists() and file.stat().st_ctime_ns <= shard.stat().st_ctime_ns:
            np.save(file, np.full(3, -1))

    assert not tc.import_cache(source, out, num_workers=1, max_samples=2, progress=change).changed
    assert tc.import_cache(source, out, resume=True, max_samples=2).changed == ["0"]
