"""Streams from a web server: the samples of local streams, resumed by one request for the first sample that is not done."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from torchdata.stateful_dataloader import StatefulDataLoader
from webdataset.gopen import gopen_schemes

import wds_tensorcache as tc
from tests.children import wait_until
from tests.integrations.test_resumable import COUNT, write_shards
from tests.reading.batches import write
from tests.remote.servers.http_server import HttpServer, Request
from tests.remote.servers.write_server import WriteServer
from tests.shards.tars import build_with_tarfile, special

# torchdata inspects all of torch
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards; a sample takes about 40 KB."""
    return write_shards(tmp_path_factory.mktemp("streams"), 10_000)


@pytest.fixture
def server(module_server: HttpServer, folder: Path) -> HttpServer:
    module_server.set(folder=folder)
    module_server.log()
    return module_server


def pattern(server: HttpServer) -> str:
    return server.url + "/{0..4}.tar"


def tar_of(count: int, nbytes: int, path: Path) -> bytes:
    """Return a shard of samples of `nbytes` random bytes each."""
    generator = random.Random(0)
    with wds.TarWriter(str(path), mtime=0) as sink:
        for i in range(count):
            sink.write({"__key__": f"{i:03d}", "bin": generator.randbytes(nbytes), "txt": str(i)})
    return path.read_bytes()


def numbers_of(item: Any) -> list[int]:
    samples = [item] if isinstance(item, dict) else item
    for sample in samples:
        if "tensorcache" in sample:
            assert torch.equal(sample["tensorcache"]["x"].load(), torch.full((10_000,), sample["tensorcache"]["i"]))
    return [int(sample["__key__"]) for sample in samples]


def take(stream: Any, count: int) -> list[list[int]]:
    taken: list[list[int]] = []
    for item in stream:
        taken.append(numbers_of(item))
        if len(taken) == count:
            break
    return taken


STAGES = {
    "samples": [tc.decode()],
    "others": [
        wds.shuffle(6),
        tc.decode(),
        wds.select(lambda sample: sample["tensorcache"]["i"] % 3 != 1),
        wds.batched(2, collation_fn=list),
    ],
}


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_resumed_at_every_item(server: HttpServer, stages: list[Any]) -> None:
    urls = pattern(server)
    whole = [numbers_of(item) for item in tc.ResumablePipeline(urls, *stages)]
    wanted = [i for i in range(COUNT) if stages is STAGES["samples"] or i % 3 != 1]
    assert sorted(i for item in whole for i in item) == wanted
    for taken in range(1, len(whole)):
        first, second = tc.ResumablePipeline(urls, *stages), tc.ResumablePipeline(urls, *stages)
        head = take(first, taken)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        tail = [numbers_of(item) for item in second]
        assert sorted(i for item in head + tail for i in item) == wanted
        if stages is STAGES["samples"]:
            assert head + tail == whole
    assert sorted(i for item in second for i in numbers_of(item)) == wanted  # the next epoch


def test_resumed_from_the_middle_of_a_shard(http_server: HttpServer, tmp_path: Path) -> None:
    """Only the bytes after the last sample are requested, but for the stat."""
    content = tar_of(24, 1 << 20, tmp_path / "a.tar")
    url = http_server.put("a.tar", content)
    first = tc.ResumablePipeline(url)
    assert take(first, 20) == [[i] for i in range(20)]
    state = json.loads(json.dumps(first.state_dict()))
    http_server.log()
    second = tc.ResumablePipeline(url)
    second.load_state_dict(state)
    assert [numbers_of(item) for item in second] == [[i] for i in range(20, 24)]
    head, *gets = http_server.log()
    assert head.range == "bytes=0-0"
    assert all("if-match" in request.headers for request in gets)
    assert sum(request.nbytes for request in gets) == len(content) - state["starts"]["0"][1] < len(content) // 5
    assert second.state_dict()["done"] == {"0": [[0, 24], 24]}
    # a state of a release that knew no starts
    older = tc.ResumablePipeline(url)
    older.load_state_dict({key: value for key, value in state.items() if key != "starts"})
    assert [numbers_of(item) for item in older] == [[i] for i in range(20, 24)]


def test_a_changed_shard_is_read_from_its_beginning(http_server: HttpServer, tmp_path: Path) -> None:
    url = http_server.put("a.tar", tar_of(4, 1000, tmp_path / "a.tar"))
    first = tc.ResumablePipeline(url)
    take(first, 2)
    state = first.state_dict()
    assert state["starts"]["0"][0] == 2
    http_server.put("a.tar", tar_of(6, 700, tmp_path / "b.tar"))
    second = tc.ResumablePipeline(url)
    second.load_state_dict(state)
    assert [numbers_of(item) for item in second] == [[2], [3], [4], [5]]
    # without tag and date, a change cannot be seen
    http_server.set(etag=None, last_modified=False)
    third = tc.ResumablePipeline(url)
    take(third, 2)
    assert third.state_dict()["starts"] == {}


