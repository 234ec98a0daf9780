"""An S3 server (moto's) in its own process, and the environment variables with which obstore finds it.

    with S3Server() as server:
        os.environ.update(server.environment)
        server.put("bucket", "cache/a.tar", content)
        tc.open("s3://bucket/cache/a.tar")

Do not measure its speed: a request takes several milliseconds of one core.
"""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from urllib.parse import quote

from tests.remote.servers.process import ServerProcess

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"
_SCRIPT = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class S3Server(ServerProcess):
    """An S3 server on 127.0.0.1 in its own process, without objects at first.

    Attributes:
        url: For example `http://127.0.0.1:40000`.
        environment: Variables with which obstore reads from this server.
    """

    def __init__(self) -> None:
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        super().__init__(["-c", _SCRIPT], keys, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = environment(self.url)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._buckets: set[str] = set()

    def put(self, bucket: str, key: str, content: bytes) -> str:
        """Make or replace an object, and the bucket if needed; return the object's url."""
        self.make_bucket(bucket)
        self._call("PUT", f"/{bucket}/{quote(key)}", content)
        return f"s3://{bucket}/{key}"

    def make_bucket(self, bucket: str) -> None:
        """Make a bucket if it does not exist."""
        if bucket not in self._buckets:
            self._call("PUT", f"/{bucket}")
            self._buckets.add(bucket)

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object."""
        self._call("DELETE", f"/{bucket}/{quote(key)}")

    def get(self, bucket: str, key: str) -> bytes | None:
        """Return an object's content; None if it does not exist."""
        try:
            return self._call("GET", f"/{bucket}/{quote(key)}")
        except urllib.error.HTTPError as exc:
            if exc.code != 404:
                raise
            exc.close()
            return None

    def reset(self) -> None:
        """Remove all buckets and objects."""
        self._call("POST", "/moto-api/reset")
        self._buckets.clear()

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        signature = f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20240101/us-east-1/s3/aws4_request"
        headers = {"Authorization": signature, "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(self.url + path, body, headers, method=method)
        with self._opener.open(request, timeout=60) as response:
            return bytes(response.read())


def environment(endpoint: str) -> dict[str, str]:
    """Return the variables with which obstore reads from an S3 server, or from a proxy of one."""
    return {
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }
