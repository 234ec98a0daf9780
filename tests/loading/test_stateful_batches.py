"""`StatefulDataLoader(IterableCache(…), batch_size=4)`: a state is resumed exactly, or refused: no sample is lost."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_tensorcache as tc
from tests.loading.loaders import write_numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata looks at all of torch
]
COUNT = 7
REFUSED = "workers of the state are at steps .* batch_size=None"


@pytest.fixture
def few(tmp_path: Path) -> Iterator[Any]:
    with tc.open(write_numbers(tmp_path, range(COUNT))) as opened:
        yield opened


def begun(cache: Any, batch_size: int | None, num_workers: int, **options: Any) -> Any:
    dataset = tc.IterableCache(cache, 1, seed=5)
    return StatefulDataLoader(dataset, batch_size, num_workers=num_workers, collate_fn=list, **options)


def keys(batch: Any) -> list[str]:
    """Return the keys of a pair, or of a list of pairs."""
    pairs = batch if isinstance(batch[0], tuple) else [batch]
    return [key for _, info in pairs for key in info.keys]


def states_of(made: Any) -> list[tuple[Any, list[str]]]:
    """Return the state after every batch, and after the loop, with the keys that were given before it."""
    found, given = [], []
    for batch in made:
        given.extend(keys(batch))
        found.append((copy.deepcopy(made.state_dict()), list(given)))
    return [*found, (copy.deepcopy(made.state_dict()), given)]


# not all: starting workers takes its time, and torchdata waits for seconds for those of a state that is refused
SETTINGS = [(None, 0), (None, 2), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 1)]


@pytest.mark.parametrize(
    ("batch_size", "num_workers", "persistent"), [*((*each, False) for each in SETTINGS), (1, 2, True)]
)
def test_every_state_is_resumed_exactly_or_refused(
    few: Any, batch_size: int | None, num_workers: int, persistent: bool
) -> None:
    """Exactly if what was given is the beginning of the epoch: what a worker has given then says what the others have."""
    options = {"persistent_workers": True} if persistent else {}
    whole = [[key for _, info in loader for key in info.keys] for loader in [tc.Loader(few, 1, seed=5)] * 2]
    states = states_of(begun(few, batch_size, num_workers, **options))
    num_refused = 0
    for state, given in states:
        again = begun(few, batch_size, num_workers, **options)
        again.load_state_dict(state)
        if sorted(given) == sorted(whole[0][: len(given)]):
            epochs = [[key for batch in again for key in keys(batch)] for _ in range(2)]
            # a state of the whole epoch may begin with a loop over nothing, as the unbroken run ends in one
            rest = epochs if len(given) < COUNT or not epochs[0] else [[], epochs[0]]
            assert sorted(given + rest[0]) == sorted(whole[0])
            assert sorted(rest[1]) == sorted(whole[1])
            if batch_size in (None, 1) or num_workers < 2:
                assert given + rest[0] == whole[0]
        else:
            num_refused += 1
            with pytest.raises(ValueError, match=REFUSED):
                next(iter(again))
    is_exact = num_workers < 2 or batch_size in (None, 1)
    assert (num_refused == 0) is is_exact


def left(given: list[str], again: Any) -> list[str] | None:
    """Return what a loader with a state gives after `given`; None if the state is refused."""
    try:
        rest = [key for batch in again for key in keys(batch)]
    except ValueError as exc:
        assert "expected steps that follow each other" in str(exc)  # noqa: PT017
        return None
    # a state of the whole epoch goes on with the next one
    return rest if len(given) < len(again.dataset) else []


@pytest.mark.parametrize(("num_workers", "batch_size", "every"), [(2, None, 3), (2, 2, 2), (2, 2, 3), (3, 1, 2)])
def test_states_between_snapshots(few: Any, num_workers: int, batch_size: int | None, every: int) -> None:
    options = {"snapshot_every_n_steps": every}
    refused = []
    for state, given in states_of(begun(few, batch_size, num_workers, **options)):
        again = begun(few, batch_size, num_workers, **options)
        again.load_state_dict(state)
        rest = left(given, again)
        refused.append(rest is None)
        assert rest is None or sorted(given + rest) == sorted(few.keys())
    assert any(refused) is (batch_size == 2 and every % num_workers != 0)  # where all workers had given as many
    assert not all(refused)


def test_chains_of_resumes_with_other_batch_sizes(few: Any) -> None:
    rng = random.Random(7)
    for num_workers in (2, 3, 2, 3):
        made, given = begun(few, None, num_workers), []
        while len(given) < COUNT:
            iterator = iter(made)
            for _ in range(num_workers):  # of each worker as many
                batch = next(iterator, None)
                given += keys(batch) if batch is not None else []
                state = copy.deepcopy(made.state_dict())
            made = begun(few, rng.choice([None, 1, 2, 3]), num_workers)
            made.load_state_dict(state)
        assert sorted(given) == sorted(few.keys())


def test_fewer_samples_than_workers(tmp_path: Path) -> None:
    with tc.open(write_numbers(tmp_path, range(2))) as cache:
        for state, given in states_of(begun(cache, None, 3)):
            again = begun(cache, None, 3)
            again.load_state_dict(state)
            assert sorted(given + (left(given, again) or [])) == sorted(cache.keys())
        state, given = states_of(begun(cache, 2, 3))[0]
        again = begun(cache, 2, 3)
        again.load_state_dict(state)
        assert given == keys(next(iter(begun(cache, 2, 3))))
        assert left(given, again) is None


def test_another_epoch_that_is_set_needs_no_state(few: Any) -> None:
    """Where the workers are at does not count then."""
    state, _ = states_of(begun(few, 2, 2))[0]
    again = begun(few, 2, 2)
    again.load_state_dict(state)
    again.dataset.set_epoch(3)
    assert sorted(key for batch in again for key in keys(batch)) == sorted(few.keys())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_default_collate_takes_what_it_gives(few: Any, num_workers: int) -> None:
    dataset = tc.IterableCache(few.select(["x"]), 1, shuffle=False)
    made = StatefulDataLoader(dataset, 2, num_workers=num_workers)
    batch, infos = next(iter(made))
    assert [info.keys for info in infos] == [["000"], ["001" if num_workers == 1 else "002"]]
    assert torch.equal(batch["x"], torch.tensor([[[0] * 4], [[num_workers] * 4]]))
    assert batch["i"][0].tolist() == [0, num_workers]
