"""torchdata's `StatefulDataLoader` over a `StepSampler` and its `StepDataset`: resumed anywhere, and through epochs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_tensorcache as tc
from tests.training.loaders import modes, only_numbers, write_numbers

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata looks at all of torch
]
KINDS = [(0, False), (1, False), (2, False), (3, True)]


def begun(
    options: dict[str, Any], num_workers: int, persistent: bool = False, collate: Any = only_numbers, **others: Any
) -> Any:
    sampler = tc.StepSampler(**({"batch_size": 5} | options))
    return StatefulDataLoader(
        tc.StepDataset(sampler, collate=collate, with_info=True),
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        persistent_workers=persistent and num_workers > 0,
        **others,
    )


def infos(made: Any) -> list[tuple[int, int, list[str]]]:
    return [(info.epoch, info.step, info.keys) for _, info in made]


def expected(options: dict[str, Any], count: int) -> list[list[tuple[int, int, list[str]]]]:
    loader = tc.Loader(**({"batch_size": 5, "collate": "list"} | options))
    return [infos(loader.with_info()) for _ in range(count)]


def states_of(made: Any) -> list[tuple[int, Any]]:
    """Return the state after each batch of an epoch, and after the loop, with the number of batches given."""
    found = [(number, copy.deepcopy(made.state_dict())) for number, _ in enumerate(made, 1)]
    return [*found, (len(made), copy.deepcopy(made.state_dict()))]


@pytest.mark.parametrize(("num_workers", "persistent"), KINDS)
@pytest.mark.parametrize("mode", ["all", "mix"])
def test_resumed_at_every_step(cache: Any, more: Any, mode: str, num_workers: int, persistent: bool) -> None:
    """Also after the last batch, and after the loop; another epoch follows."""
    options = modes(cache, more)[mode]
    whole = expected(options, 4)
    made = begun(options, num_workers, persistent)
    infos(made)
    states = states_of(made)
    # starting workers takes its time
    for taken, state in states if num_workers == 0 else states[::2] + states[-2:]:
        again = begun(options, num_workers, persistent)
        again.load_state_dict(pickle.loads(pickle.dumps(state)))
        found = [infos(again) for _ in range(2)]
        rest = whole[1][taken:]
        # after the loop, the next one is the next epoch's
        assert found in ([rest, whole[2]], whole[2:4] if taken == len(made) else None)
        assert (found[0] == rest) is (state is not states[-1][1])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_other_snapshots_are_refused(cache: Any, num_workers: int) -> None:
    """torchdata skips the batches after a snapshot by their number; of another size, samples would be lost silently."""
    made = begun({"cache": cache, "batch_size": 2}, num_workers, snapshot_every_n_steps=3)
    with pytest.raises(ValueError, match="only with snapshot_every_n_steps=1"):
        infos(made)


def test_states_before_the_first_batch(cache: Any) -> None:
    options = modes(cache, cache)["all"]
    whole = expected(options, 2)
    for num_workers in (0, 2):
        made = begun(options, num_workers)
        state = copy.deepcopy(made.state_dict())
        assert infos(made) == whole[0]
        again = begun(options, num_workers)
        again.load_state_dict(state)
        assert [infos(again), infos(again)] == whole


def test_states_that_are_taken_now_and_then_in_one_process(cache: Any) -> None:
    """These are exact at any batch size: nothing is read ahead, and nothing left out."""
    made = begun({"cache": cache, "batch_size": 2}, 0)
    seen: list[str] = []
    for number, (_, info) in enumerate(made, 1):
        seen += info.keys
        if number in (3, 7):
            again = begun({"cache": cache, "batch_size": 3}, 0)
            again.load_state_dict(copy.deepcopy(made.state_dict()))
            assert sorted(seen + [key for _, info in again for key in info.keys]) == sorted(cache.keys())


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("at_end", [False, True])
def test_epochs_that_are_set(cache: Any, num_workers: int, persistent: bool, at_end: bool) -> None:
    """As training loops do, also when they resume: the state's epoch continues; another one begins if it is set."""
    options = {"cache": cache, "shuffle": True}
    whole = expected(options, 5)
    made = begun(options, num_workers, persistent)
    for epoch in range(2):
        made.sampler.set_epoch(epoch)
        for number, _ in enumerate(made, 1):
            if (epoch, number) == (1, 2):
                state = copy.deepcopy(made.state_dict())
                break
        if epoch == 0 and at_end:
            state = copy.deepcopy(made.state_dict())
            break
    again = begun(options, num_workers, persistent)
    again.load_state_dict(state)
    found = []
    for epoch in range(1, 4):
        again.sampler.set_epoch(epoch)
        found.append(infos(again))
    assert found == [whole[1][0 if at_end else 2 :], *whole[2:4]]
    other = begun(options, num_workers, persistent)
    other.load_state_dict(state)
    other.sampler.set_epoch(4)
    assert [row[2] for row in infos(other)] == [row[2] for row in whole[4]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_that_were_left(cache: Any, num_workers: int) -> None:
    whole = expected({"cache": cache, "shuffle": True}, 4)
    made = begun({"cache": cache, "shuffle": True}, num_workers)
    for epoch in (0, 2):
        _, info = next(iter(made))
        assert info.keys == whole[epoch][0][2]
        assert [row[2] for row in infos(made)] == [row[2] for row in whole[epoch + 1]]


def test_fewer_steps_than_workers(tmp_path: Any) -> None:
    with tc.open(write_numbers(tmp_path, range(2))) as cache:
        options = {"cache": cache, "batch_size": 1}
        for taken, state in states_of(begun(options, 3)):
            again = begun(options, 3)
            again.load_state_dict(state)
            first = infos(again)
            assert len(first) == 2 - taken or (taken == 2 and len(first) == 2)
            assert len(infos(again)) == 2
