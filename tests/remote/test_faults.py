"""Web servers that fail: the right bytes after another attempt, or a clear error, never old bytes mixed with new ones."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.reading.batches import write
from tests.remote.conftest import wait
from tests.remote.reads import KINDS, PASS, outcomes, read_cache, read_stream, refused, write_shard
from tests.remote.servers.http_server import HttpServer, Request

RANGE = KINDS["range"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two caches whose files have equal lengths."""
    folders = [tmp_path_factory.mktemp("cache") for _ in range(2)]
    for seed, folder in enumerate(folders):
        write_shard(folder, seed)
    return folders


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """What each kind of request reads from the first and from the second cache."""
    return {name: [kind.read(str(folder)) for folder in folders] for name, kind in KINDS.items()}


@pytest.fixture
def server(module_server: HttpServer, folders: list[Path]) -> HttpServer:
    module_server.set(ranges=True, suffix_ranges=True, etag="strong", last_modified=True)
    publish(module_server, folders[0])
    module_server.log()
    return module_server


@pytest.fixture
def url(server: HttpServer) -> str:
    """The url of the first cache, at an address of this machine that no other test uses."""
    return f"{server.new_address()}/c"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit of 1.5 s."""
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "1.5")


def publish(server: HttpServer, folder: Path) -> None:
    for path in folder.iterdir():
        server.put(f"c/{path.name}", path.read_bytes())


@pytest.fixture
def extent(server: HttpServer, url: str, folders: list[Path]) -> tuple[int, int, int]:
    """The first and the last byte of the tensor, and the length of the shard, which is its tag, too."""
    server.set(etag="length")
    read_cache(url)
    first, _, last = str(server.log()[-1].range).removeprefix("bytes=").partition("-")
    return int(first), int(last), (folders[0] / "a.tar").stat().st_size


def check_drops(server: HttpServer, url: str, read: Callable[[str], Any], requests: list[Request]) -> list[Request]:
    """Drop the connections of requests at every byte of the heads and the first bytes of the bodies, and at some others.

    Returns:
        All requests.
    """
    expected = read(url)
    places = [*range(450), *range(450, 300 + max(one.nbytes for one in requests), 61)]
    faults: dict[str, list[dict[str, Any]]] = {f"{one.path[1:]}?{at}": [] for one in requests for at in places}
    for one in requests:
        for at in places:
            fault = {"drop_after": at, "reset": at % 2 == 1, "range": one.range}
            faults[f"{one.path[1:]}?{at}"].append(fault)
    server.script_all(faults)
    server.log()
    assert outcomes([lambda at=at: read(f"{url}?{at}") for at in places]) == [expected] * len(places)
    seen = server.log()
    for one in requests:
        repeated = [other for other in seen if other.path.startswith(f"{one.path}?") and other.range == one.range]
        assert len(repeated) > len(places) + 150  # each whose head was cut short
    return seen


def test_a_connection_that_drops_at_every_byte(server: HttpServer, url: str) -> None:
    read_cache(url)
    manifest, tail, _, tensor = server.log()
    seen = check_drops(server, url, read_cache, [manifest, tail, tensor])
    # continued from the byte reached, and only with the same tag
    end = str(tensor.range).partition("-")[2]
    resumed = [one for one in seen if str(one.range).endswith(f"-{end}") and one.range != tensor.range]
    assert len(resumed) > 50
    assert all("if-match" in one.headers for one in resumed)


def test_a_stream_whose_connection_drops_at_every_byte(server: HttpServer, url: str) -> None:
    read_stream(url)
    check_drops(server, url, read_stream, server.log())


def test_statuses_that_pass(server: HttpServer, url: str, expected: Any) -> None:
    statuses = [408, 429, 500, 502, 503, 504]
    cases = [(name, status) for name in KINDS for status in statuses]
    for name, status in cases:
        faults = [{"status": status}, {"status": status, "retry_after": "0"}, {"drop_after": 3}]
        server.script_all(KINDS[name].script("c", f"{name}{status}", *faults))
    calls = [lambda name=name, status=status: KINDS[name].read(f"{url}?{name}{status}") for name, status in cases]
    assert outcomes(calls) == [expected[name][0] for name, _ in cases]
    assert sum(one.status in statuses for one in server.log()) == 2 * len(cases)


def test_retry_after_is_obeyed(server: HttpServer, url: str, expected: Any) -> None:
    date = formatdate(time.time() + 2, usegmt=True)  # whole seconds, so at least one
    waits = [("seconds", {"status": 503, "retry_after": "1"}), ("date", {"status": 429, "retry_after": date})]
    for name, kind in KINDS.items():
        for query, fault in waits:
            server.script_all(kind.script("c", name + query, fault))
    begun = time.monotonic()
    calls = [
        lambda name=name, query=query: KINDS[name].read(f"{url}?{name}{query}") for name in KINDS for query, _ in waits
    ]
    assert outcomes(calls) == [expected[name][0] for name in KINDS for _ in waits]
    assert time.monotonic() - begun >= 1


@pytest.mark.usefixtures("short")
def test_faults_that_stay(server: HttpServer, url: str, extent: tuple[int, int, int]) -> None:
    faults: dict[str, tuple[dict[str, Any], int | None]] = {
        "pause": ({"status": 503, "retry_after": "1000"}, 503),
        "status": ({"status": 500, "times": -1}, 500),
        "drop": ({"drop_after": 30, "times": -1}, None),
        "stall": ({"stall_s": 100, "times": -1}, None),
        "drip": ({"drip_s": 0.1, "times": -1}, None),
    }
    cases = [(name, fault) for name in KINDS for fault in faults if (name, fault) != ("stat", "drip")]
    for name, fault in cases:
        server.script_all(KINDS[name].script("c", name + fault, faults[fault][0]))
    found = outcomes([lambda name=name, fault=fault: KINDS[name].read(f"{url}?{name}{fault}") for name, fault in cases])
    for (name, fault), error in zip(cases, found, strict=True):
        assert isinstance(error, tc.RemoteError), (name, fault, error)
        assert error.status == faults[fault][1]
        assert error.url == f"{url}/{KINDS[name].file}"
        assert str(error).startswith(f"{error.url}: ")
        if name == "range":
            assert (error.begin, error.end) == (extent[0], extent[1] + 1)


@pytest.mark.parametrize("status", [400, 401, 403, 405, 409, 451, 505, 404, 410])
def test_other_statuses_are_refused_at_once(server: HttpServer, url: str, status: int) -> None:
    for name, kind in KINDS.items():
        server.script_all(kind.script("c", name, {"status": status, "times": -1}))
        server.log()
        error = refused(FileNotFoundError if status in (404, 410) else tc.RemoteError, kind.read, f"{url}?{name}")
        assert url in str(error)
        assert getattr(error, "status", status) == status
        assert len(server.log()) <= kind.num_before + 4


@pytest.mark.parametrize(
    "shown",
    [
        "bytes {after}-{last}/{total}",
        "bytes {first}-{before}/{total}",
        "bytes {first}-{total}/{total}",
        "bytes 0-{before}/{total}",
        "bytes {last}-{first}/{total}",
        "bytes */{total}",
        "bytes {first}-{last}/999999999999999999999999999999",
        "items {first}-{last}/{total}",
        "bytes -1-{last}/{total}",
        "",
        None,
    ],
)
def test_a_wrong_content_range(server: HttpServer, url: str, extent: tuple[int, int, int], shown: str | None) -> None:
    first, last, total = extent
    text = shown and shown.format(first=first, after=first + 1, last=last, before=last - 1, total=total)
    for name in ("range", "tail", "head"):
        server.script_all(KINDS[name].script("c", name, {"content_range": text, "times": -1}))
    error = refused(tc.RemoteError, read_cache, f"{url}?range")
    assert (error.begin, error.end, error.status) == (first, last + 1, 206)
    for name in ("tail", "head"):
        assert url in str(refused((tc.RemoteError, tc.FormatError), read_cache, f"{url}?{name}"))


def test_content_range_may_omit_the_total(server: HttpServer, url: str, extent: Any, expected: Any) -> None:
    server.script_all(RANGE.script("c", "q", {"content_range": f"bytes {extent[0]}-{extent[1]}/*"}))
    assert read_cache(f"{url}?q") == expected["range"][0]
    server.script("c/manifest.json?q", {"content_range": "bytes 0-9/*"})
    assert "length" in str(refused(tc.RemoteError, read_cache, f"{url}?q"))


@pytest.mark.parametrize("nbytes", [0, 129, 131, 10**17])
def test_a_body_of_another_length(server: HttpServer, url: str, nbytes: int) -> None:
    server.script_all(RANGE.script("c", "q", {"headers": {"Content-Length": f"{nbytes}"}, "times": 2}))
    assert refused(tc.RemoteError, read_cache, f"{url}?q").status == 206


@pytest.mark.parametrize("name", ["head", "tail", "range", "whole range"])
def test_encoded_bodies_are_refused(server: HttpServer, url: str, name: str) -> None:
    server.script_all(KINDS[name].script("c", f"z{name}", {"headers": {"Content-Encoding": "gzip"}, "times": -1}))
    assert "gzip" in str(refused(tc.RemoteError, KINDS[name].read, f"{url}?z{name}"))
    assert {one.headers["accept-encoding"] for one in server.log()} == {"identity"}


@pytest.mark.parametrize("etag", ["strong", "weak", None])
def test_a_changed_object(server: HttpServer, url: str, folders: list[Path], expected: Any, etag: str | None) -> None:
    """Between two reads, and in the middle of one, after which the rest would come from the new object."""
    server.set(etag=etag)
    for name, kind in KINDS.items():
        publish(server, folders[0])
        changed = (folders[1] / kind.file).read_bytes().decode("latin-1")
        server.script(f"c/{kind.file}", *[PASS] * kind.num_before, {"drop_body_after": 1}, {"replace": changed})
        if kind.num_before or name == "stat":
            refused(tc.FormatError, kind.read, url)
        elif kind.file == "a.tar":  # all of it is read again
            assert kind.read(url) == expected[name][1]
    publish(server, folders[0])
    with tc.open(url) as cache:
        lazy = cache[0]["x"]
        shard = (folders[1] / "a.tar").read_bytes()
        # a date does not show that an object was changed within a second
        for content in (shard, shard + b"longer", shard[:2000])[etag is None :]:
            server.put("c/a.tar", content)
            for read in (lazy.load, lambda: cache[0]):
                assert "changed" in str(refused(tc.FormatError, read))


@pytest.mark.parametrize("etag", ["strong", "weak", None, "none"])
def test_conditions(server: HttpServer, url: str, expected: Any, etag: str | None) -> None:
    """A weak ETag never matches `If-Match`, so it is compared here alone."""
    server.set(etag=None if etag == "none" else etag, last_modified=etag != "none")
    assert read_cache(url) == expected["range"][0]
    tensor = server.log()[-1]
    assert ("if-match" in tensor.headers) == (etag == "strong")
    assert ("if-unmodified-since" in tensor.headers) == (etag is None)
    # a body that was cut short is read from its beginning, unless a strong ETag shows that the rest belongs to it
    server.script("c/a.tar", *[PASS] * RANGE.num_before, {"drop_body_after": 1})
    assert read_cache(url) == expected["range"][0]
    assert (server.log()[-1].range == tensor.range) == (etag != "strong")


def test_tags_without_quotes(server: HttpServer, url: str) -> None:
    server.script("c/a.tar", {"etag": "abc"})
    refused(tc.FormatError, read_cache, url)
    assert server.log()[-1].headers["if-match"] == '"abc"'


@pytest.mark.usefixtures("short")
def test_a_tag_that_is_no_longer_sent(server: HttpServer, url: str, expected: Any) -> None:
    """As by another machine behind the same name: nothing shows whose bytes these are."""
    fault = {"headers": {"ETag": None, "Last-Modified": None}}
    for query, times in (("once", 1), ("stays", -1)):
        server.script_all(RANGE.script("c", query, fault | {"times": times}))
    assert read_cache(f"{url}?once") == expected["range"][0]
    assert "now the server sends none" in str(refused(tc.RemoteError, read_cache, f"{url}?stays"))


def test_a_weak_tag_that_becomes_strong(server: HttpServer, url: str) -> None:
    """As Apache's tags do a second after a file was written."""
    server.script("c/a.tar", {"etag": 'W/"1"'}, {"etag": '"1"'}, {"etag": '"2"'})
    with tc.open(url) as cache:
        lazy = cache[0]["x"]
        with pytest.raises(tc.FormatError, match="was changed"):
            lazy.load()


