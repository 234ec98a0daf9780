"""Which epoch workers begin, also where they come in an order that is hardly ever seen, and from several processes at once."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import pickle
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from wds_tensorcache.integrations.webdataset_epochs import EpochLog


class Info(NamedTuple):
    """What torch's `WorkerInfo` says of a worker of an iteration."""

    seed: int
    id: int
    num_workers: int = 2


def worker(iteration: int, number: int) -> Info:
    return Info(1000 * iteration + number, number)


def test_workers_that_are_late() -> None:
    """Workers of an iteration that was left begin while those of the next one do, in every order."""
    begin = [worker(iteration, number) for iteration in (1, 2) for number in (0, 1)]
    for order in itertools.permutations(begin):
        log = EpochLog()
        epochs = {info: log.begin(info, 1) for info in order}
        first, second = ({epochs[worker(iteration, number)] for number in (0, 1)} for iteration in (1, 2))
        assert sorted([*first, *second]) == [0, 1]
        assert log.epoch_of_workers() is not None


def test_iterations_that_torch_seeds_alike() -> None:
    log = EpochLog()
    for epoch in range(5):
        assert [log.begin(worker(1, number), 1) for number in (epoch % 2, 1 - epoch % 2)] == [epoch, epoch]


def test_workers_that_live_on() -> None:
    log = EpochLog()
    for turn in range(1, 6):
        assert {log.begin(worker(1, number), turn) for number in (0, 1)} == {turn - 1}


def test_the_main_process_between_workers() -> None:
    log = EpochLog()
    assert log.epoch_of_workers() is None
    log.put(4)
    assert log.begin(worker(1, 0), 1) == 5
    assert log.epoch_of_workers() == 5
    log.put(1)
    assert log.epoch_of_workers() is None
    assert {log.begin(worker(2, number), 1, 7) for number in (0, 1)} == {7}  # of a state
    assert log.begin(worker(3, 0), 1) == 8


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda log: pickle.loads(pickle.dumps(log))])
def test_copies_are_independent(copied: Any) -> None:
    log = EpochLog()
    log.put(3)
    other = copied(log)
    log.put(8)
    assert other.begin(worker(1, 0), 1) == 4


def begin_all(log: EpochLog, number: int, seed: int, results: Any) -> None:
    chance = random.Random(seed)
    found = []
    for iteration in range(20):
        for _ in range(chance.randrange(2000)):
            pass
        found.append(log.begin(worker(iteration + 1, number), 1))
    results.put((number, found))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_processes_at_once(context: Any) -> None:
    """Each iteration has one epoch, whichever worker comes first; none is left out."""
    log, started = EpochLog(), multiprocessing.get_context(context)
    results = started.Queue()
    running = [started.Process(target=begin_all, args=(log, number, number, results)) for number in range(2)]
    for each in running:
        each.start()
    found = dict(results.get(timeout=120) for _ in running)
    for each in running:
        each.join(60)
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(20))


def test_the_file_goes_with_the_log() -> None:
    log = EpochLog()
    path = Path(log._path)
    child = os.fork()
    if child == 0:
        del log
        os._exit(not path.exists())
    assert os.waitpid(child, 0)[1] == 0
    assert path.exists()
    del log
    assert not path.exists()
