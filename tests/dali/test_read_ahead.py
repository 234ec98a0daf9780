"""Sources read ahead: the same batches in any order of requests, errors with the right batch, and no threads afterwards."""

from __future__ import annotations

import gc
import random
import signal
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dali_plugin
import wds_tensorcache as tc
from dali_plugin import TensorCacheSource
from tests.children import run_in_child, wait_until
from tests.dali.conftest import COUNT
from tests.dali.pipelines import pipeline
from tests.reading.batches import write


def request(source: Any, epoch: int, iteration: int) -> Any:
    return source(SimpleNamespace(epoch_idx=epoch, iteration=iteration))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tensorcache-dali")]


@pytest.mark.parametrize(("num_threads", "num_ahead"), [(0, 2), (1, 0), (1, 3), (3, 1), (2, 2)])
def test_any_requests(cache: Any, num_threads: int, num_ahead: int) -> None:
    """After requests in any order comes a whole epoch, whose next batches are read before they are requested."""
    options = {"num_threads": num_threads, "prefetch_batches": num_ahead, "shuffle": True}
    source = TensorCacheSource(cache, ["scalar"], batch_size=4, **options)  # type: ignore[arg-type]
    chance = random.Random(num_threads)
    requests = [(chance.randrange(3), chance.randrange(5)) for _ in range(12)]
    for epoch, iteration in [*requests, *((7, iteration) for iteration in range(5))]:
        scalars, numbers = request(source, epoch, iteration)
        assert scalars.tolist() == numbers.tolist() == source.indices(epoch, iteration).tolist()
        last = min(4, iteration + num_ahead) if num_threads else iteration
        ahead = {at: source._jobs[epoch, at].result()[0].tolist() for _, at in source._jobs}
        assert ahead == {at: source.indices(epoch, at).tolist() for at in range(iteration + 1, last + 1)}


@pytest.mark.parametrize("num_threads", [0, 2])
def test_errors_come_with_their_batch_and_again(tmp_path: Path, num_threads: int) -> None:
    samples = [{"x": torch.ones(1)} | ({"y": torch.ones(1)} if i != 13 else {}) for i in range(20)]
    with tc.open(write(tmp_path, samples)) as cache:
        choose = {"x": ["x"]}  # with alternatives, each batch is checked
        source = TensorCacheSource(cache, batch_size=2, choose=choose, prefetch_batches=4, num_threads=num_threads)
        for iteration in (*range(10), *range(10)):
            if iteration == 6:
                for _ in range(2):
                    with pytest.raises(
                        tc.BatchError, match="sample '013' has no tensor 'y', but DALI needs it .*; leave"
                    ):
                        request(source, 0, iteration)
            else:
                assert len(request(source, 0, iteration)[-1]) == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_children_begin_their_own_threads(cache: Any) -> None:
    source = TensorCacheSource(cache, ["scalar"], batch_size=2)
    assert request(source, 0, 0)[0].tolist() == [0, 1]

    def work() -> None:
        signal.alarm(30)  # a child that waits for its parent's threads would wait forever
        assert request(source, 0, 1)[0].tolist() == [2, 3]

    assert run_in_child(work) == 0
    assert request(source, 0, 1)[0].tolist() == [2, 3]


@pytest.mark.parametrize("nodes", ["tensorcache", "native_reader"])
@pytest.mark.parametrize("depth", [1, 4])
def test_reset_begins_an_epoch_only_after_the_last_batch(cache: Any, nodes: str, depth: int) -> None:
    reader = getattr(dali_plugin.fn, nodes)
    pipe = pipeline(lambda: reader(cache, tensors=["scalar"], last_batch="pad"), prefetch_queue_depth=depth)
    iterator = dali_plugin.TensorCacheIterator(pipe)
    epoch = [(0, 0), (6, 0), (12, 0), (18, 4)]  # the first sample of each batch, and how many rows are padding
    for num_taken in range(5):
        for _, batch in zip(range(num_taken), iterator, strict=False):
            assert batch["id"][0] < COUNT
        iterator.reset()
        rest = [(batch["id"][0], int(iterator.is_padding.sum())) for batch in iterator]
        assert rest == epoch[num_taken % 4 :]


@pytest.mark.parametrize("name", ["scalar", "cond.0.0", None])
def test_a_freed_pipeline_frees_its_batches(cache: Any, name: str | None) -> None:
    """Without the garbage collector: the batches of a source may take gigabytes of page-locked memory."""
    samples = [{"__key__": str(i), "tensorcache": cache[i]} for i in range(COUNT)]
    gc.collect()
    gc.disable()
    try:
        if name is None:
            made = pipeline(lambda: dali_plugin.fn.tensorcache(dali_plugin.TensorCacheStream(samples, batch_size=6)))
        else:
            made = pipeline(lambda: dali_plugin.fn.tensorcache(cache, [name]))
        iterator = dali_plugin.TensorCacheIterator(made)
        next(iterator)
        source = weakref.ref(iterator._source)
        assert name is None or cache._store.pool._leases
        del iterator, made
        wait_until(lambda: not threads(), timeout_s=10)
        assert source() is None
        assert not cache._store.pool._leases
    finally:
        gc.enable()
