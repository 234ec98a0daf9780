"""Streams that resume: each sample once, in the same order unless a stage shuffles, and no sample decoded twice."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from webdataset.gopen import gopen_schemes

import wds_tensorcache as tc

SIZES = (5, 1, 7, 3, 4)
COUNT = sum(SIZES)
# torchdata inspects all of torch
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def write_shards(folder: Path, numel: int = 3) -> Path:
    """Write shards of `SIZES` samples with webdataset's own writer; their keys and values are numbers in order."""
    numbers = iter(range(COUNT))
    for shard, size in enumerate(SIZES):
        with wds.TarWriter(str(folder / f"{shard}.tar"), encoder=tc.encoder(), mtime=0) as sink:
            for i in [next(numbers) for _ in range(size)]:
                sink.write({"__key__": f"{i:03d}", "tensorcache": {"x": torch.full((numel,), i), "i": i}})
    return folder


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return list(map(str, sorted(write_shards(tmp_path_factory.mktemp("resumable")).iterdir())))


def number(item: Any) -> list[int]:
    return [item["tensorcache"]["i"]] if isinstance(item, dict) else [sample["tensorcache"]["i"] for sample in item]


def batched(size: int) -> Any:
    return wds.batched(size, collation_fn=list)


def take(stream: Any, count: int) -> list[list[int]]:
    taken: list[list[int]] = []
    while len(taken) < count:
        for item in stream:
            taken.append(number(item))
            if len(taken) == count:
                break
    return taken


STAGES = {
    "samples": [tc.decode()],
    "batches": [tc.decode(), batched(3)],
    "shuffled": [wds.shuffle(6), tc.decode(), batched(3)],
    "filtered": [tc.decode(), wds.select(lambda sample: sample["tensorcache"]["i"] % 3 != 1)],
}


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_resumed_at_every_item(urls: list[str], stages: list[Any]) -> None:
    wanted = [i for i in range(COUNT) if stages is not STAGES["filtered"] or i % 3 != 1]
    is_ordered = stages is STAGES["samples"] or stages is STAGES["filtered"]
    stream = tc.ResumablePipeline(urls, *stages)
    epochs: list[list[list[int]]] = []
    states = [(0, 0, json.dumps(stream.state_dict()))]
    for epoch in range(2):
        epochs.append([])
        for item in stream:
            epochs[epoch].append(number(item))
            states.append((epoch, len(epochs[epoch]), json.dumps(stream.state_dict())))
        assert sorted(i for item in epochs[epoch] for i in item) == wanted
    assert epochs[0] != epochs[1]
    for epoch, taken, state in states:
        resumed = tc.ResumablePipeline(urls, *stages)
        resumed.load_state_dict(json.loads(state))
        whole = epochs[epoch][:taken] + list(map(number, resumed))
        assert sorted(i for item in whole for i in item) == wanted
        if is_ordered:
            assert whole == epochs[epoch]
            assert epoch or list(map(number, resumed)) == epochs[1]