def test_errors_name_the_url_and_handlers_continue(http_server: HttpServer, tmp_path: Path) -> None:
    content = tar_of(3, 1000, tmp_path / "a.tar")
    good = http_server.put("good #1.tar", content)
    bad = [http_server.put("cut.tar", content[: 3 * 512]), http_server.put("no.tar", b"no tar at all")]
    for url, error in [(f"{http_server.url}/missing.tar", FileNotFoundError), *((url, tc.FormatError) for url in bad)]:
        with pytest.raises(error, match=rf"{http_server.host}.*\.tar"):
            list(tc.ResumablePipeline(url))
    seen: list[Exception] = []
    stream = tc.ResumablePipeline(
        [bad[0], f"{http_server.url}/missing.tar", good, bad[1]],
        shuffle=False,
        handler=lambda exc: seen.append(exc) or True,
    )
    assert [sample["txt"] for sample in stream if sample["__url__"] == good] == [b"0", b"1", b"2"]
    assert [type(exc).__name__ for exc in seen] == ["TarFormatError", "FileNotFoundError", "TarFormatError"]


def test_members_that_are_not_selected_are_not_sent(server: HttpServer, folder: Path) -> None:
    with wds.TarWriter(str(folder / "large.tar"), mtime=0) as sink:
        for i in range(2):
            sink.write({"__key__": f"{i:03d}", "bin": bytes(48 << 20), "txt": str(i)})
    samples = tc.tarfile_to_samples(select_files=lambda name: name.endswith(".txt"))
    found = [sample["txt"] for sample in samples([{"url": f"{server.url}/large.tar"}])]
    assert found == [b"0", b"1"]
    # what was ahead of the reader at each of two skips
    assert sum(request.nbytes for request in server.log()) < (2 * 48 << 20) * 0.6
    (folder / "large.tar").unlink()


def test_tars_that_cannot_be_entered_in_the_middle(http_server: HttpServer, tmp_path: Path) -> None:
    content = tar_of(4, 3000, tmp_path / "a.tar")
    headers = {"path": "common.txt"}
    common = tarfile.TarInfo.create_pax_global_header(headers)  # type: ignore[attr-defined]
    for name, whole in (("a.tar.gz", gzip.compress(content)), ("g.tar", common + content)):
        url = http_server.put(name, whole)
        stream = tc.ResumablePipeline(url, handler=wds.ignore_and_continue)
        taken = take(stream, 1) if name == "a.tar.gz" else [sample["__key__"] for sample in stream]
        assert taken == ([[0]] if name == "a.tar.gz" else ["common"])
        assert stream.state_dict()["starts"] == {}
    again = tc.ResumablePipeline(f"{http_server.url}/a.tar.gz")
    stream = tc.ResumablePipeline(f"{http_server.url}/a.tar.gz")
    take(stream, 2)
    again.load_state_dict(stream.state_dict())
    assert [numbers_of(sample) for sample in again] == [[2], [3]]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_resumed_before_a_sample_with_an_extended_header(http_server: HttpServer, kind: int) -> None:
    names = [f"{'long/' * 40}{i}.txt" for i in range(3)]
    content = build_with_tarfile([special("folder", tarfile.DIRTYPE), *((name, b"abc") for name in names)], kind)
    url = http_server.put("long.tar", content)
    first, second = tc.ResumablePipeline(url), tc.ResumablePipeline(url)
    assert next(iter(first))["__key__"] == names[0][:-4]
    second.load_state_dict(first.state_dict())
    assert [sample["__key__"] for sample in second] == [name[:-4] for name in names[1:]]
    assert first.state_dict()["starts"]["0"][0] == 1


def test_offsets_in_errors_count_from_the_beginning_of_the_tar(http_server: HttpServer, tmp_path: Path) -> None:
    url = http_server.put("a.tar", tar_of(4, 3000, tmp_path / "a.tar")[:-3000])
    first, second = tc.ResumablePipeline(url), tc.ResumablePipeline(url)
    take(first, 2)
    second.load_state_dict(first.state_dict())
    with pytest.raises(tc.FormatError) as error:
        list(second)
    assert error.value.offset is not None
    assert error.value.offset > first.state_dict()["starts"]["0"][1]


def test_damaged_states(http_server: HttpServer, tmp_path: Path) -> None:
    stream = tc.ResumablePipeline(http_server.put("a.tar", tar_of(3, 10, tmp_path / "a.tar")))
    take(stream, 2)
    damaged = ({"0": [2, 512]}, {"0": [2, 511, 10_240, "t"]}, {"1": [1, 512, 10_240, "t"]}, [], {"0": None})
    for starts in damaged:
        with pytest.raises(ValueError, match="damaged"):
            stream.load_state_dict({**stream.state_dict(), "starts": starts})