HEAD = 'HTTP/1.1 206 X\r\nETag: "{total}"\r\nContent-Range: bytes {first}-{last}/{total}\r\n'


DAMAGED = [
    "nonsense",
    "HTTP/1.1 206\r\n\r\n",
    "HTTP/1.1 99 X\r\n\r\n",
    "HTTP/1.1 101 X\r\nUpgrade: websocket\r\n\r\n",
    "HTTP/1.1 206 X\r\n" + "a: b\r\n" * 1000 + "\r\n",
    "HTTP/1.1 206 X\r\na: " + "b" * 100_000 + "\r\n\r\n",
    HEAD + "no colon\r\n\r\n" + "x" * 130,
    HEAD + "Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    HEAD + "Transfer-Encoding: chunked\r\n\r\n5\r\n{bytes}\r\n0\r\n\r\n",
    HEAD + "Transfer-Encoding: chunked\r\n\r\n40\r\n" + "x" * 65 + "\r\n42\r\n" + "x" * 66 + "\r\n0\r\n\r\n",
    HEAD + "Transfer-Encoding: gzip, chunked\r\n\r\n82\r\n" + "x" * 130,
    HEAD + "\r\n{bytes}",
]


@pytest.mark.usefixtures("short")
def test_answers_that_are_damaged(server: HttpServer, url: str, extent: Any, expected: Any) -> None:
    first = bytes(expected["range"][0]["x"][:5]).decode("latin-1")
    for number, answer in enumerate(DAMAGED):
        raw = answer.format(first=extent[0], last=extent[1], total=extent[2], bytes=first)
        server.script_all(RANGE.script("c", f"stays{number}", {"raw": raw, "times": -1}))
        server.script_all(RANGE.script("c", f"once{number}", {"raw": raw}))
    numbers = range(len(DAMAGED))
    found = outcomes([lambda number=number: read_cache(f"{url}?stays{number}") for number in numbers])
    for error in found:
        assert isinstance(error, tc.RemoteError), error
    found = outcomes([lambda number=number: read_cache(f"{url}?once{number}") for number in numbers])
    for answer, sample in zip(DAMAGED, found, strict=True):
        # another attempt would be of no use after status 101
        assert isinstance(sample, tc.RemoteError) if " 101 " in answer else sample == expected["range"][0], answer