def test_nothing_is_decoded_or_read_again(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    opened: list[str] = []

    def open_noted(url: str, *_: Any) -> Any:
        opened.append(url)
        return open(url.removeprefix("noted://"), "rb")

    monkeypatch.setitem(gopen_schemes, "noted", open_noted)
    urls = [f"noted://{url}" for url in urls]

    def note(samples: Any) -> Any:
        for sample in samples:
            decoded.append(sample["__key__"])
            yield sample

    first = tc.ResumablePipeline(urls, note, tc.decode(), shuffle=False)
    take(first, 8)
    second = tc.ResumablePipeline(urls, note, tc.decode(), shuffle=False)
    second.load_state_dict(first.state_dict())
    decoded.clear()
    opened.clear()
    assert take(second, 1) == [[8]]
    assert decoded == ["008"]
    assert opened == urls[2:3]


def test_refused_arguments_and_states(urls: list[str]) -> None:
    with pytest.raises(ValueError, match="no shards"):
        tc.ResumablePipeline([])
    with pytest.raises(KeyError, match="has no '__position__'.*let the stages pass it on"):
        next(iter(tc.ResumablePipeline(urls, tc.decode(), wds.to_tuple("tensorcache"))))
    item = next(iter(tc.ResumablePipeline(urls, tc.decode(), wds.to_tuple("tensorcache", "__position__"))))
    assert list(item[0]) == ["x", "i"]
    state = tc.ResumablePipeline(urls).state_dict()
    for other in (
        tc.ResumablePipeline(urls[1:]),
        tc.ResumablePipeline(urls, seed=1),
        tc.ResumablePipeline(urls, rank=0, world_size=2),
    ):
        with pytest.raises(ValueError, match="the state belongs to a different stream"):
            other.load_state_dict(state)


def test_set_epoch_after_loading_a_state(urls: list[str]) -> None:
    first = tc.ResumablePipeline(urls, tc.decode())
    whole = take(first, 2 * COUNT)
    first = tc.ResumablePipeline(urls, tc.decode())
    take(first, 7)
    second = tc.ResumablePipeline(urls, tc.decode())
    second.load_state_dict(first.state_dict())
    second.set_epoch(0)  # as loops over epochs do
    assert list(map(number, second)) == whole[7:COUNT]
    second.load_state_dict(first.state_dict())
    with pytest.warns(
        UserWarning, match=r"set_epoch\(1\) leaves out the rest of epoch 0, of which 7 samples were used"
    ):
        second.set_epoch(1)
    assert list(map(number, second)) == whole[COUNT:]
    with pytest.raises(ValueError, match="a different stream"):
        tc.ResumablePipeline([urls[0], *urls[:0:-1]]).load_state_dict(first.state_dict())


def test_epochs_with_the_same_torch_seed(urls: list[str]) -> None:
    """As by a validation with a fixed seed after some epochs; other workers between them count as well."""
    stream = tc.ResumablePipeline(urls, tc.decode())
    for epoch in range(4):
        if epoch in (1, 2):
            torch.manual_seed(0)
        assert epochs(stream, 2) == [order(urls, epoch, 2)]
    for num_workers in (1, 2):
        torch.manual_seed(0)
        assert sorted(epochs(stream, num_workers)[0]) == list(range(COUNT))


def epochs(stream: Any, num_workers: int, count: int = 1, **options: Any) -> list[list[int]]:
    made = DataLoader(stream, batch_size=None, num_workers=num_workers, **options)
    return [[i for item in made for i in number(item)] for _ in range(count)]


def test_workers_and_the_main_process_take_turns(urls: list[str]) -> None:
    orders = epochs(tc.ResumablePipeline(urls, tc.decode()), 0, 6)
    for context in (lambda stream: stream, lambda stream: pickle.loads(pickle.dumps(stream))):
        stream = context(tc.ResumablePipeline(urls, tc.decode()))
        assert epochs(stream, 0) == orders[:1]
        assert epochs(stream, 1, 2) == orders[1:3]
        with pytest.raises(RuntimeError, match="workers have the state"):
            stream.state_dict()
        assert epochs(stream, 0) == orders[3:4]
        next(iter(stream))  # abandons an epoch
        assert epochs(stream, 1) == orders[5:]
        stream.set_epoch(2)
        assert stream.state_dict()["epoch"] == 2
        assert epochs(stream, 1) == orders[2:3]
        assert epochs(stream, 0) == orders[3:4]  # the epoch that was set is over


def test_a_state_belongs_to_one_process(urls: list[str]) -> None:
    stream = tc.ResumablePipeline(urls, tc.decode())
    next(iter(stream))
    state = stream.state_dict()
    stream.load_state_dict(state)
    with pytest.raises(RuntimeError, match="the state was loaded in another process"):
        epochs(stream, 1)


def test_a_state_at_the_end_of_an_epoch(urls: list[str]) -> None:
    orders = epochs(tc.ResumablePipeline(urls, tc.decode()), 0, 3)
    first, second = tc.ResumablePipeline(urls, tc.decode()), tc.ResumablePipeline(urls, tc.decode())
    assert epochs(first, 0) == orders[:1]
    second.load_state_dict(first.state_dict())
    assert epochs(second, 0, 2) == orders[1:]
    second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match=r"set_epoch\(0\) discards the loaded state, which resumes in epoch 1"):
        second.set_epoch(0)
    assert epochs(second, 0, 2) == orders[:2]


