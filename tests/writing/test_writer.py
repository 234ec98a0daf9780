"""Shards by `ShardWriter`: when they roll over, what goes into them, and that nothing half done is ever in sight."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds

import wds_tensorcache as tc
from tests.children import switching_often
from tests.conftest import diffusion_sample
from tests.reading.batches import write as write_samples
from tests.same import assert_same


def write(pattern: Path | str, count: int = 3, **options: Any) -> None:
    with tc.ShardWriter(pattern, fsync=False, **options) as sink:
        for i in range(count):
            sink.write(f"{i:03d}", diffusion_sample(i), json={"label": i})


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def listed(folder: Path) -> dict[str, int]:
    shards = json.loads((folder / "manifest.json").read_text())["shardlist"]
    return {shard["url"]: shard["nsamples"] for shard in shards}


def assert_complete(folder: Path) -> list[str]:
    """Assert that all the manifest lists is there and right; return the keys."""
    cache = tc.open(folder)
    keys = list(cache.keys())
    for key in keys:
        assert_same(diffusion_sample(int(key)), cache[key])
    return keys


def test_several_threads(tmp_path: Path) -> None:
    with switching_often(), tc.ShardWriter(tmp_path, fsync=False, max_samples=3) as sink, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: sink.write(f"{i:03d}", diffusion_sample(i)), range(100)))
    assert sorted(assert_complete(tmp_path)) == [f"{i:03d}" for i in range(100)]
    assert set(listed(tmp_path).values()) == {3, 1}


def test_by_bytes(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "%d.tar", max_nbytes=100_000) as sink:
        for i in range(5):
            sink.write(str(i), torch.zeros(60_000 if i < 4 else 300_000, dtype=torch.uint8))
    assert listed(tmp_path) == {"0.tar": 2, "1.tar": 2, "2.tar": 1}


def test_numbers_that_outgrow_the_pattern(tmp_path: Path) -> None:
    message = r"s-10\.tar: the name sorts before that of the last shard, .* such as %06d"
    with pytest.warns(UserWarning, match=message) as warned:
        write(tmp_path / "s-%d.tar", count=12, max_samples=1)
    assert [one.filename for one in warned] == [__file__]
    assert list(tc.open(tmp_path).keys())[:3] == ["000", "001", "010"]


def test_options_leave_things_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("x.tar", footer=False, dali_index=False, manifest=False)
    assert names(tmp_path) == ["x.tar"]
    plain = Path("x.tar").read_bytes()
    write("x.tar", overwrite=True)
    assert Path("x.tar").read_bytes().startswith(plain)
    assert plain.endswith(bytes(1024))
    assert names(tmp_path) == ["manifest.json", "x.idx", "x.tar"]
    assert len(assert_complete(Path("."))) == 3


def test_shards_that_are_there(tmp_path: Path) -> None:
    write(tmp_path / "a-%03d.tar", count=4, max_samples=1)
    write(tmp_path / "a-b-%03d.tar", count=1)
    (tmp_path / "a-002.tar.index").write_bytes(b"old")
    message = "a-000.tar exists; pass overwrite=True or resume=True, or write to another folder"
    with pytest.raises(FileExistsError, match=message):
        write(tmp_path / "a-%03d.tar")
    write(tmp_path / "a-%03d.tar", count=2, max_samples=1, overwrite=True)
    assert listed(tmp_path) == {"a-000.tar": 1, "a-001.tar": 1, "a-b-000.tar": 1}
    assert not [name for name in names(tmp_path) if name.startswith(("a-002", "a-003"))]


def test_the_index_of_a_deleted_shard(tmp_path: Path) -> None:
    for value in (1, 2):
        with tc.ShardWriter(tmp_path / "a.tar", footer=False, manifest=False) as sink:
            sink.write("0", {"x": torch.tensor([value])})
        assert [sample["x"].tolist() for sample in tc.open(tmp_path / "a.tar")] == [[value]]
        tc.write_index(tmp_path / "a.tar")
        (tmp_path / "a.tar").unlink()


@pytest.mark.parametrize("at", [0, 1])
def test_a_shard_that_appears_meanwhile(tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    sink = tc.ShardWriter(tmp_path / "%d.tar", max_samples=1)
    sink.write("0", 0)
    (tmp_path / f"{at}.tar").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=rf"{at}\.tar was created after this writer started"):
        sink.write("1", 1)
    sink.close()
    assert {"0.tar", f"{at}.tar"} == {name for name in names(tmp_path) if name.endswith(".tar")}
    assert (tmp_path / f"{at}.tar").read_bytes() == b"mine"
    del sink
    gc.collect()
    assert not caplog.records  # the writer was closed


NUMBERS = "expected at most one number, such as %06d, in its last part"
PATTERNS = dict.fromkeys(["%d-%d.tar", "a%d/%d.tar", "x-%s.tar", "%%.tar"], NUMBERS)
PATTERNS |= dict.fromkeys(["x.idx", "%d.index", "data.%d", "x.npz"], "share a name|ends in .tar")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bad_patterns(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ValueError, match=PATTERNS[pattern]):
        tc.ShardWriter(tmp_path / pattern)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["folder", "folder/", "with.dots-1.5", "there.tar"])
def test_a_folder_is_a_pattern(tmp_path: Path, name: str) -> None:
    (tmp_path / "there.tar").mkdir()
    for path in (f"{tmp_path}/{name}", Path(tmp_path, name)):
        with tc.ShardWriter(path, resume=True, max_samples=2, fsync=False) as sink:
            for i in range(5):
                sink.write(f"{i}", i)
        shards = [f"00000{i}.{kind}" for i in range(3) for kind in ("idx", "tar")]
        assert names(tmp_path / name) == [*shards, "manifest.json"]
    assert len(tc.build(range(9), lambda items: items, f"{tmp_path}/b/built-%d.tar", fingerprint={}, fsync=False)) == 9
    assert (tmp_path / "b" / "built-0.tar").exists()


def test_bad_limits(tmp_path: Path) -> None:
    for limit in ("max_samples", "max_nbytes"):
        with pytest.raises(ValueError, match=f"{limit}=0.*expected at least 1"):
            tc.ShardWriter(tmp_path / "x.tar", **{limit: 0})  # type: ignore[arg-type]


def test_what_a_sample_may_have(tmp_path: Path) -> None:
    caches = {"latent": {"x": torch.arange(3)}, "text-2": [np.arange(2.0)]}
    with tc.ShardWriter(tmp_path / "x.tar") as sink:
        sink.write("a", caches, txt="é", jpg=b"\xff", cls=True, json=[1, "é"], bin=memoryview(b"abcd")[::2])
        sink.write("d/b", json="x", **{f"{name}.tensorcache": value for name, value in caches.items()}, JPG=b"")
        sink.write("none", None)
        sink.write("c", tensorcache=(), **{"x.y.json": {}, "other.safetensors": b"theirs"})
        sink.write("plain", txt="alone")
    shards = wds.SimpleShardList([str(tmp_path / "x.tar")])
    a, b, none, c, plain = wds.DataPipeline(shards, wds.tarfile_to_samples(), tc.decode())
    assert_same(caches, a["tensorcache"])
    assert [a[k] for k in ("txt", "jpg", "cls", "json", "bin")] == ["é", b"\xff", 1, [1, "é"], b"ac"]
    assert_same(caches["latent"], b["latent.tensorcache"])
    assert_same(caches["text-2"], b["text-2.tensorcache"])
    assert (b["__key__"], b["json"], b["jpg"]) == ("d/b", "x", b"")
    assert none["tensorcache"] is None
    assert (c["tensorcache"], c["x.y.json"], c["other.safetensors"]) == ((), {}, b"theirs")
    assert plain["txt"] == "alone"
    assert list(tc.open(tmp_path, cache="").keys()) == ["a", "none", "c"]
    assert list(tc.open(tmp_path, cache="latent").keys()) == ["d/b"]


def test_other_encoders(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "x.tar", encoder=wds.writer.make_encoder(True)) as sink:
        sink.write("a", 0, npy=np.arange(3), json={"x": 1})
    (sample,) = wds.WebDataset(str(tmp_path / "x.tar"), shardshuffle=False).compose(tc.decode())
    assert (sample["npy"].tolist(), sample["json"]) == ([0, 1, 2], {"x": 1})


def test_tensors_may_change_at_once(tmp_path: Path) -> None:
    small, large = torch.zeros(10), torch.zeros(3 << 20, dtype=torch.uint8)
    with tc.ShardWriter(tmp_path / "x.tar") as sink:
        for i in range(4):
            small.fill_(i)
            large.fill_(i)
            sink.write(str(i), [small, large] if i % 2 else [small])
        small.fill_(9)
        large.fill_(9)
    for i, sample in enumerate(tc.open(tmp_path)):
        assert all(bool((tensor.load() == i).all()) for tensor in sample)


def test_align(tmp_path: Path) -> None:
    write_samples(tmp_path / "x.tar", [torch.arange(5)], align=4096)
    assert tc.write_index(tmp_path / "x.tar").layouts[0].data_begin == 4096
    with pytest.raises(ValueError, match="align=3, expected a positive multiple of 8"):
        tc.ShardWriter(tmp_path / "y.tar", align=3).write("0", torch.arange(5))


REFUSED: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    ("", 0, {}, tc.InvalidKeyError, "__key__ is '', expected a non-empty str"),
    ({"__key__": "a", "x": 1}, None, {}, tc.InvalidKeyError, "'x': 1}, expected a non-empty str"),
    ("a.b", 0, {}, tc.InvalidKeyError, "'a.b' has a dot in its last part.*; .*replace it, e.g. by '_'"),
    ("../a", 0, {}, tc.InvalidKeyError, "not a plain relative path.*; .*remove"),
    ("/a", 0, {}, tc.InvalidKeyError, "; .*remove"),
    ("é", 0, {}, tc.InvalidKeyError, "; .*number the samples"),
    ("__a", 0, {}, tc.InvalidKeyError, "; .*choose another first character"),
    (
        "k" * 89,
        0,
        {},
        tc.InvalidKeyError,
        "has 101 bytes: DALI without an index reads at most 100.*; .*shorten the key, or",
    ),
    ("k", 0, {"x" * 99: b""}, tc.InvalidKeyError, "has 101 bytes"),
    ("k", 0, {"": b""}, tc.InvalidKeyError, "'' .* extension"),
    (
        "k",
        0,
        {"__key__": b"z"},
        tc.InvalidKeyError,
        "'__key__' begins with '_': stock tools.*; .*another first character",
    ),
    ("k", 0, {"x.skel.pyd": b""}, tc.InvalidKeyError, "; .*rename that member"),
    ("k", 0, {"skel.tensorcache": 0}, tc.InvalidKeyError, "cache name 'skel' must match"),
    ("k", 0, {"TensorCache": b""}, tc.InvalidKeyError, "a name is reserved for caches"),
    ("k", 0, {"jpg": b"", "JPG": b""}, tc.InvalidKeyError, "or occurs twice"),
    ("k", 0, {"x.safetensors": tc.encode_sample(0)[1]}, tc.InvalidKeyError, "'x.safetensors' is already encoded"),
    ("k", {"a": [object()]}, {}, tc.EncodeError, r"sample 'k': .*a.*0"),
    ("k", 0, {"a-1.tensorcache": [object()]}, tc.EncodeError, "sample 'k', cache 'a-1': "),
    ("k", 0, {"npy": np.ones(1)}, tc.EncodeError, "sample 'k': member 'npy' is a ndarray, .*; pass bytes, or encoder="),
    ("k", 0, {"cls": "\ud800"}, tc.EncodeError, "sample 'k': member 'cls' cannot be represented in UTF-8"),
    ("k", 0, {"json": {"x": object()}}, tc.EncodeError, "sample 'k': member 'json' cannot be represented in JSON"),
]


@pytest.mark.parametrize(("key", "sample", "members", "error", "message"), REFUSED, ids=[row[4] for row in REFUSED])
def test_refusals_leave_no_trace(tmp_path: Path, key: Any, sample: Any, members: Any, error: Any, message: str) -> None:
    write(tmp_path / "expected.tar", count=2, manifest=False)
    with tc.ShardWriter(tmp_path / "x.tar") as sink:
        for i in range(2):
            sink.write(f"{i:03d}", diffusion_sample(i), json={"label": i})
            with pytest.raises(error, match=message):
                sink.write(key, sample, **members)
            with pytest.raises(tc.InvalidKeyError, match=r"key '000' is already in .*x\.tar"):
                sink.write("000", torch.zeros(5))
    assert (tmp_path / "x.tar").read_bytes() == (tmp_path / "expected.tar").read_bytes()


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (lambda members: {"txt": "text"}, "the encoder returned a str for 'txt', expected bytes"),
        (lambda members: {**members, "jpg": b""}, "the encoder returned 'jpg', which was not passed to write"),
        (lambda members: {}, "the encoder returned no 'txt', expected bytes for each member"),
    ],
    ids=["no bytes", "another name", "no member"],
)
def test_bad_encoders(tmp_path: Path, encoder: Any, message: str) -> None:
    sink = tc.ShardWriter(tmp_path / "x.tar", encoder=encoder)
    with pytest.raises(tc.TensorCacheError, match=message):
        sink.write("a", 0, txt=b"x")
    sink.close()
    assert names(tmp_path) == []


def test_writev_takes_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "expected.tar", count=20)
    sizes = [torch.arange(300_000), *(torch.full((i,), i) for i in range(1200))]
    write_samples(tmp_path / "large.tar", [sizes])
    writev, rng = os.writev, np.random.default_rng(0)

    def some(fd: int, buffers: Any) -> int:
        count = int(rng.integers(1, 100_000))
        return writev(fd, [bytes(buffers[0][:count])]) if len(buffers[0]) > count else writev(fd, buffers[:3])

    monkeypatch.setattr(os, "writev", some)
    write(tmp_path / "x.tar", count=20)
    write_samples(tmp_path / "y.tar", [sizes])
    assert (tmp_path / "x.tar").read_bytes() == (tmp_path / "expected.tar").read_bytes()
    assert (tmp_path / "y.tar").read_bytes() == (tmp_path / "large.tar").read_bytes()


def test_after_a_shard_that_could_not_be_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A writer whose caller ignores the error takes no sample that it could not store, and leaves no file behind."""
    with tc.ShardWriter(tmp_path, max_samples=1) as writer:
        writer.write("a", [torch.zeros(2)])
        (tmp_path / "manifest.json").write_text("damaged")
        with pytest.raises(tc.FormatError, match="manifest"):
            writer.write("b", [torch.zeros(2)])
        with pytest.raises(ValueError, match="could not be finished"):
            writer.write("b", [torch.zeros(2)])
    del writer
    gc.collect()
    assert sorted(os.listdir(tmp_path)) == ["000000.idx", "000000.tar", "manifest.json"]
    assert not caplog.records
    (tmp_path / "manifest.json").unlink()
    with tc.ShardWriter(tmp_path, max_samples=1, resume=True) as writer:
        for key in "ab":
            writer.write(key, [torch.zeros(2)])
    assert list(tc.open(tmp_path).keys()) == ["a", "b"]


