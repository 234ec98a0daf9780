"""Sources read ahead: the same batches in any order of requests, errors with the right batch, and no threads afterwards."""

from __future__ import annotations

import gc
import pickle
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dali_plugin
import wds_tensorcache as tc
from dali_plugin.read_ahead import ReadAhead
from tests.children import run_in_child
from tests.dali.conftest import COUNT
from tests.dali.pipelines import dali, pipeline

LENGTH = 5


def request(source: Any, epoch: int, iteration: int) -> Any:
    return source(SimpleNamespace(epoch_idx=epoch, iteration=iteration))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tensorcache-dali")]


def wait_for_no_threads() -> None:
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


@given(
    requests=st.lists(st.tuples(st.integers(0, 2), st.integers(0, LENGTH - 1)), max_size=12),
    num_threads=st.integers(0, 3),
    num_batches=st.integers(0, 3),
)
def test_any_requests(requests: list[tuple[int, int]], num_threads: int, num_batches: int) -> None:
    """After requests in any order comes a whole epoch; nothing outside the epoch is read."""
    read: list[tuple[int, int]] = []

    def numbered(epoch: int, iteration: int) -> tuple[int, int]:
        read.append((epoch, iteration))
        return epoch, iteration

    ahead = ReadAhead(num_threads, num_batches)
    requests = requests + [(7, iteration) for iteration in range(LENGTH)]
    for epoch, iteration in requests:
        assert ahead.read(numbered, epoch, iteration, LENGTH) == (epoch, iteration)
    assert all(0 <= iteration < LENGTH for _, iteration in read)
    assert sorted(one for one in read if one[0] == 7) == requests[-LENGTH:]  # each batch once
    if not (num_threads and num_batches):
        assert read == requests


def test_the_next_batches_are_read_before_they_are_requested() -> None:
    read = []
    ahead = ReadAhead(2, 3)
    for iteration in range(2):
        ahead.read(lambda epoch, iteration: read.append(iteration), 0, iteration, 10)
        ahead.wait()
        assert sorted(read) == list(range(iteration + 4))
    ahead.read(lambda epoch, iteration: read.append(iteration), 0, 8, 10)
    ahead.wait()
    assert sorted(read) == [0, 1, 2, 3, 4, 8, 9]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_errors_come_with_their_batch_and_again(num_threads: int) -> None:
    def read(epoch: int, iteration: int) -> int:
        if iteration == 2:
            raise ValueError(f"iteration {iteration} of epoch {epoch}")
        return iteration

    ahead = ReadAhead(num_threads, 3)
    for epoch in range(2):
        assert [ahead.read(read, epoch, iteration, LENGTH) for iteration in (0, 1)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match=f"iteration 2 of epoch {epoch}"):
                ahead.read(read, epoch, 2, LENGTH)
        assert [ahead.read(read, epoch, iteration, LENGTH) for iteration in (3, 4)] == [3, 4]


def test_options(cache: Any) -> None:
    for options in ({"num_threads": -1}, {"prefetch_batches": -1}):
        with pytest.raises(ValueError, match="expected 0 or more"):
            dali_plugin.TensorCacheSource(cache, ["scalar"], batch_size=2, **options)
    source = dali_plugin.TensorCacheSource(cache, ["scalar"], batch_size=2, num_threads=0)
    assert request(source, 0, 0)[0].tolist() == [0, 1]
    copied = pickle.loads(pickle.dumps(dali_plugin.TensorCacheSource(cache, ["scalar"], batch_size=2)))
    assert request(copied, 0, 1)[0].tolist() == [2, 3]
    assert not threads()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_children_begin_their_own_threads(cache: Any) -> None:
    source = dali_plugin.TensorCacheSource(cache, ["scalar"], batch_size=2)
    assert request(source, 0, 0)[0].tolist() == [0, 1]

    def work() -> None:
        signal.alarm(30)  # a child that waits for its parent's threads would wait forever
        assert request(source, 0, 1)[0].tolist() == [2, 3]

    assert run_in_child(work) == 0
    assert request(source, 0, 1)[0].tolist() == [2, 3]


