"""Manifests are read back, read by wids, and never half written; DALI's index is its own tool's, byte for byte."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from wds_tensorcache.shards.dali_index import build_dali_index, parse_dali_index
from wds_tensorcache.shards.manifest import ShardEntry, read_manifest, write_manifest
from wds_tensorcache.shards.tar import Scanner
from wds_tensorcache.storage.atomic import write_atomically

INSTALL_DALI = "needs NVIDIA DALI: pip install nvidia-dali-cuda130 (runs without a GPU)"
INSTALL_WIDS = "needs wids, which webdataset 0.2.86 has and 1.0 has not"
SHARDS = [
    ShardEntry("b-000.tar", 10, 20480),
    ShardEntry("a/é \udcff.tar", 0, 1024, "0123456789abcdef"),
    ShardEntry("s3://x/y.tar", 1 << 40, 1 << 62),
]
EXTRA = {"version": 1, "caches": {"b-000.tar": {"": 10, "é": 3}}, "none": None, "ratio": 0.5}


def scan_samples(path: str) -> list[list[tuple[str, int, int, str]]]:
    """Return what `build_dali_index` takes, by key."""
    archive = Path(path).read_bytes()
    samples: dict[str, list[tuple[str, int, int, str]]] = {}
    for name, begin, nbytes in Scanner(lambda begin, end: archive[begin:end], len(archive)):
        folder, slash, base = name.rpartition("/")
        key, _, suffix = base.partition(".")
        samples.setdefault(folder + slash + key, []).append((suffix, begin, nbytes, name))
    return list(samples.values())


# --- manifests ---


@pytest.mark.parametrize("shards", [[], SHARDS[:1], SHARDS], ids=["none", "one", "many"])
@pytest.mark.parametrize("extra", [{}, EXTRA], ids=["nothing", "extra"])
def test_read_back(tmp_path: Path, shards: list[ShardEntry], extra: dict[str, Any]) -> None:
    path = tmp_path / "manifest.json"
    write_manifest(str(path), shards, extra)
    assert read_manifest(str(path)) == (shards, extra)
    assert json.loads(path.read_text()) == {
        "__kind__": "wids-shard-index-v1",
        "wids_version": 1,
        "shardlist": [
            {"url": s.url, "nsamples": s.num_samples, "filesize": s.nbytes} | ({"index": s.digest} if s.digest else {})
            for s in shards
        ],
        "tensorcache": extra,
    }
    assert len(path.read_text().splitlines()) == 7 + max(len(shards), 1)


@given(
    st.lists(
        st.builds(
            ShardEntry,
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(
                lambda url: not url.startswith("/") and ".." not in url
            ),
            st.integers(0, 9),
            st.integers(0, 9),
            st.none() | st.from_regex("[0-9a-f]{16}", fullmatch=True),
        ),
        unique_by=lambda s: s.url,
    )
)
def test_any_urls_are_read_back(tmp_path_factory: pytest.TempPathFactory, shards: list[ShardEntry]) -> None:
    path = str(tmp_path_factory.getbasetemp() / "any.json")
    write_manifest(path, shards, {}, fsync=False)
    assert read_manifest(path) == (shards, {})


def test_wids_manifests_of_others(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    shard = {"url": "x.tar", "md5sum": "0", "nsamples": 3, "filesize": 4}
    path.write_text(json.dumps({"wids_version": 1, "name": "x", "base": "", "shardlist": [shard], "datasets": []}))
    assert read_manifest(str(path)) == ([ShardEntry("x.tar", 3, 4)], {})


def document(**changes: Any) -> str:
    shard = {"url": "x.tar", "nsamples": 3, "filesize": 4}
    return json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [shard], **changes})


def shardlist(**changes: Any) -> str:
    return document(
        shardlist=[
            {"url": "x.tar", "nsamples": 3, "filesize": 4},
            {"url": "y", "nsamples": 3, "filesize": 4, **changes},
        ]
    )


INVALID = {
    "empty": ("", "expected a manifest, but the file is not JSON: Expecting value"),
    "cut": (document()[:-3], "expected a manifest, but the file is not JSON: "),
    "deep": ("[" * 100_000, "expected a manifest, but the file is not JSON: maximum recursion depth"),
    "a number of many digits": ("9" * 100_000, "expected a manifest, but the file is not JSON: Exceeds the limit"),
    "a list": ("[]", "the manifest is a list, expected an object"),
    "another kind": (document(__kind__="x"), "__kind__ is 'x', expected 'wids-shard-index-v1'"),
    "another version": (document(wids_version=2), "wids_version is 2, expected 1"),
    "no version": ("{}", "wids_version is None, expected 1"),
    "version is a bool": (document(wids_version=True), "wids_version is True, expected 1"),
    "base": (document(base="/d"), "base is '/d', expected no value: list all shards in shardlist"),
    "datasets": (document(datasets=[{"source_url": "x.json"}]), "datasets is a list, expected no value"),
    "no shardlist": (document(shardlist=None), "shardlist is None, expected a list"),
    "deep shardlist": (document(shardlist={"a": 1}), "shardlist is a dict, expected a list"),
    "extra": (document(tensorcache=[1]), "tensorcache is a list, expected an object"),
    "shard": (document(shardlist=["x.tar"]), r"shardlist\[0\] is 'x.tar', expected an object"),
    "url is a number": (shardlist(url=1), r"shardlist\[1\]: url is 1, expected a path or a url"),
    "url is empty": (shardlist(url=""), r"shardlist\[1\]: url is '', expected a path or a url"),
    "url with NUL": (shardlist(url="a\0b"), r"shardlist\[1\]: url is 'a\\x00b', expected a path or a url"),
    "url with half a pair": (shardlist(url="\ud800"), r"shardlist\[1\]: url is '\\ud800', expected a path or a url"),
    "url twice": (shardlist(url="x.tar"), r"shardlist\[1\]: url 'x.tar' occurs twice"),
    "negative": (shardlist(nsamples=-1), r"shardlist\[1\]: nsamples is -1, expected a non-negative integer"),
    "a bool": (shardlist(nsamples=True), r"shardlist\[1\]: nsamples is True, expected a non-negative integer"),
    "a float": (shardlist(filesize=1.5), r"shardlist\[1\]: filesize is 1.5, expected a non-negative integer"),
    "no number": (shardlist(filesize=None), r"shardlist\[1\]: filesize is None, expected a non-negative integer"),
    "digest is a number": (shardlist(index=1), r"shardlist\[1\]: index is 1, expected 16 hexadecimal digits"),
    "digest is short": (shardlist(index="12"), r"shardlist\[1\]: index is '12', expected 16 hexadecimal digits"),
    "url goes up": (shardlist(url="../y"), r"lists '../y', which is outside the manifest's folder; .*tc.open"),
    "absolute url": (shardlist(url="/y"), r"lists '/y', which is outside the manifest's folder; .*tc.open"),
    "more than 63 bits": (shardlist(filesize=1 << 63), r"shardlist\[1\]: filesize is 9223372036854775808, expected"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), INVALID.values(), ids=INVALID)
def test_invalid_manifests(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(tc.FormatError, match=rf"manifest\.json: {message}"):
        read_manifest(str(path))


def test_a_manifest_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(document().encode("utf-16"))
    with pytest.raises(tc.FormatError, match=r"manifest\.json: .*the file is not JSON: 'utf-8' codec"):
        read_manifest(str(path))


@given(st.data())
def test_any_bytes_of_a_manifest_may_change(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    write_manifest(str(path), SHARDS, EXTRA, fsync=False)
    content = bytearray(path.read_bytes())
    before = bytes(content)
    at = data.draw(st.integers(0, len(content) - 1))
    content[at : at + data.draw(st.integers(0, 9))] = data.draw(
        st.binary(max_size=4) | st.sampled_from([b"[", b"{", b"-1", b'"'])
    )
    path.write_bytes(content)
    try:
        shards, extra = read_manifest(str(path))
    except tc.FormatError:
        assert content != before  # the other allowed outcome
        return
    document = json.loads(content)
    listed = [(shard["url"], shard["nsamples"], shard["filesize"]) for shard in document["shardlist"]]
    assert [(shard.url, shard.num_samples, shard.nbytes) for shard in shards] == listed
    assert extra == document.get("tensorcache", {})
    assert (document["wids_version"], document.get("base") or "", document.get("datasets") or []) == (1, "", [])
    assert len({url for url, _, _ in listed}) == len(listed)
    assert all(type(url) is str and url and "\0" not in url for url, _, _ in listed)
    assert all(type(number) is int and 0 <= number < 1 << 63 for _, *numbers in listed for number in numbers)


@pytest.mark.parametrize("extra", [{"a": object()}, {"a": float("nan")}])
def test_extra_that_is_not_json(tmp_path: Path, extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError if "nan" in str(extra) else TypeError, match="not JSON"):
        write_manifest(str(tmp_path / "manifest.json"), SHARDS, extra)
    assert not list(tmp_path.iterdir())


def test_wids_reads_it(tmp_path: Path, write_shard: Callable[..., str]) -> None:
    wids = pytest.importorskip("wids", reason=INSTALL_WIDS)
    entries = []
    for number, num_samples in enumerate((3, 4)):
        samples = [{"__key__": f"{number}{i}", "txt": f"photo {number}{i}"} for i in range(num_samples)]
        path = write_shard(samples, name=f"{number}.tar", base=True)
        entries.append(ShardEntry(os.path.basename(path), num_samples, os.path.getsize(path), "0123456789abcdef"))
    write_manifest(str(tmp_path / "manifest.json"), entries, EXTRA)
    (tmp_path / "cache").mkdir()
    dataset = wids.ShardListDataset(
        str(tmp_path / "manifest.json"), cache_dir=str(tmp_path / "cache"), transformations=[], keep=True
    )
    assert len(dataset) == 7
    assert [dataset[i][".txt"].read() for i in range(7)] == [
        f"photo {n}{i}".encode() for n, k in ((0, 3), (1, 4)) for i in range(k)
    ]


# --- DALI's index ---


def many_members(path: Path, keys: list[str]) -> str:
    with wds.TarWriter(str(path), encoder=False, mtime=0) as sink:
        for i, key in enumerate(keys):
            sink.write({"__key__": key, "skel.pyd": bytes(i), "safetensors": bytes(700 * i), "a.skel.pyd": b"x"})
    return str(path)


def test_the_lines_of_an_index() -> None:
    samples = [[("skel.pyd", 512, 3, "d/0.skel.pyd"), ("json", 1536, 0, "d/0.json")], [("txt", 2560, 1, "\udcff.txt")]]
    assert (
        build_dali_index(iter(samples))
        == b"v1.2 2\nskel.pyd 512 3 d/0.skel.pyd json 1536 0 d/0.json\ntxt 2560 1 \xff.txt\n"
    )
    assert build_dali_index([]) == b"v1.2 0\n"


@pytest.mark.parametrize("name", ["a b", "a\tb", "a\nb", "", "\n"])
def test_names_that_an_index_cannot_hold(name: str) -> None:
    for sample in ([("json", 512, 1, "0.json"), ("txt", 1536, 1, name)], [(name, 512, 1, "0.json")]):
        with pytest.raises(
            tc.InvalidKeyError, match=r"sample 1 has the members .*, which DALI's index cannot represent; expected"
        ):
            build_dali_index([[("json", 0, 0, "a")], sample])


def test_samples_without_members() -> None:
    with pytest.raises(tc.InvalidKeyError, match=r"sample 0 has the members \[\], .* expected at least one member"):
        build_dali_index([[]])


def test_the_bytes_are_those_of_wds2idx(tmp_path: Path) -> None:
    wds2idx = pytest.importorskip("wds2idx", reason=INSTALL_DALI)
    path = many_members(tmp_path / "x.tar", ["0", "d/1", "d/e/2", "x" * 80, "-3", "a_b"])
    with wds2idx.IndexCreator(path, str(tmp_path / "theirs.idx"), verbose=False) as index:
        index.create_index()
    assert build_dali_index(scan_samples(path)) == (tmp_path / "theirs.idx").read_bytes()


def test_dali_reads_with_it(tmp_path: Path, write_shard: Callable[..., str]) -> None:
    dali = pytest.importorskip("nvidia.dali", reason=INSTALL_DALI)
    path = write_shard([{"__key__": f"d/{i:03d}", "tensorcache": diffusion_sample(i)} for i in range(5)])
    (tmp_path / "x.idx").write_bytes(build_dali_index(scan_samples(path)))

    @dali.pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def pipeline() -> Any:
        return tuple(
            dali.fn.readers.webdataset(
                paths=[path],
                index_paths=[str(tmp_path / "x.idx")],
                ext=["skel.pyd", "safetensors"],
                missing_component_behavior="error",
                name="reader",
            )
        )

    pipe = pipeline()
    pipe.build()
    assert pipe.epoch_size("reader") == 5
    for i in range(5):
        assert tuple(output.at(0).tobytes() for output in pipe.run()) == tc.encode_sample(diffusion_sample(i))


# --- whole files ---


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    seen = []

    def parts() -> Iterator[bytes]:
        yield b"ne"
        seen.append(path.read_bytes())
        names = [name for name in os.listdir(tmp_path) if name != "x"]
        assert len(names) == 1
        assert names[0].startswith(".")
        assert names[0].endswith(".tmp")
        yield b"w"

    write_atomically(str(path), parts())
    assert (seen, path.read_bytes(), os.listdir(tmp_path)) == ([b"old"], b"new", ["x"])
    monkeypatch.chdir(tmp_path)
    write_atomically("x", [b"newer"])
    assert path.read_bytes() == b"newer"


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def parts() -> Iterator[bytes]:
        yield b"ne"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(str(path), parts())
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["x"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(str(tmp_path / "folder"), [b""])
    assert sorted(os.listdir(tmp_path)) == ["folder", "x"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_atomically(str(tmp_path / "nowhere" / "x"), [b""])


@pytest.mark.parametrize("fsync", [True, False])
def test_the_order_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool) -> None:
    steps: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        steps.append(
            "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else f"{os.fstat(descriptor).st_size} bytes"
        )
        sync(descriptor)

    def replaced(source: str, target: str) -> None:
        steps.append("name")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_atomically(str(tmp_path / "x"), [b"abc"] * 1000, fsync)
    assert steps == (["3000 bytes", "name", "folder"] if fsync else ["name"])


def test_others_may_read_the_file(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_atomically(str(tmp_path / "x"), [b""])
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "usual").stat().st_mode


# --- what a manifest lists ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tc.ShardWriter(tmp_path / "d" / "%d.tar", max_samples=2, fsync=False) as writer:
        for i in range(4):
            writer.write(f"{i}", diffusion_sample(i))
    (tmp_path / "d" / "sub").mkdir()
    return tmp_path / "d"


def relist(folder: Path, *urls: str) -> None:
    """List other urls, each with what the manifest said of its file."""
    document = json.loads((folder / "manifest.json").read_text())
    said = {entry["url"]: entry for entry in document["shardlist"]}
    document["shardlist"] = [{**said.get(os.path.basename(url), said["0.tar"]), "url": url} for url in urls]
    (folder / "manifest.json").write_text(json.dumps(document))


SPELLINGS = [
    "./0.tar",
    ".//0.tar",
    "soft.tar",
    "hard.tar",
    "sub/link/0.tar",
]


@pytest.mark.parametrize("url", SPELLINGS)
@pytest.mark.parametrize("is_first", [True, False])
def test_one_file_listed_under_two_names(folder: Path, url: str, is_first: bool) -> None:
    if url == "soft.tar":
        (folder / url).symlink_to("0.tar")
    if url == "hard.tar":
        (folder / url).hardlink_to(folder / "0.tar")
    (folder / "sub" / "link").symlink_to(folder)
    relist(folder, *([url, "0.tar"] if is_first else ["0.tar", url]), "1.tar")
    twice = "0.tar" if is_first else url
    for source in (folder, folder / "manifest.json", str(folder / "*.json"), [folder]):
        with pytest.raises(tc.FormatError, match=re.escape(f"manifest.json: {twice!r} is the same file as ")):
            tc.open(source)
        with pytest.raises(tc.FormatError, match="is the same file as "):
            tc.ResumablePipeline(source if isinstance(source, str) else str(folder), tc.decode())
    report = tc.verify(folder)
    found = [fault for fault in report.faults if "manifest.json lists it twice" in fault.what]
    assert [os.path.normpath(fault.shard) for fault in found] == [os.path.normpath(folder / twice)]
    assert (report.num_shards, report.num_samples, report.num_lost) == (2, 4, 0)
    relist(folder, url, "1.tar")  # once, by whatever name
    with tc.open(folder) as cache:
        assert list(cache.keys()) == ["0", "1", "2", "3"]


def test_what_the_caller_lists_twice_comes_twice(folder: Path) -> None:
    with tc.open([folder, folder / "0.tar"]) as cache:
        assert [sample["cond"][0][1]["prompt"][-1] for sample in cache] == list("012301")


UNREADABLE = {
    "http://example.org/0.tar": "is a url in a local manifest",
    "file:///0.tar": "is a url in a local manifest",
    "s3://bucket/0.tar": "is a url in a local manifest",
    "0.tar/": "'0.tar/' is not a possible path",
    "0.tar/x": "'0.tar/x' is not a possible path",
    "x" * 5000: "'x+.* is not a possible path",
    "x" * 256 + ".tar": "'x+.* is not a possible path",
    "/".join(["y" * 200] * 30): "'y+.* is not a possible path",
    "loop.tar": "'loop.tar' is not a possible path",
    "sub": "is a folder, pipe or device, expected a file",
    ".": "is a folder, pipe or device, expected a file",
    "pipe.tar": "is a folder, pipe or device, expected a file",
    "/dev/zero": "lists '/dev/zero', which is outside the manifest's folder",
    "0.tar/../1.tar": "lists '0.tar/../1.tar', which is outside the manifest's folder",
}


@pytest.mark.parametrize(("url", "message"), UNREADABLE.items(), ids=lambda value: value[:30])
def test_urls_that_are_no_files(folder: Path, url: str, message: str) -> None:
    (folder / "loop.tar").symlink_to("loop.tar")
    os.mkfifo(folder / "pipe.tar")
    relist(folder, "0.tar", url)
    for use in (lambda: tc.open(folder), lambda: tc.ResumablePipeline(str(folder), tc.decode())):
        with pytest.raises(tc.FormatError, match=f"manifest.json: .*{message}"):
            use()
    os.remove(folder / "loop.tar")
    os.remove(folder / "pipe.tar")
    report = tc.verify(folder)
    assert report.num_samples == 4
    assert any(url[:100] in str(fault) for fault in report.faults)


def test_files_that_are_not_there(folder: Path) -> None:
    for url in ("pipe:touch OWNED", "nowhere.tar", "nowhere/0.tar", "http:x.tar"):
        relist(folder, "0.tar", url)
        with pytest.raises(FileNotFoundError, match=url):
            tc.open(folder)


def test_the_longest_names(folder: Path) -> None:
    """Beside which no index can lie: its name would be longer than the file system allows."""
    for nbytes in (240, 249, 251, 252, 255):
        name = "n" * (nbytes - 4) + ".tar"
        os.link(folder / "0.tar", folder / name)
        for source in (folder / name, str(folder / "n*.tar")):
            with tc.open(source) as cache:
                assert list(cache.keys()) == ["0", "1"]
        assert tc.verify(folder / name).ok
        os.remove(folder / name)


def test_what_is_listed_by_another_spelling_is_replaced(folder: Path) -> None:
    samples = [{"__key__": f"{i}", "tensorcache": diffusion_sample(i)} for i in range(3)]
    with open(folder / "0.tar", "wb") as file, wds.TarWriter(file, encoder=tc.encoder(), mtime=0) as sink:
        for sample in samples:
            sink.write(sample)
    relist(folder, "./0.tar", "1.tar")
    tc.write_index(folder / "0.tar")
    with tc.open(folder) as cache:
        assert len(cache) == 5


@pytest.mark.parametrize("key", ["a\u2028b", "a\u00a0b", "a\x85b", "a\x1cb", "\u3000"])
def test_white_space_beyond_ascii_is_part_of_a_name(tmp_path: Path, key: str) -> None:
    samples = [[("json", 512, 2, f"{key}.json")], [("json", 1536, 2, "next.json")]]
    assert parse_dali_index(build_dali_index(samples)) == samples
    assert parse_dali_index(build_dali_index(samples), lenient=True) == samples


@pytest.mark.parametrize("table", ["caches", "fingerprints"])
@pytest.mark.parametrize("value", [None, 5, []])
def test_tables_that_are_not_objects_are_ignored_by_readers_and_refused_by_writers(
    tmp_path: Path, table: str, value: Any
) -> None:
    with tc.ShardWriter(tmp_path / "a.tar") as sink:
        sink.write("0", {"x": 1})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["tensorcache"][table] = value
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with tc.open(tmp_path) as cache:
        assert cache[0] == {"x": 1}
    assert not tc.verify(tmp_path).ok
    with pytest.raises(tc.FormatError, match="must both be objects"):
        tc.ShardWriter(tmp_path / "b.tar")
