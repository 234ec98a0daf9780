"""The benchmark prints the times that it measured, and checks the values that each row reads."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from benchmarks.calls import acts, traced
from benchmarks.ceiling import Ranges
from benchmarks.children.http_server import Server
from benchmarks.peers.base import as_array, as_tensor
from benchmarks.report import spread
from benchmarks.scenarios.gpu import AHEAD, CACHED_COPY, DALI_NATIVE, DALI_NODES, PINNED_COPY
from benchmarks.scenarios.remote import ALL_BYTES, CACHED, CURLS, EPOCH, LOCAL, ONE, STREAM, moved
from benchmarks.summary import tables
from benchmarks.timing import Variant, interleaved
from benchmarks.workloads import WORKLOADS


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("one", [False, True], ids=["all tensors", "one tensor"])
def test_the_ceiling_reads_the_tensors(tmp_path: Path, name: str, one: bool) -> None:
    workload = WORKLOADS[name]
    samples = [workload.sample(index) for index in range(4)]
    with tc.ShardWriter(tmp_path / "%06d.tar", max_samples=3) as writer:
        for index, sample in enumerate(samples):
            writer.write(f"{index:08d}", sample)
    with Ranges(tmp_path, 2, workload.one[1] if one else None) as ranges:
        ranges.check([3, 0, 2, 1], samples)
        assert ranges.read([3, 0, 2])() == 3
        with pytest.raises(AssertionError, match="sample 2"):
            ranges.check([0, 2], [samples[0], samples[1], samples[3], samples[2]])


def test_bf16_keeps_its_size_in_formats_that_lack_it() -> None:
    tensor = torch.randn(3, 4).bfloat16()
    stored = as_array(tensor)
    assert stored.nbytes == tensor.nbytes
    assert torch.equal(as_tensor(stored, torch.bfloat16), tensor)


def test_rounds_run_in_different_orders() -> None:
    ran: list[str] = []

    def variant(name: str) -> Variant:
        return Variant(lambda: ran.append(name) or 1, 1)

    rounds = interleaved({name: variant(name) for name in "abcd"}, 5)
    assert {name: len(times) for name, times in rounds.items()} == dict.fromkeys("abcd", 5)
    orders = [tuple(ran[begin : begin + 4]) for begin in range(0, len(ran), 4)]
    assert len(orders) == 6  # the first one warms up
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len(set(orders)) > 2


def test_the_table_of_the_docs() -> None:
    batches = {
        "ceiling": [10.0, 12.0, 11.0],
        "tensorcache": [20.0, 21.0, 22.0],
        "tensorcache, small values read": [35.0, 30.0, 31.0],
        "tensordict, tuned": [25.0, 28.0, 40.0],
        "DALI, raw members": [5.0, 5.0, 5.0],
    }
    stored = {"ceiling": 449_024.0, "tensorcache": 451_194.0}
    content = {
        "us_per_sample": {"diffusion": {"batch_random": batches}},
        "stored_bytes_per_sample": {"diffusion": stored},
    }
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables(content).splitlines() if line]
    head = lines[0]
    found = {line[0]: line for line in lines if len(line) == len(head)}
    column, size = head.index("random batch of 32"), head.index("store, KB")
    assert found["tensorcache"][column] == "31.0 (30.0..35.0)"  # with the small values, as peers decode them
    assert found["*tensorcache, small values not decoded*"][column] == "21.0 (20.0..22.0)"
    assert found["tensordict, tuned"][column] == "**28.0** (25.0..40.0)"  # the fastest that decodes everything
    assert found["*DALI's reader, bytes not decoded*"][column] == "5.00 (5.00..5.00)"
    assert found["tensorcache"][size] == "451"
    assert spread([7.0]) == "7.00"


def test_calls_are_counted_until_the_first_read_of_a_batch(tmp_path: Path) -> None:
    with acts(tmp_path) as found:
        read, get = traced(found["read_batch"]), traced(found["get"])
    assert read.before is not None
    assert read.before <= read.calls
    assert next(iter(read.functions())).split()[:3] == ["1", "1", "Cache.read_batch"]
    assert get.before is None
    assert get.cells()[3:] == ["-", "-"]


def test_the_way_of_a_batch_is_short(tmp_path: Path) -> None:
    with acts(tmp_path) as found:
        trace = traced(found["read_batch"])
    assert trace.before is not None
    assert trace.calls.total() <= 150
    assert len(trace.before) <= 20


@pytest.mark.long
def test_the_script_for_gpus_runs_without_one(tmp_path: Path) -> None:
    """Its tests are collected and skipped, and a few batches of its benchmarks run and are checked on the CPU."""
    pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI: pip install nvidia-dali-cuda130 (runs without a GPU)")
    script = Path(__file__).parent.parent / "benchmarks" / "gpu.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    found = subprocess.run([script, "--dry", tmp_path], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr
    for module in (
        "codec/test_gpu",
        "dali/test_gpu",
        "reading/test_batch_gpu",
        "training/test_loader_gpu",
        "training/test_transforms_gpu",
        "writing/test_gpu",
    ):
        assert f"tests/{module}.py" in found.stdout
    for row in (PINNED_COPY, CACHED_COPY, DALI_NODES, DALI_NATIVE, AHEAD):
        assert f"| {row} |" in found.stdout
    assert "Missing: none." in found.stdout


@pytest.mark.long
def test_the_remote_scenario_runs(tmp_path: Path) -> None:
    """Its rows compare what they read with what was written; the figures of so few samples mean nothing."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl: apt install curl")
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--quick",
        "--no-peers",
        "--workload",
        "diffusion",
        "--scenario",
        "remote",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [*command, "--out", tmp_path], capture_output=True, text=True, env=environment, cwd=root, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for row in (ONE, moved(ONE), ALL_BYTES, CURLS, EPOCH, STREAM, CACHED, LOCAL):
        assert f"| {row} |" in done.stdout
    assert "Missing: none." in done.stdout


def test_the_server_of_the_remote_scenario(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(300_000)
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "x.bin").write_bytes(content)
    (tmp_path.parent / "outside.bin").write_bytes(b"secret")
    with Server(tmp_path) as server:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        url = f"{server.url}/a%20b/x.bin"
        for asked, expected in (
            (None, content),
            ("bytes=5-9", content[5:10]),
            ("bytes=-70000", content[-70_000:]),
            ("bytes=299990-400000", content[-10:]),
        ):
            with opener.open(urllib.request.Request(url, headers={"Range": asked} if asked else {})) as response:
                assert response.read() == expected
                assert response.status == (206 if asked else 200)
        assert server.sent() == len(content) + 5 + 70_000 + 10
        assert server.sent() == 0
        for missing in ("/none", "/../outside.bin", "/%2e%2e/outside.bin"):
            with pytest.raises(urllib.error.HTTPError) as error:
                opener.open(server.url + missing)
            assert error.value.code == 404
            error.value.close()