def test_interim_heads_are_skipped(server: HttpServer, url: str, extent: Any) -> None:
    interim = "HTTP/1.1 100 Continue\r\n\r\n" + "HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n" * 2
    head = HEAD.format(first=extent[0], last=extent[1], total=extent[2]) + "Content-Length: 130\r\n\r\n"
    server.script_all(RANGE.script("c", "q", {"raw": interim + head + "x" * 130}))
    assert read_cache(f"{url}?q")["x"] == [ord("x")] * 130


@pytest.mark.usefixtures("short")
def test_an_announced_length_does_not_extend_the_time_limit(server: HttpServer, url: str) -> None:
    head = "HTTP/1.1 200 X\r\nETag: {}\r\nContent-Length: 4000000\r\n\r\n"
    for query, tag in (("strong", '"1"'), ("weak", 'W/"1"')):
        server.script(f"c/manifest.json?{query}", {"raw": head.format(tag) + "x" * 10, "times": -1})
    for error in outcomes([lambda query=query: read_cache(f"{url}?{query}") for query in ("strong", "weak")]):
        assert isinstance(error, tc.RemoteError)
        assert "given up" in str(error)


def test_bodies_without_a_length(server: HttpServer, url: str, folders: list[Path], extent: Any, expected: Any) -> None:
    server.script("c/manifest.json?none", {"raw": "HTTP/1.1 200 X\r\n\r\nabc", "times": -1})
    assert "no Content-Length" in str(refused(tc.RemoteError, read_cache, f"{url}?none"))

    def chunked(content: bytes) -> str:
        chunks = "".join(f"1\r\n{chr(byte)}\r\n" for byte in content)
        return f"Transfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n"

    first, last, total = extent
    head = HEAD.format(first=first, last=last, total=total)
    raw = head + chunked((folders[0] / "a.tar").read_bytes()[first : last + 1])
    server.script_all(RANGE.script("c", "range", {"raw": raw}))
    assert read_cache(f"{url}?range") == expected["range"][0]
    raw = "HTTP/1.1 200 X\r\n" + chunked((folders[0] / "manifest.json").read_bytes())
    server.script("c/manifest.json?whole", {"raw": raw})
    assert read_cache(f"{url}?whole") == expected["range"][0]


