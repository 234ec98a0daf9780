"""torchdata's `StatefulDataLoader` over an `IterableCache`: resumed anywhere, by others, and through epochs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader, stateful_dataloader

import wds_tensorcache as tc
from tests.loading.loaders import modes, steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata looks at all of torch
]
KINDS = [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True)]


def begun(options: dict[str, Any], num_workers: int, persistent: bool = False, **others: Any) -> Any:
    dataset = tc.IterableCache(**({"batch_size": 5, "collate": "list"} | options))
    return StatefulDataLoader(
        dataset, batch_size=None, num_workers=num_workers, persistent_workers=persistent, **others
    )


def infos(made: Any) -> list[tuple[int, int, list[str]]]:
    return [(info.epoch, info.step, info.keys) for _, info in made]


def expected(options: dict[str, Any], count: int) -> list[list[tuple[int, int, list[str]]]]:
    loader = tc.Loader(**({"batch_size": 5, "collate": "list"} | options))
    return [infos(loader) for _ in range(count)]


@pytest.mark.parametrize("mode", ["all", "buckets", "mix", "weights"])
@pytest.mark.parametrize(("num_workers", "persistent"), KINDS)
def test_epochs(cache: Any, more: Any, mode: str, num_workers: int, persistent: bool) -> None:
    options = modes(cache, more)[mode]
    made = begun(options, num_workers, persistent)
    assert [infos(made) for _ in range(4)] == expected(options, 4)


@pytest.mark.parametrize("mode", ["all", "buckets", "mix"])
@pytest.mark.parametrize(("num_workers", "persistent"), KINDS)
def test_resumed_at_every_step(cache: Any, more: Any, mode: str, num_workers: int, persistent: bool) -> None:
    """And at the end of an epoch, in the loop and behind it; two more epochs follow."""
    options = modes(cache, more)[mode]
    whole = expected(options, 4)
    made = begun(options, num_workers, persistent)
    infos(made)
    states = []
    for _ in made:
        states.append(copy.deepcopy(made.state_dict()))
    states.append(copy.deepcopy(made.state_dict()))
    for number, state in enumerate(states, 1):
        if num_workers > 1 and number not in (1, 2, len(whole[1]) - 1, len(whole[1]), len(whole[1]) + 1):
            continue  # starting workers takes its time
        again = begun(options, num_workers, persistent)
        again.load_state_dict(pickle.loads(pickle.dumps(state)))
        rest = whole[1][number:]
        following = whole[2:] if rest else whole[2:4]
        found = [infos(again) for _ in range(1 + len(following) if rest else len(following))]
        assert found == ([rest] if rest else []) + following


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_resumed_by_others(cache: Any, num_workers: int, taken: int) -> None:
    """With another batch size, and by one rank what two had begun: each sample once."""
    for world_size, batch_size in ((1, 3), (2, 2)):
        rows = []
        for rank in range(world_size):
            made = begun(
                {"cache": cache, "batch_size": batch_size, "rank": rank, "world_size": world_size}, num_workers
            )
            iterator = iter(made)
            rows += [key for _ in range(taken) for key in next(iterator)[1].keys]
            state = copy.deepcopy(made.state_dict())
        again = begun({"cache": cache, "batch_size": 4, "rank": 0, "world_size": 1}, num_workers)
        again.load_state_dict(state)
        for _, info in again:
            rows += [key for key, is_padding in zip(info.keys, info.is_padding.tolist(), strict=True) if not is_padding]
        assert sorted(rows) == sorted(cache.keys())
        assert len(steps([tc.Loader(cache, 4, rank=0, world_size=1, collate="list")], 6)) == 6
        assert {info.epoch for _, info in again} == {1}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("every", [2, 3])
def test_states_that_are_taken_now_and_then(cache: Any, num_workers: int, every: int) -> None:
    whole = expected({"cache": cache, "batch_size": 2}, 2)
    made = begun({"cache": cache, "batch_size": 2}, num_workers, snapshot_every_n_steps=every)
    for number, _ in enumerate(made, 1):
        if number in (1, 5, 6):
            state = copy.deepcopy(made.state_dict())
            again = begun({"cache": cache, "batch_size": 2}, num_workers, snapshot_every_n_steps=every)
            again.load_state_dict(state)
            assert infos(again) == whole[0][number:]
            assert infos(again) == whole[1]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_resumed_behind_a_loop_by_workers_that_are_late(
    cache: Any, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchdata starts workers of the epoch that is over, and others right away; the first may be asked for nothing."""
    whole = expected({"cache": cache}, 3)
    made = begun({"cache": cache}, num_workers)
    infos(made)
    again = begun({"cache": cache}, num_workers)
    again.load_state_dict(copy.deepcopy(made.state_dict()))
    workers = stateful_dataloader._StatefulMultiProcessingDataLoaderIter
    start, ask = workers.__init__, workers._try_put_index

    def start_late(self: Any, loader: Any, state: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(workers, "_try_put_index", (lambda self: None) if state else ask)
            start(self, loader, state)

    monkeypatch.setattr(workers, "__init__", start_late)
    assert [infos(again), infos(again)] == whole[1:]


@pytest.mark.parametrize(("num_workers", "persistent"), KINDS)
@pytest.mark.parametrize("at_end", [False, True])
def test_epochs_that_are_set(cache: Any, num_workers: int, persistent: bool, at_end: bool) -> None:
    """As training loops do, also when they resume: that epoch goes on; another one begins where it is asked for."""
    whole = expected({"cache": cache}, 5)
    made = begun({"cache": cache}, num_workers, persistent)
    for epoch in range(2):
        made.dataset.set_epoch(epoch)
        for number, _ in enumerate(made, 1):
            if (epoch, number) == (1, 2):
                state = copy.deepcopy(made.state_dict())
                break
        if epoch == 0 and at_end:
            state = copy.deepcopy(made.state_dict())
            break
    again = begun({"cache": cache}, num_workers, persistent)
    again.load_state_dict(state)
    found = []
    for epoch in range(1, 4):
        again.dataset.set_epoch(epoch)
        found.append(infos(again))
    assert found == [whole[1][0 if at_end else 2 :], *whole[2:4]]
    if not persistent:
        other = begun({"cache": cache}, num_workers, persistent)
        other.load_state_dict(state)
        other.dataset.set_epoch(4)
        assert [row[2] for row in infos(other)] == [row[2] for row in whole[4]]
