"""Web servers as they are: redirects, credentials, proxies, certificates, and names of any kind."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import pickle
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.reading.batches import write
from tests.remote.caches import listing
from tests.remote.reads import SECRETS, read_cache, refused, write_shard
from tests.remote.servers.http_server import HttpServer

Servers = tuple[HttpServer, HttpServer]
BASIC = "Basic " + base64.b64encode(b"me:hunter2").decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "c"
    write_shard(folder)
    return folder


@pytest.fixture
def servers(folder: Path, module_server: HttpServer, http_server: HttpServer) -> Servers:
    """Two servers of a cache."""
    module_server.reset()
    for server in (module_server, http_server):
        server.set(folder=folder.parent)
    return module_server, http_server


def check(url: str) -> None:
    assert read_cache(url)["seed"] == 0


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects(servers: Servers, status: int) -> None:
    """The credentials of the url, and the query, do not follow to another server, not even to another port."""
    first, second = servers
    url = f"{first.url.replace('://', '://me:hunter2@')}/c/a.tar?S1GNATURE"
    addresses = [
        f"{first.url.replace(str(first.port), str(second.port))}/c/a.tar",
        f"http://localhost:{first.port}/c/a.tar?other",
        f"//127.0.0.2:{second.port}/c/a.tar",
    ]
    for address in addresses:
        first.script("c/a.tar?S1GNATURE", {"redirect": address, "status": status, "times": -1})
        check(url)
        seen = [*first.log(), *second.log()]
        came = [one for one in seen if one.status == status]
        followed = [one for one in seen if one.status != status]
        assert all("authorization" in one.headers for one in came)
        assert [one.range for one in followed] == [one.range for one in came]
        assert not any(secret in f"{one}" for secret in SECRETS for one in followed)
    # on the same server, they do
    first.script("c/a.tar?S1GNATURE", {"redirect": "/c/a.tar", "status": status, "times": -1})
    check(url)
    assert {one.headers.get("authorization") for one in first.log()} == {BASIC}


def test_responses_before_the_connection_is_closed(servers: Servers) -> None:
    """Their bodies, which nobody reads, must not disturb the next request."""
    rest = "Connection: close\r\nContent-Length: 5\r\n\r\nmoved"
    for head in ("302 Found\r\nLocation: /c/a.tar", "503 Busy"):
        servers[0].script("c/a.tar?x", {"raw": f"HTTP/1.1 {head}\r\n{rest}"})
        check(f"{servers[0].url}/c/a.tar?x")


def test_redirects_that_are_refused(servers: Servers) -> None:
    first, _ = servers
    url = f"{first.url}/c/a.tar"
    for address, words in {
        url: "circle",
        "ftp://127.0.0.1/a.tar": "not a web server",
        "file:///etc/passwd": "not a web server",
        "": "without an address",
    }.items():
        first.script("c/a.tar", {"redirect": address, "times": -1})
        error = refused(tc.RemoteError, tc.open, url)
        assert words in str(error)
        assert (error.url, error.status) == (url, 302)
    first.script_all({f"c/a.tar?{i}": [{"redirect": f"/c/a.tar?{i + 1}", "times": -1}] for i in range(7)})
    first.script("c/a.tar", {"redirect": "/c/a.tar?0"})
    first.log()
    assert "more than 5" in str(refused(tc.RemoteError, tc.open, url))
    assert len(first.log()) == 6


def test_credentials(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the url, else of the netrc file, as curl finds them; no error, repr or pickle has them."""
    first, second = servers
    (tmp_path / "netrc").write_text(f"machine {first.host} login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    check(f"{first.url}/c")
    assert {one.headers["authorization"] for one in first.log()} == {BASIC}
    (tmp_path / "netrc").write_text("this is not a netrc file")
    url = f"http://m%65:hunter2@{second.host}:{second.port}/c"
    with tc.open(url) as cache:
        lazy = cache[0]["x"]
        assert lazy.load().shape == (130,)
        assert {one.headers["authorization"] for one in second.log()} == {BASIC}
        shown = f"{cache!r}{lazy!r}{pickle.dumps(cache)!r}{pickle.dumps(lazy)!r}"
        assert not any(secret in shown for secret in SECRETS)
        second.script("c/a.tar", {"status": 401, "times": -1})
        assert refused(tc.RemoteError, lazy.load).status == 401
    second.script("c/manifest.json", {"redirect": f"{second.url.replace('://', '://me:hunter2@')}/c?S1GNATURE"})
    refused(FileNotFoundError, tc.open, url)


def test_proxies(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A web server that answers as a proxy shows what it gets."""
    proxy, _ = servers
    monkeypatch.setenv("http_proxy", f"http://me:hunter2@127.0.0.1:{proxy.port}")
    monkeypatch.setenv("no_proxy", proxy.host)
    check("http://example.invalid/c")
    seen = proxy.log()
    assert {one.path for one in seen} == {f"http://example.invalid/c/{name}" for name in ("manifest.json", "a.tar")}
    assert {one.headers["proxy-authorization"] for one in seen} == {BASIC}
    check(f"{proxy.url}/c")
    assert {one.path for one in proxy.log()} == {"/c/manifest.json", "/c/a.tar"}
    proxy.script("c/a.tar", {"status": 407, "times": -1})
    error = refused(tc.RemoteError, check, "http://example.invalid/c")
    assert (error.status, "password in http_proxy" in str(error)) == (407, True)
    monkeypatch.setenv("http_proxy", "http://me:hunter2@127.0.0.1:9")
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "0.5")
    assert "proxy" in str(refused(tc.RemoteError, check, "http://other.invalid/c"))


def test_unknown_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "0.5")
    assert "no connection" in str(refused(tc.RemoteError, tc.open, "http://me:hunter2@127.0.0.1:9/a.tar?S1GNATURE"))
    refused(tc.RemoteError, tc.open, "http://name.invalid/a.tar")
    for url in ("http://127.0.0.1:99999/a", "http://127.0.0.1:9/a\r\nHost: b"):
        refused((tc.RemoteError, ValueError), tc.open, url)
        refused((tc.RemoteError, ValueError), lambda url=url: list(tc.tarfile_to_samples()([{"url": url}])))


NAMES = ["a b", "a\r\nX-Evil: 1", "#1", "a?b", "100%", "%41", "ü/é", "a&b=c+d;e,f", "'\"<>`", "[x]", "{1..2}", "50%25"]


def test_names(servers: Servers, folder: Path) -> None:
    """A name in a manifest is any text; in a url, it is percent-encoded."""
    first, _ = servers
    content = (folder / "a.tar").read_bytes()
    for number, name in enumerate(NAMES):
        url = first.put(f"{number}/{name}.tar", content)
        first.put(f"{number}/manifest.json", listing(f"{name}.tar", nbytes=len(content), num_samples=1))
        check(f"{first.url}/{number}")
        if "{" not in name:
            check(url)
        first.delete(f"{number}/{name}.tar")
        refused(tc.MissingShardError, check, url)
    # urls that are not encoded
    first.put("a b/ü.tar?q=ä b", content)
    check(f"{first.url.replace('http://', 'HTTP://me:x@')}/a b/ü.tar?q=ä b#f")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEM file with a certificate for 127.0.0.1 that signs itself, and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    pem = serialization.Encoding.PEM
    path.write_bytes(
        certificate.public_bytes(pem)
        + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


def test_tls(servers: Servers, certificate: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain, _ = servers
    write(tmp_path / "a.tar", [{"x": torch.arange(1_000_000), "seed": 0}])
    with HttpServer(tmp_path, certificate=certificate) as server:
        url = f"{server.url}/a.tar"
        assert "not trusted: self" in str(refused(tc.RemoteError, tc.open, url))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        other = url.replace("127.0.0.1", "localhost")
        assert "not valid for 'localhost'" in str(refused(tc.RemoteError, tc.open, other))
        url = url.replace("://", "://me@")  # another client
        with tc.open(url) as cache:
            lazy = cache[0]["x"]
            server.script("a.tar", {"drop_body_after": 300_000})
            assert torch.equal(lazy.load(), torch.arange(1_000_000))
            server.script("a.tar", {"redirect": f"{plain.url}/c/a.tar", "times": -1})
            assert "not safe" in str(refused(tc.RemoteError, lazy.load))
        plain.script("c/a.tar", {"redirect": f"{server.url}/a.tar", "times": -1})
        server.script("a.tar")
        check(f"{plain.url}/c/a.tar")