@pytest.mark.parametrize(
    ("num_workers", "persistent"), [(0, False), (2, True), pytest.param(2, False, marks=pytest.mark.long)]
)
def test_stateful_data_loader(urls: list[str], num_workers: int, persistent: bool) -> None:
    def begun() -> Any:
        stream = tc.ResumablePipeline(urls, tc.decode(), batched(2))
        return StatefulDataLoader(stream, batch_size=None, num_workers=num_workers, persistent_workers=persistent)

    made = begun()
    whole, states = [], []
    for epoch in range(3):
        whole.append([])
        for item in made:
            whole[-1] += number(item)
            states.append((epoch, len(whole[-1]), pickle.dumps(made.state_dict())))
    assert len({tuple(order) for order in whole}) == 3
    ends = [state for state in states if state[1] == COUNT]
    for epoch, taken, state in states[:: 4 if num_workers else 1] + ends:
        again = begun()
        again.load_state_dict(pickle.loads(state))
        rest = [i for item in again for i in number(item)]
        assert sorted(whole[epoch][:taken] + rest) == list(range(COUNT))
        if epoch < 2:
            assert [i for item in again for i in number(item)] == whole[epoch + 1]


def test_iterations_end_each_other(urls: list[str]) -> None:
    stream = tc.ResumablePipeline(urls, tc.decode())
    first = iter(stream)
    next(first)
    state = stream.state_dict()
    second = iter(stream)
    next(second)
    with pytest.raises(RuntimeError, match="a later iteration of this stream ended this one"):
        next(first)
    stream.load_state_dict(state)
    with pytest.raises(RuntimeError, match="a later iteration of this stream ended this one"):
        next(second)
    assert len(list(stream)) == COUNT - 1


def test_a_state_of_changed_shards_is_refused(urls: list[str], tmp_path: Path) -> None:
    copies = [shutil.copy(url, tmp_path) for url in urls]
    state = tc.ResumablePipeline(copies, tc.decode(), rank=0, world_size=2).state_dict()
    tc.ResumablePipeline(copies, tc.decode(), rank=0, world_size=2).load_state_dict(state)
    with open(copies[1], "ab") as file:
        file.write(bytes(512))
    with pytest.raises(ValueError, match="the state belongs to a different stream"):
        tc.ResumablePipeline(copies, tc.decode(), rank=0, world_size=2).load_state_dict(state)


@pytest.mark.parametrize(
    "changed",
    [
        {"epoch": -1},
        {"epoch": "1"},
        {"over": "x"},
        {"done": None},
        {"done": {"9": [[[0, 1]], None]}},
        {"done": {"0": [[[5, 0]], None]}},
        {"done": {"0": [[["a", "b"]], None]}},
        {"done": {"0": [[[0, 5]], 3]}},
        {"done": {"0": [[[0, 1], [1, 2]], None]}},
        {"version": 1},  # divided the shards differently
        {"of": None},
    ],
    ids=str,
)
def test_damaged_states(urls: list[str], changed: dict[str, Any]) -> None:
    stream = tc.ResumablePipeline(urls, tc.decode())
    before = stream.state_dict()
    for wrong in (before | changed, {key: value for key, value in before.items() if key not in changed}, None):
        with pytest.raises(ValueError, match=r"the state (is damaged|belongs|has version)"):
            stream.load_state_dict(wrong)
    assert stream.state_dict() == before


def test_a_state_warns_of_stages_that_make_several_items_of_a_sample(urls: list[str]) -> None:
    def crops(samples: Any) -> Any:
        for sample in samples:
            yield from [sample, sample]

    items = iter(stream := tc.ResumablePipeline(urls, tc.decode(), crops))
    next(items)
    stream.state_dict()
    next(items)
    with pytest.warns(UserWarning, match="several items of a sample.*may leave out items.*one list of all items"):
        stream.state_dict()