def test_credentials_are_in_no_sample_pickle_or_error(http_server: HttpServer, tmp_path: Path) -> None:
    http_server.put("a.tar", tar_of(2, 10, tmp_path / "a.tar"))
    base = http_server.url.replace("://", "://user:secret@")
    stream = tc.ResumablePipeline(f"{base}/a.tar")
    samples = [*stream, *tc.tarfile_to_samples()([{"url": f"{base}/a.tar"}])]
    assert len(samples) == 4
    requests = http_server.log()
    assert all("authorization" in request.headers for request in requests)
    with pytest.raises(FileNotFoundError) as error:
        list(tc.tarfile_to_samples()([{"url": f"{base}/b.tar?signature=secret"}]))
    for text in (str(samples), str(error.value), str(stream.state_dict()), str(pickle.dumps(stream))):
        assert "secret" not in text


def test_workers_get_the_secret_parts_and_resume(server: HttpServer) -> None:
    urls = f"{pattern(server).replace('://', '://user:secret@')}?signature=secret"

    def loader() -> Any:
        stream = tc.ResumablePipeline(urls, tc.decode(lazy=False))
        return StatefulDataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="forkserver")

    first, second = loader(), loader()
    taken = [int(sample["__key__"]) for _, sample in zip(range(7), first, strict=False)]
    second.load_state_dict(first.state_dict())
    del first
    assert sorted(taken + [int(sample["__key__"]) for sample in second]) == list(range(COUNT))
    requests = server.log()
    assert requests
    assert all("authorization" in request.headers and "signature" in request.path for request in requests)


def test_folders_manifests_and_patterns(write_server: WriteServer, http_server: HttpServer, tmp_path: Path) -> None:
    samples = [{"x": torch.full((10_000,), i), "i": i} for i in range(6)]
    write(tmp_path / "cache" / "%02d.tar", samples, max_samples=2)
    for path in (tmp_path / "cache").iterdir():
        write_server.put(f"a cache #1/{path.name}", path.read_bytes())
        http_server.put(f"a cache/{path.name}", path.read_bytes())
    of_s3 = "s3://bucket/a cache #1"
    of_web = f"{http_server.url}/a%20cache"
    names = ("", "/", "/manifest.json", "/0*.tar", "/0[0-2].tar", "/{00..02}.tar")
    for url in [*(of_s3 + name for name in names), of_web + "/", of_web + "/manifest.json", of_web + "/{00..02}.tar"]:
        stream = tc.ResumablePipeline(url, tc.decode(), shuffle=False)
        assert [numbers_of(sample) for sample in stream] == [[0], [1], [2], [3], [4], [5]], url
    first, second = (tc.ResumablePipeline(of_s3, tc.decode(), shuffle=False) for _ in range(2))
    assert take(first, 4) == [[0], [1], [2], [3]]
    second.load_state_dict(first.state_dict())
    assert [numbers_of(sample) for sample in second] == [[4], [5]]
    with pytest.raises(FileNotFoundError, match=r"nothing/"):
        tc.ResumablePipeline(f"{http_server.url}/nothing/")


def test_a_signature_may_change(http_server: HttpServer, tmp_path: Path) -> None:
    url = http_server.put("a.tar", tar_of(3, 10, tmp_path / "a.tar"))
    first, second = tc.ResumablePipeline(f"{url}?signature=1"), tc.ResumablePipeline(f"{url}?signature=2")
    take(first, 1)
    second.load_state_dict(first.state_dict())
    assert len(list(second)) == 2
    two = [f"{url}?shard=1", f"{url}?shard=2"]
    with pytest.raises(ValueError, match="different stream"):
        tc.ResumablePipeline(two[::-1]).load_state_dict(tc.ResumablePipeline(two).state_dict())


def test_webdatasets_own_settings_take_precedence(
    server: HttpServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def opener(url: str, *_: Any, **__: Any) -> Any:
        opened.append(url)
        return open(folder / "0.tar", "rb")

    with monkeypatch.context() as patch:
        patch.setitem(gopen_schemes, "s3", opener)
        assert len(list(tc.ResumablePipeline("s3://bucket/0.tar"))) == 5
    assert opened == ["s3://bucket/0.tar"]
    monkeypatch.setenv("GOPEN_REWRITE", f"{server.url}={folder}")
    assert len(list(tc.ResumablePipeline(f"{server.url}/0.tar"))) == 5
    assert server.log() == []


def test_closing_ends_the_requests(http_server: HttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "3600")
    url = http_server.put("a.tar", tar_of(24, 1 << 20, tmp_path / "a.tar"))
    samples = iter(tc.tarfile_to_samples()([{"url": url}]))
    next(samples)
    requests = http_server.log()

    def nbytes_of(request: Request) -> int:
        first, last = map(int, (request.range or "").removeprefix("bytes=").split("-"))
        return last - first + 1

    def new_requests() -> list[Request]:
        requests.extend(http_server.log())
        return requests

    # all that is read ahead of the first sample has been requested: the server stalls only later requests
    wait_until(lambda: sum(map(nbytes_of, new_requests())) > 15 << 20)
    http_server.script("a.tar", {"stall_s": 600, "times": -1})
    next(samples)  # needs one more request, but not its answer
    requests.clear()
    wait_until(lambda: any(one.status == 0 for one in new_requests()))
    samples.close()  # type: ignore[attr-defined]
    wait_until(lambda: any(one.status == -1 for one in new_requests()))