# --- servers without ranges


def test_a_server_without_ranges(server: HttpServer, url: str, folders: list[Path], expected: Any) -> None:
    """The shard is fetched once, also if the first attempts are cut short, and when it has changed."""
    server.set(ranges=False)
    server.script("c/a.tar", {"drop_body_after": 70, "times": 3})
    with tc.open(url) as cache:
        for _ in range(2):
            assert cache[0]["x"].load().tolist() == expected["range"][0]["x"]
        assert [one.nbytes == 70 for one in server.log()[1:]] == [True] * 3 + [False]
        publish(server, folders[1])
        with tc.open(url) as changed:
            assert changed[0]["seed"] == 1
        refused(tc.FormatError, lambda: cache[0])
    assert KINDS["stat"].read(url) == expected["stat"][1]


def test_at_most_32_copies_are_kept(server: HttpServer, url: str) -> None:
    server.set(ranges=False)
    for i in [*range(34), 0]:
        assert tc.open(f"{url}/a.tar?{i}")[0]["x"].load().shape == (130,)
    assert [one.path for one in server.log()] == [f"/c/a.tar?{i}" for i in [*range(34), 0]]


def test_whole_objects_that_were_asked_for_as_ranges(server: HttpServer, url: str, expected: Any) -> None:
    """By a server that has ranges: the whole object is what was asked for."""
    server.script_all({f"c/{name}": [{"ignores_range": True}] for name in ("manifest.json", "a.tar")})
    assert read_cache(url) == expected["range"][0]
    server.script("c/a.tar", PASS, {"ignores_range": True})
    assert KINDS["whole range"].read(url) == expected["whole range"][0]
    assert [one.status for one in server.log()] == [200, 200, 206, 206, 206, 200]