def test_stages_that_the_pipeline_replaces_are_refused(urls: list[str], tmp_path: Path) -> None:
    for stage in (wds.split_by_worker, wds.split_by_node, wds.tarfile_to_samples(), tc.tarfile_to_samples()):
        with pytest.raises(ValueError, match="this class itself divides the shards among ranks and reads them"):
            tc.ResumablePipeline(urls, stage, tc.decode())
    with pytest.raises(ValueError, match="5 shards for 6 ranks: some ranks would have none; `tensorcache reshard`"):
        tc.ResumablePipeline(urls, tc.decode(), rank=0, world_size=6)
    for wrong in (wds.DataPipeline(wds.SimpleShardList(urls)), [1], None):
        with pytest.raises(TypeError, match="expected a list of urls, a pattern or a folder"):
            tc.ResumablePipeline(wrong, tc.decode())
    assert epochs(tc.ResumablePipeline(urls[0], tc.decode()), 0) == [list(range(SIZES[0]))]
    for path, message in ((tmp_path, "neither manifest.json nor"), (tmp_path / "x.tar", "does not exist")):
        with pytest.raises(FileNotFoundError, match=message):
            tc.ResumablePipeline(str(path), tc.decode())


# --- epochs in workers: the same for all workers of an iteration, in any order in which they begin, and without gaps ---

_ORDERS: dict[tuple[int, int], list[int]] = {}


def order(urls: list[str], epoch: int, num_workers: int) -> list[int]:
    """Return the samples of an epoch as a fresh pipeline yields them, which is found out once."""
    if (epoch, num_workers) not in _ORDERS:
        stream = tc.ResumablePipeline(urls, tc.decode())
        stream.set_epoch(epoch)
        (_ORDERS[epoch, num_workers],) = epochs(stream, num_workers)
    return _ORDERS[epoch, num_workers]


@pytest.mark.long
def test_spawned_workers_and_the_main_process_take_turns(urls: list[str]) -> None:
    stream = tc.ResumablePipeline(urls, tc.decode())
    for epoch, num_workers in enumerate((0, 1, 0)):
        options = {"multiprocessing_context": "spawn"} if num_workers else {}
        assert epochs(stream, num_workers, **options) == [order(urls, epoch, num_workers)]


def test_an_abandoned_iteration_ends_its_epoch(urls: list[str]) -> None:
    stream = tc.ResumablePipeline(urls, tc.decode())
    made = DataLoader(stream, batch_size=None, num_workers=2)
    for _ in range(3):
        next(iter(made))
    assert epochs(stream, 2) == [order(urls, 3, 2)]


def test_two_iterations_at_once_have_two_epochs(urls: list[str]) -> None:
    made = DataLoader(tc.ResumablePipeline(urls, tc.decode()), batch_size=None, num_workers=2)
    both = list(zip(made, made, strict=True))
    found = [[i for samples in both for i in number(samples[at])] for at in (0, 1)]
    assert sorted(found) == sorted([order(urls, 0, 2), order(urls, 1, 2)])


def test_persistent_workers_agree_on_many_epochs(urls: list[str]) -> None:
    """Two orders in one epoch would repeat samples; there are more epochs than the workers remember."""
    found = epochs(tc.ResumablePipeline(urls, tc.decode()), 2, 70, persistent_workers=True)
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in found)
    assert [found[0], found[69]] == [order(urls, 0, 2), order(urls, 69, 2)]


def test_set_epoch_reaches_workers(urls: list[str]) -> None:
    stream = tc.ResumablePipeline(urls, tc.decode())
    made = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in (4, 1, 1, 0):
        stream.set_epoch(epoch)
        assert [i for item in made for i in number(item)] == order(urls, epoch, 2)
    assert [i for item in made for i in number(item)] == order(urls, 1, 2)


LEFT = """
import sys
import webdataset as wds
import wds_tensorcache as tc

stream = iter(tc.ResumablePipeline(sys.argv[1:], tc.decode()))
stock = iter(wds.DataPipeline(wds.SimpleShardList(sys.argv[1:]), tc.tarfile_to_samples(), tc.decode()))
print(next(stream)["__key__"], next(stock)["__key__"])
"""


@pytest.mark.long
def test_streams_that_are_left_when_the_interpreter_ends(urls: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LEFT, *urls], capture_output=True, text=True, check=True)
    assert "ignored" not in done.stderr