def test_a_closed_writer_writes_no_more(tmp_path: Path) -> None:
    sink = tc.ShardWriter(tmp_path / "%d.tar")
    sink.write("a", {"x": 1})
    sink.close()
    with pytest.raises(ValueError, match=r"%d.tar: the writer is closed"):
        sink.write("b", {"x": 1})
    assert [path.name for path in tmp_path.glob("*.tar")] == ["0.tar"]


def test_when_it_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = tc.ShardWriter(tmp_path / "%d.tar", fsync=False)
    for i in range(3):
        writer.write(f"{i}", {"x": torch.ones(2)})
    del writer
    gc.collect()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("wds_tensorcache", logging.WARNING)
    assert "%d.tar: the writer was not closed, so unfinished shards with 3 samples are lost" in record.message
    assert os.listdir(tmp_path) == []


INSTALL_DALI = "needs NVIDIA DALI: pip install nvidia-dali-cuda130 (runs without a GPU)"


def test_dalis_index_is_that_of_its_own_tool(tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali", reason=INSTALL_DALI)
    wds2idx = pytest.importorskip("wds2idx", reason=INSTALL_DALI)
    write(tmp_path / "x.tar")
    with wds2idx.IndexCreator(str(tmp_path / "x.tar"), str(tmp_path / "theirs"), verbose=False) as index:
        index.create_index()
    assert (tmp_path / "x.idx").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("nbytes", [1 << 20, 3 << 20], ids=["by the thread", "in place"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    full = [False]
    writev = os.writev

    def fails_once(fd: int, buffers: Any) -> int:
        if full[0]:
            full[0] = False
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(fd, buffers)

    monkeypatch.setattr(os, "writev", fails_once)
    failed = []
    sink = tc.ShardWriter(tmp_path / "%d.tar", max_samples=24)
    for i in range(48):
        full[0] = full[0] or i == 28
        try:
            sink.write(f"{i:03d}", torch.full((nbytes,), i, dtype=torch.uint8))
        except OSError as exc:  # a caller that continues all the same loses the shard
            failed.append(exc)
    with pytest.raises(OSError, match=r"1\.tar: the file could not be written: .*No space left") as closing:
        sink.close()
    assert len(failed) >= 5  # three stages of three samples are written before the caller sees a failure
    assert {exc.errno for exc in [*failed, closing.value]} == {errno.ENOSPC}
    assert {str(exc) for exc in failed} == {str(closing.value)}
    assert names(tmp_path) == ["0.idx", "0.tar", "manifest.json"]
    assert len(tc.open(tmp_path)) == 24