def test_a_disk_without_space(server: HttpServer, url: str, tmp_path: Path, expected: Any) -> None:
    server.set(ranges=False)
    write(tmp_path / "a.tar", [{"x": torch.zeros(150_000, dtype=torch.uint8)}])
    server.put("c/large.tar", (tmp_path / "a.tar").read_bytes())

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        assert "TMPDIR" in str(refused(tc.RemoteError, tc.open, f"{url}/large.tar"))
        assert read_cache(url) == expected["range"][0]  # what fits still does

    assert run_in_child(work) == 0
    assert tc.open(f"{url}/large.tar")[0]["x"].load().sum() == 0

    def work_without_folder() -> None:
        tempfile.tempdir = str(tmp_path / "removed")
        assert "TMPDIR" in str(refused(tc.RemoteError, tc.open, f"{url}/large.tar"))

    assert run_in_child(work_without_folder) == 0


# --- warnings


def test_a_warning_while_requests_fail(server: HttpServer, url: str, tmp_path: Path, start: Any) -> None:
    """One for all requests of the process, on stderr by default, so that training does not wait in silence."""
    server.script_all(
        {f"c/manifest.json?{i}": [{"status": 503, "retry_after": "5"}, {"status": 503}] for i in range(3)}
    )
    url = url.replace("://", "://user:secret@")
    assert wait([start(open_three, url, tmp_path / "errors")]) == [0]
    (line,) = (tmp_path / "errors").read_text().splitlines()
    assert "/c/manifest.json: the server responds with status 503; trying again for up to" in line
    assert "secret" not in line


def open_three(url: str, errors: Path) -> None:
    with open(errors, "w") as sys.stderr:
        assert outcomes([lambda i=i: tc.open(f"{url}?{i}").num_shards for i in range(3)]) == [1] * 3
