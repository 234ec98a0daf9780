"""torchdata's `StatefulDataLoader` over a `StepSampler` and its `StepDataset`: resumed anywhere, and through epochs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_tensorcache as tc
from tests.training.loaders import modes, only_numbers

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata looks at all of torch
]
Epoch = list[tuple[int, int, list[str]]]


def begun(options: dict[str, Any], num_workers: int, state: Any = None, **others: Any) -> Any:
    sampler = tc.StepSampler(**{"batch_size": 5} | options)
    dataset = tc.StepDataset(sampler, collate=only_numbers, with_info=True)
    loader = StatefulDataLoader(dataset, batch_size=None, sampler=sampler, num_workers=num_workers, **others)
    if state is not None:
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    return loader


def infos(loader: Any) -> Epoch:
    return [(info.epoch, info.step, info.keys) for _, info in loader]


def expected(options: dict[str, Any], count: int) -> list[Epoch]:
    loader = tc.Loader(**{"batch_size": 5, "collate": "list"} | options)
    return [infos(loader.with_info()) for _ in range(count)]


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (3, True)])
@pytest.mark.parametrize("mode", ["all", "mix"])
def test_resumed_at_every_step(cache: Any, more: Any, mode: str, num_workers: int, persistent: bool) -> None:
    """Also before the first batch, after the last one, and after the loop; another epoch follows."""
    options = modes(cache, more)[mode]
    whole = expected(options, 4)
    loader = begun(options, num_workers, persistent_workers=persistent)
    first = copy.deepcopy(loader.state_dict())
    assert infos(loader) == whole[0]
    again = begun(options, num_workers, first)
    assert [infos(again), infos(again)] == whole[:2]
    states = [(number, copy.deepcopy(loader.state_dict())) for number, _ in enumerate(loader, 1)]
    states.append((len(loader), copy.deepcopy(loader.state_dict())))  # after the loop
    # starting workers takes its time
    for taken, state in states if num_workers == 0 else states[::2] + states[-2:]:
        again = begun(options, num_workers, state, persistent_workers=persistent)
        rest = whole[1][taken:]
        # after the loop, the next one is the next epoch's
        assert [infos(again), infos(again)] == (whole[2:4] if state is states[-1][1] else [rest, whole[2]])


def test_snapshots(cache: Any) -> None:
    """torchdata skips the batches after a snapshot by their number; of another size, samples would be lost silently."""
    loader = begun({"cache": cache, "batch_size": 2}, 2, snapshot_every_n_steps=3)
    with pytest.raises(ValueError, match="only with snapshot_every_n_steps=1"):
        infos(loader)
    # in one process, states are exact at any batch size: nothing is read ahead
    loader, seen = begun({"cache": cache, "batch_size": 2}, 0), list[str]()
    for number, (_, info) in enumerate(loader, 1):
        seen += info.keys
        if number in (3, 7):
            again = begun({"cache": cache, "batch_size": 3}, 0, loader.state_dict())
            assert sorted(seen + [key for _, info in again for key in info.keys]) == sorted(cache.keys())
