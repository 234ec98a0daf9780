"""Object stores in processes that were forked after obstore was used: another process reads for them."""

from __future__ import annotations

import os
import random
import signal
import subprocess

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.remote.servers.s3 import S3Server
from wds_tensorcache.storage.remote.client import ObjectInfo
from wds_tensorcache.storage.remote.clients import client_for
from wds_tensorcache.storage.remote.fetch import fetch_many
from wds_tensorcache.storage.remote.forked import client as forked
from wds_tensorcache.storage.remote.remote_file import RemoteFile

CONTENT = random.Random(5).randbytes(300_000)


def helper() -> int:
    """Return the id of the process that runs obstore for this one."""
    assert forked._process is not None
    return forked._process._popen.pid


def test_reads(s3_server: S3Server) -> None:
    url = s3_server.put("bucket", "cache/a b#?.tar", CONTENT)
    state = client_for(url).stat(url)
    file = RemoteFile(url)
    assert file.read(0, 10) == CONTENT[:10]

    def work() -> None:
        client = client_for(url)
        assert repr(client) == "ForkedClient('s3://bucket')"
        assert client.stat(url) == state
        assert client.read_tail(url, 1000) == (state, CONTENT[-1000:])
        assert client.read_whole(url, len(CONTENT)) == (state, CONTENT)
        assert list(client.list_objects("s3://bucket/cache")) == [(url, state)]
        buffers = [[memoryview(bytearray(nbytes)) for nbytes in (7, 0, 900)] for _ in range(100)]
        fetch_many([(file, 2900 * i, buffers[i]) for i in range(100)])
        for i, buffer in enumerate(buffers):
            assert b"".join(buffer) == CONTENT[2900 * i : 2900 * i + 907]
        fetch_many([(file, 0, [buffers[i][2]]) for i in range(100)])  # each in its own request
        assert all(buffer[2] == CONTENT[:900] for buffer in buffers)

    def killed() -> None:
        file.read(0, 10)
        os.kill(helper(), signal.SIGKILL)
        assert file.read(5, 50) == CONTENT[5:50]

    def grandchild() -> None:
        file.read(0, 10)
        assert run_in_child(work) == 0
        assert file.read(5, 50) == CONTENT[5:50]

    assert [run_in_child(one) for one in (work, killed, grandchild)] == [0, 0, 0]
    assert file.read(5, 50) == CONTENT[5:50]
    assert repr(client_for(url)) == "StoreClient('s3://bucket')"


def test_errors(s3_server: S3Server) -> None:
    url = s3_server.put("bucket", "a.tar", CONTENT)
    file = RemoteFile(url)
    file.ask()
    missing = RemoteFile("s3://bucket/none", 10, None)
    s3_server.put("bucket", "a.tar", CONTENT[::-1])

    def work() -> None:
        with pytest.raises(tc.FormatError, match="a.tar: the shard was changed"):
            file.read(0, 10)
        with pytest.raises(FileNotFoundError) as gone:
            client_for(url).stat("s3://bucket/none")
        assert gone.value.filename == "s3://bucket/none"
        with pytest.raises(tc.MissingShardError):
            missing.read(0, 3)
        with pytest.raises(tc.RemoteError, match=r"s3://bucket/a//b: bytes \[3, 5\): ") as caught:
            client_for(url).read_into("s3://bucket/a//b", [memoryview(bytearray(2))], 3, ObjectInfo(9, None))
        assert (caught.value.url, caught.value.begin, caught.value.end) == ("s3://bucket/a//b", 3, 5)
        os.environ["AWS_SECRET_ACCESS_KEY"] = "hunter2"
        os.kill(helper(), signal.SIGKILL)
        with pytest.raises(tc.RemoteError) as caught:
            client_for(url).read_whole(url, 10)
        assert "hunter2" not in str(caught.value)

    assert run_in_child(work) == 0


def test_the_other_process_ends_with_the_forked_one(s3_server: S3Server) -> None:
    url = s3_server.put("bucket", "a.tar", CONTENT)
    file = RemoteFile(url)
    read, write = os.pipe()

    def work() -> None:
        file.read(0, 10)
        os.write(write, b"%d" % helper())
        os.kill(os.getpid(), signal.SIGKILL)

    assert run_in_child(work) == -signal.SIGKILL
    pid = int(os.read(read, 100))
    os.close(read)
    os.close(write)
    subprocess.run(
        [
            "sh",
            "-c",
            f"while kill -0 {pid} 2>/dev/null && ! grep -q 'State:.Z' /proc/{pid}/status; do sleep 0.05; done",
        ],
        timeout=60,
    )


class Bytes(Dataset[torch.Tensor]):
    """Ranges of an object."""

    def __init__(self, url: str) -> None:
        self.file = RemoteFile(url)
        self.file.read(0, 1)

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.file.read(100 * index, 100 * index + 100)), dtype=torch.uint8)


def test_workers_of_torch(s3_server: S3Server) -> None:
    dataset = Bytes(s3_server.put("bucket", "a.tar", CONTENT))
    loader = DataLoader(dataset, 5, num_workers=2, multiprocessing_context="fork")
    assert torch.cat(list(loader)).numpy().tobytes() == CONTENT[:3000]
