"""Web servers as they are: redirects, credentials, proxies, certificates, and names of any kind."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import wds_tensorcache as tc
from tests.remote.reads import SECRETS, refused
from tests.remote.servers.http_server import HttpServer
from wds_tensorcache.storage.remote.clients import client_for, forget_clients
from wds_tensorcache.storage.remote.fetch import stat
from wds_tensorcache.storage.remote.remote_file import RemoteFile, read_whole
from wds_tensorcache.storage.urls import join_url, name_of, origin_of, shown, web_url

CONTENT = bytes(range(200))


@pytest.fixture
def servers() -> Iterator[tuple[HttpServer, HttpServer]]:
    """Two servers with an object."""
    forget_clients()
    with HttpServer() as first, HttpServer() as second:
        first.put("a.tar", CONTENT)
        second.put("a.tar", CONTENT)
        yield first, second


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects(servers: tuple[HttpServer, HttpServer], status: int) -> None:
    """The credentials of the url, and the query, do not follow to another server, not even to another port."""
    first, second = servers
    url = f"http://me:hunter2@127.0.0.1:{first.port}/a.tar?S1GNATURE"
    addresses = [
        f"{second.url}/a.tar",
        f"http://localhost:{first.port}/a.tar?other",
        f"//127.0.0.2:{second.port}/a.tar",
    ]
    for address in addresses:
        first.script("a.tar?S1GNATURE", {"redirect": address, "status": status, "times": -1})
        assert RemoteFile(url).read_tail(10) == CONTENT[-10:]
        came, *followed = [*first.log(), *second.log()]
        assert "authorization" in came.headers
        assert [one.range for one in followed] == ["bytes=-10"]
        assert not any(secret in f"{one}" for secret in SECRETS for one in followed)
    # on the same server, they do
    first.script("a.tar?S1GNATURE", {"redirect": "/a.tar", "status": status})
    assert RemoteFile(url).read_tail(10) == CONTENT[-10:]
    assert ["authorization" in one.headers for one in first.log()] == [True, True]


def test_a_weak_tag_that_becomes_strong(servers: tuple[HttpServer, HttpServer]) -> None:
    """As Apache's tags do a second after a file was written."""
    servers[0].script("a.tar", {"etag": 'W/"1"'}, {"etag": '"1"'}, {"etag": '"2"'})
    file = RemoteFile(f"{servers[0].url}/a.tar")
    assert file.read_tail(10) == CONTENT[-10:]
    assert bytes(file.read(0, 10)) == CONTENT[:10]
    with pytest.raises(tc.FormatError, match="was changed"):
        file.read(0, 10)


def test_responses_before_the_connection_is_closed(servers: tuple[HttpServer, HttpServer]) -> None:
    """Their bodies, which nobody reads, must not disturb the next request."""
    rest = "Connection: close\r\nContent-Length: 5\r\n\r\nmoved"
    for head in ("302 Found\r\nLocation: /a.tar", "503 Busy"):
        servers[0].script("a.tar?x", {"raw": f"HTTP/1.1 {head}\r\n{rest}"})
        assert RemoteFile(f"{servers[0].url}/a.tar?x").read_tail(10) == CONTENT[-10:]


def test_redirects_that_are_refused(servers: tuple[HttpServer, HttpServer]) -> None:
    first, _ = servers
    url = first.put("a.tar", CONTENT)
    for address, what in {
        url: "circle",
        "ftp://127.0.0.1/a.tar": "not a web server",
        "file:///etc/passwd": "not a web server",
        "": "without an address",
    }.items():
        first.script("a.tar", {"redirect": address, "times": -1})
        error = refused(tc.RemoteError, stat, url)
        assert what in str(error)
        assert (error.url, error.status) == (url, 302)
    first.script_all({f"a.tar?{i}": [{"redirect": f"/a.tar?{i + 1}", "times": -1}] for i in range(7)})
    first.script("a.tar", {"redirect": "/a.tar?0"})
    first.log()
    assert "more than 5" in str(refused(tc.RemoteError, stat, url))
    assert len(first.log()) == 6


def test_credentials(servers: tuple[HttpServer, HttpServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the url, else of the netrc file, as curl finds them; no error, repr or pickle has them."""
    first, second = servers
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    forget_clients()
    secret = "Basic " + base64.b64encode(b"me:hunter2").decode()
    file = RemoteFile(f"{first.url}/a.tar")
    assert file.read(0, 3) == CONTENT[:3]
    assert {one.headers["authorization"] for one in first.log()} == {secret}
    (tmp_path / "netrc").write_text("this is not a netrc file")
    forget_clients()
    url = f"http://m%65:hunter2@127.0.0.1:{second.port}/a.tar"
    file = RemoteFile(url)
    assert file.read(0, 3) == CONTENT[:3]
    assert {one.headers["authorization"] for one in second.log()} == {secret}
    assert not any(secret in f"{file!r}{file.url}{file.path}{pickle.dumps(file)!r}" for secret in SECRETS)
    assert repr(client_for(url)) == f"HttpClient('http://127.0.0.1:{second.port}')"
    second.script("a.tar", {"status": 401, "times": -1})
    assert refused(tc.RemoteError, file.read, 0, 3).status == 401
    assert refused(tc.RemoteError, RemoteFile(url).ask).status == 401
    second.script("a.tar", {"redirect": f"http://me:hunter2@127.0.0.1:{second.port}/a.tar?S1GNATURE", "times": -1})
    refused(tc.RemoteError, RemoteFile(url).ask)


def test_proxies(servers: tuple[HttpServer, HttpServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A web server that answers as a proxy shows what it gets."""
    proxy, _ = servers
    monkeypatch.setenv("http_proxy", f"http://me:hunter2@127.0.0.1:{proxy.port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    forget_clients()
    url = "http://example.invalid/a.tar"
    assert RemoteFile(url).read_tail(5) == CONTENT[-5:]
    (seen,) = proxy.log()
    assert seen.path == url
    assert seen.headers["proxy-authorization"].startswith("Basic ")
    direct = f"{proxy.url}/a.tar"
    assert RemoteFile(direct).read_tail(5) == CONTENT[-5:]
    assert proxy.log()[0].path == "/a.tar"
    proxy.script("a.tar", {"status": 407, "times": -1})
    assert refused(tc.RemoteError, RemoteFile(url).read_tail, 5).status == 407
    monkeypatch.setenv("http_proxy", "http://me:hunter2@127.0.0.1:9")
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "0.5")
    forget_clients()
    assert "proxy" in str(refused(tc.RemoteError, stat, url))


def test_unknown_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCACHE_REMOTE_TIMEOUT_S", "0.5")
    forget_clients()
    for url in ("http://127.0.0.1:9/a.tar?S1GNATURE", "http://me:hunter2@127.0.0.1:9/a.tar"):
        error = refused(tc.RemoteError, stat, url)
        assert "no connection" in str(error)
    for url in (
        "http://127.0.0.1:99999/a",
        "http:///a",
        "http://[::1/a",
        "http://127.0.0.1:9/a\r\nHost: b",
        "http://a\n/",
    ):
        refused(tc.RemoteError, stat, url)


NAMES = [
    "a b.tar",
    "#1.tar",
    "a?b.tar",
    "100%.tar",
    "%41.tar",
    "ü/é.tar",
    "a\r\nX-Evil: 1.tar",
    "a&b=c+d;e.tar",
    "'\"<>`.tar",
]


@pytest.mark.parametrize("name", NAMES)
def test_names(servers: tuple[HttpServer, HttpServer], name: str) -> None:
    """A name in a manifest is any text; in a url, it is percent-encoded."""
    first, _ = servers
    first.put(f"folder/{name}", CONTENT)
    url = join_url(f"{first.url}/folder", name)
    assert name_of(url) == name.rpartition("/")[2]
    assert shown(url) == url
    file = RemoteFile(url)
    assert file.read(0, 3) == CONTENT[:3]
    assert {frozenset(one.headers) & {"x-evil"} for one in first.log()} == {frozenset()}
    assert join_url("s3://bucket/folder", name) == f"s3://bucket/folder/{name}"


def test_urls_that_are_not_encoded() -> None:
    assert web_url("HTTP://me:x@Host:80/a b/ü?q=ä b#f") == "http://Host:80/a%20b/%C3%BC?q=%C3%A4%20b"
    assert web_url("http://h/%41%zz%") == "http://h/%41%25zz%25"
    assert web_url("http://h") == "http://h/"
    assert origin_of("https://Me:x@Host:1/a") == "https://host:1"
    assert origin_of("s3://Bucket/a@b") == "s3://Bucket"
    assert shown("https://me:x@h/a?sig#f") == "https://h/a?…"
    assert shown("https://h?x@y") == "https://h?…"
    for url in ("http://h/a\nb", "http://h/a\x7fb", "http:///a", "http://h:x/a"):
        with pytest.raises(ValueError):  # noqa: PT011
            web_url(url)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEM file with a certificate for 127.0.0.1 that signs itself, and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
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
        made.public_bytes(pem) + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


def test_tls(servers: tuple[HttpServer, HttpServer], certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = servers
    with HttpServer(certificate=certificate) as server:
        content = CONTENT * 5000
        url = server.put("a.tar", content)
        error = refused(tc.RemoteError, stat, url)
        assert "certificate" in str(error)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        forget_clients()
        server.script("a.tar", {"drop_body_after": 300_000, "method": "GET"})
        assert RemoteFile(url).read(1, len(content)) == content[1:]
        server.script("a.tar", {"redirect": f"{plain.url}/a.tar", "times": -1})
        assert "not safe" in str(refused(tc.RemoteError, stat, url))
        plain.script("a.tar", {"redirect": url})
        server.script("a.tar")
        assert read_whole(f"{plain.url}/a.tar", 10**7) == content