@pytest.mark.parametrize("options", [{}, {"num_threads": 0}, {"num_threads": 3, "prefetch_batches": 7}], ids=str)
def test_epochs_and_abandoned_loops(cache: Any, options: dict[str, Any]) -> None:
    def begun(**options: Any) -> Any:
        return dali_plugin.TensorCacheIterator(
            pipeline(lambda: dali_plugin.fn.tensorcache(cache, ["scalar"], shuffle=True, **options), 3)
        )

    found, expected = begun(**options), begun(num_threads=0)
    for iterator in (found, expected):
        next(iter(iterator))  # the loop is abandoned here, and continued below
    for _ in range(3):
        numbers = [batch["id"].tolist() for batch in found]
        assert numbers == [batch["id"].tolist() for batch in expected]


def test_an_error_of_a_pipeline(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "0.tar", fsync=False) as sink:
        for i in range(20):
            sink.write(f"{i:02d}", {"x": torch.ones(1)} | ({"y": torch.ones(1)} if i != 13 else {}))
    with tc.open(tmp_path) as cache:
        source = dali_plugin.TensorCacheSource(cache, batch_size=2, prefetch_batches=4)
        for iteration in range(10):
            if iteration == 6:
                with pytest.raises(tc.BatchError, match="'13'"):
                    request(source, 0, iteration)
            else:
                assert len(request(source, 0, iteration)[-1]) == 2


@pytest.mark.parametrize("name", ["scalar", "cond.0.0"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_a_pipeline_kept_is_freed_with_it(cache: Any, name: str, is_stream: bool) -> None:
    """Without the garbage collector: the batches of a source may take gigabytes of page-locked memory."""
    samples = [{"__key__": str(i), "tensorcache": cache[i]} for i in range(COUNT)]
    gc.collect()
    gc.disable()
    try:
        if is_stream:
            made = pipeline(lambda: dali_plugin.fn.tensorcache(dali_plugin.TensorCacheStream(samples, batch_size=6)))
        else:
            made = pipeline(lambda: dali_plugin.fn.tensorcache(cache, [name]))
        iterator = dali_plugin.TensorCacheIterator(made)
        next(iterator)
        source = weakref.ref(iterator._source)
        assert is_stream or cache._store.pool._leases
        del iterator, made
        wait_for_no_threads()
        assert source() is None
        assert not cache._store.pool._leases
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "names", [["scalar", "tensors.float32"], ["cond.0.0", "tensors.bfloat16"]], ids=["dense", "ragged"]
)
@pytest.mark.parametrize("layouts", [{}, {"tensors.float32": "HW", "cond.0.0": "HW"}], ids=["", "layouts"])
def test_dali_is_fed_the_objects_of_the_source(
    cache: Any, monkeypatch: pytest.MonkeyPatch, names: list[str], layouts: dict[str, str]
) -> None:
    """DALI makes new objects of arrays, and of DALI tensors if a node has a layout; the new ones are not page-locked."""
    module = sys.modules["nvidia.dali.external_source"]
    fed: list[tuple[Any, Any]] = []
    prepare = module._prep_data_for_feed_input  # type: ignore[attr-defined]

    def recorded(data: Any, *args: Any) -> Any:
        fed.append((data, prepare(data, *args)))
        return fed[-1][1]

    monkeypatch.setattr(module, "_prep_data_for_feed_input", recorded)
    layouts = {name: layout for name, layout in layouts.items() if name in names}

    def nodes() -> Any:
        return dali_plugin.fn.tensorcache(cache, names, ["bin"], layouts=layouts)

    made = pipeline(nodes)
    outputs = made.run()
    assert [output.layout() for output in outputs] == [layouts.get(name, "") for name in [*names, "bin", "number"]]
    assert fed
    for data, used in fed:
        if isinstance(data, tuple):
            assert len(data) == len(used) == 6
            assert all(one is other for one, other in zip(data, used, strict=True))
        else:
            assert isinstance(data, dali.tensors.TensorListCPU)
            assert used is data
