"""Pipelines resume in the middle of an epoch and between two, in the same sequence; other states are refused."""

from __future__ import annotations

from typing import Any

import pytest

import dali_plugin
import wds_tensorcache as tc
from tests.dali.pipelines import dali, pipeline


def sequence(iterator: Any, num_batches: int) -> list[tuple[int, list[Any]]]:
    """Return the next batches' scalars, each with how many epochs ended before it."""
    found: list[tuple[int, list[Any]]] = []
    for num_ended in range(num_batches and num_batches + 1):
        for batch in iterator:
            found.append((num_ended, batch["scalar"].tolist()))
            if len(found) == num_batches:
                return found
    return found


def reader(nodes: Any) -> Any:
    checkpointed = pipeline(nodes, 8, enable_checkpointing=True, seed=7)
    return dali_plugin.TensorCacheIterator(checkpointed, outputs=["scalar", "number"])


@pytest.mark.parametrize("last_batch", ["short", "drop"])
@pytest.mark.parametrize("native", [False, True])
def test_resumed_at_every_iteration(cache: Any, native: bool, last_batch: str) -> None:
    def with_noise() -> Any:
        scalar, number = dali_plugin.fn.tensorcache(cache, ["scalar"], shuffle=True, last_batch=last_batch)
        noise = dali.fn.random.uniform(range=[0, 1], dtype=dali.types.FLOAT)
        return dali.fn.cast(scalar, dtype=dali.types.FLOAT) + noise, number

    def of_the_native_reader() -> Any:
        order: Any = {"shuffle": True, "initial_fill": 5} if last_batch == "short" else {"shuffle_after_epoch": True}
        return dali_plugin.fn.native_reader(cache, tensors=["scalar"], seed=3, last_batch=last_batch, **order)

    def begun() -> Any:
        if not native:
            return reader(with_noise)
        return dali_plugin.TensorCacheIterator(pipeline(of_the_native_reader, 8, enable_checkpointing=True))

    whole = sequence(begun(), 7)
    assert whole[-1][0] == (2 if last_batch == "short" else 3)
    for count in range(7):
        first, second = begun(), begun()
        head = sequence(first, count)
        second.load_state_dict(first.state_dict())
        begins = head[-1][0] if head else 0
        tail = sequence(second, 7 - count)
        assert head + [(begins + num_ended, values) for num_ended, values in tail] == whole
    with pytest.raises(RuntimeError, match="the pipelines are built already"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("native", [False, True])
def test_resumed_at_an_epochs_end(cache: Any, native: bool) -> None:
    nodes = dali_plugin.fn.native_reader if native else dali_plugin.fn.tensorcache

    def begun() -> Any:
        made = pipeline(lambda: nodes(cache, shuffle=True, last_batch="short"), enable_checkpointing=True)
        return dali_plugin.TensorCacheIterator(made)

    resumed, unbroken = begun(), begun()
    for _ in range(3):  # saved after each epoch, and resumed by another iterator each time
        assert [list(batch["id"]) for batch in resumed] == [list(batch["id"]) for batch in unbroken]
        state, resumed = resumed.state_dict(), begun()
        resumed.load_state_dict(state)


def test_states_that_do_not_fit(cache: Any) -> None:
    def new_pipeline(batch_size: int = 6, view: Any = cache, **options: Any) -> Any:
        return pipeline(
            lambda: dali_plugin.fn.tensorcache(view, ["scalar"], **options), batch_size, enable_checkpointing=True
        )

    def begun(*args: Any, **options: Any) -> Any:
        return dali_plugin.TensorCacheIterator(new_pipeline(*args, **options))

    first = begun()
    next(first)
    state = first.state_dict()
    for other, message in (
        (begun(4), "batch_size=6, not 4"),
        (begun(shuffle=True), "shuffle=False, not True"),
        (begun(rank=0, world_size=2), "world_size=1, not 2"),
        (begun(last_batch="drop"), "last_batch='short', not 'drop'"),
        (begun(view=cache[[*range(19, -1, -1)]]), "samples='20 samples, keys .*', not '20 samples, keys"),
        (dali_plugin.TensorCacheIterator([new_pipeline(), new_pipeline()]), "1 pipelines, not 2"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    for other in ({"loader": state}, tc.Loader(cache, 6).state_dict(), None):
        with pytest.raises(ValueError, match="expected a state of TensorCacheIterator, got "):
            begun().load_state_dict(other)
    made = pipeline(lambda: dali_plugin.fn.tensorcache(cache, ["scalar"]))
    with pytest.raises(RuntimeError, match="was it made with enable_checkpointing=True"):
        dali_plugin.TensorCacheIterator(made).state_dict()
    with pytest.raises(RuntimeError, match="the pipelines are built already"):
        dali_plugin.TensorCacheIterator(made).load_state_dict(state)
