"""All that is random about a row, resumed from every step with other numbers of ranks and other batch sizes.

`Run` makes the batches of all ranks as a data loader does: `StepSampler` gives the steps, and `StepDataset` reads them.
"""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.training.draws import WITH_PROMPTS, Row, interleaved, loaders, rows_of, steps_of, write
from tests.training.loaders import COMBINED, modes

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores
WORLDS = (1, 2, 3, 5)
LAST = ("short", "pad", "wrap", "drop")
MODES = ("all", "in order", "blocks", "buckets", "weights", "mix", *COMBINED)
# modes in which no epoch has each sample once
IS_DRAWN = {mode for mode in MODES if mode.startswith(("weights", "mix"))}
SEED = 7
READ: dict[str, Any] = {"collate": {"y": "list"}, **WITH_PROMPTS}


class Taken(NamedTuple):
    """A step of all ranks: its epoch, the name of its stream, and its rows without padding."""

    epoch: int
    name: Any
    rows: list[Row]

    def dated(self) -> list[tuple[int, Row]]:
        return [(self.epoch, row) for row in self.rows]


class Mode:
    """The options of a mode, the rows of a run that was never interrupted, and the batches that were read."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name, self.options = name, options | {"seed": SEED}
        self.is_mix = name.startswith("mix")
        sampler = tc.StepSampler(batch_size=1, rank=0, world_size=1, **self.options)
        self._dataset = tc.StepDataset(sampler, with_info=True, **READ)
        self._known: dict[Any, tuple[Any, list[Row]]] = {}
        (self._single,) = loaders(1, 4, **self.options, **READ)
        self._references: dict[int, dict[Any, list[Row]]] = {}

    def stream(self, epoch: int, name: Any) -> Any:
        """Return what identifies a sequence of rows: a mix with weights goes through a cache in all epochs."""
        return name if self.is_mix else (epoch, name)

    def reference(self, epoch: int) -> dict[Any, list[Row]]:
        """Return the rows of each stream in an epoch, or of a mix in the first epochs."""
        epochs = range(8) if self.is_mix else [epoch]
        found = self._references.get(epochs[0])
        if found is None:
            found = self._references[epochs[0]] = defaultdict(list)
            for number in epochs:
                self._single.set_epoch(number)
                for batch, info in self._single.with_info():
                    found[self.stream(number, info.source)] += rows_of(batch, info)
        return found

    def read(self, step: Any) -> tuple[Any, list[Row]]:
        """Return the name of a step's stream, and its rows; an equal batch is read only once."""
        key = step.epoch, step.stream, step.indices.tobytes(), step.is_padding.tobytes(), str(step.epochs)
        if key not in self._known:
            batch, info = self._dataset[step]
            self._known[key] = info.source, rows_of(batch, info)
        return self._known[key]


class Run:
    """The batches of all ranks, step by step."""

    def __init__(self, mode: Mode, batch_size: int, world_size: int, **others: Any) -> None:
        self.mode = mode
        options = mode.options | {"batch_size": batch_size, "world_size": world_size} | others
        self.samplers = [tc.StepSampler(rank=rank, **options) for rank in range(world_size)]
        self.iterators: list[Any] = []

    def iterate(self, num_epochs: int, state: Any = None) -> Iterator[Taken]:
        """Yield the steps of the next epochs; with a state, of the rest of its epoch first."""
        for _ in range(num_epochs):
            self.iterators = [iter(sampler) for sampler in self.samplers]
            if state is not None:
                for iterator in self.iterators:
                    iterator.load_state_dict(state)
            state = None
            for ranked in zip(*self.iterators, strict=True):
                names, rows = zip(*map(self.mode.read, ranked), strict=True)
                assert len(set(names)) == 1
                yield Taken(ranked[0].epoch, names[0], interleaved(list(rows)))

    def state(self) -> Any:
        """Return the state after the last step, which is the same on all ranks, as a checkpoint brings it back."""
        first, *others = [iterator.state_dict() for iterator in self.iterators]
        assert all(state == first for state in others)
        return from_files(first)


def from_files(state: Any) -> Any:
    """Return a state that was saved as JSON, and by torch.save."""
    assert json.loads(json.dumps(state)) == state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded == state
    return loaded


def check(mode: Mode, taken: list[Taken], pure: Pure, last: str = "short") -> None:
    """Check the rows since the start of training: none lost or used twice, each with its draws."""
    streams: dict[Any, list[Row]] = defaultdict(list)
    for step in taken:
        streams[mode.stream(step.epoch, step.name)] += step.rows
    last_epoch = taken[-1].epoch
    assert {step.epoch for step in taken} == set(range(last_epoch + 1))
    if mode.name in IS_DRAWN:
        for stream, rows in streams.items():
            reference = mode.reference(0 if mode.is_mix else stream[0])[stream]
            least = min(len(rows), len(reference))
            assert rows[:least] == reference[:least]
            if len(rows) > least:
                assert rows == [pure[number] for number in numbered(mode, stream, rows)]
        return
    for epoch in range(last_epoch + 1):
        for stream, reference in mode.reference(epoch).items():
            rows = streams[stream]
            if last == "wrap":
                assert rows == [reference[number % len(reference)] for number in range(len(rows))]
            else:
                assert rows == reference[: len(rows)]
            assert len(rows) >= len(reference) or last == "drop" or epoch == last_epoch


def numbered(mode: Mode, stream: Any, rows: list[Row]) -> Iterator[tuple[str, int, str]]:
    """Yield cache, pass over the cache, and key of each row of a stream."""
    seen: Counter[str] = Counter()
    for position, row in enumerate(rows):
        source = "b" if int(row.key) >= 100 else "a"
        if mode.is_mix:
            # the samples of a stream come in passes; as many that are drawn by weights count as a pass, too
            numbers = range(23) if source == "a" else range(100, 109)
            yield source, position // sum(stream in (source, (source, (1 + i % 3,))) for i in numbers), row.key
            continue
        repeats = mode.options.get("repeats", {}).get(source, 1)
        # drawn again by weights, it has the draws that it had before
        number = 0 if mode.name.startswith("weights") else seen[row.key]
        yield source, stream[0] * repeats + number, row.key
        seen[row.key] += 1


class Pure(dict[tuple[str, int, str], Row]):
    """The draws of each sample in each pass over its cache, from batches of the whole cache in order."""

    def __init__(self, a: Any, b: Any) -> None:
        (self._loader,) = loaders(1, 100, mix={"a": a, "b": b}, seed=SEED, **READ)

    def __missing__(self, wanted: tuple[str, int, str]) -> Row:
        self._loader.set_epoch(wanted[1])
        for batch, info in self._loader.with_info():
            self.update({(str(info.source), info.epoch, row.key): row for row in rows_of(batch, info)})
        return self[wanted]


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("elastic")
    return tc.open(write(folder / "a", range(23))), tc.open(write(folder / "b", range(100, 109)))


@pytest.fixture(scope="module")
def all_modes(caches: tuple[Any, Any]) -> dict[str, Mode]:
    options = modes(*caches)
    return {name: Mode(name, options[name]) for name in MODES}


@pytest.fixture(scope="module")
def pure(caches: tuple[Any, Any]) -> Pure:
    return Pure(*caches)


@pytest.mark.parametrize("mode", MODES)
def test_draws_belong_to_passes(all_modes: dict[str, Mode], pure: Pure, mode: str) -> None:
    """In every mode, a sample has the draws of its pass over its cache: of the epoch, unless an epoch has several passes."""
    for epoch in range(3):
        for stream, rows in all_modes[mode].reference(epoch).items():
            assert rows == [pure[number] for number in numbered(all_modes[mode], stream, rows)]


@pytest.mark.parametrize(
    ("mode", "last", "world_size"),
    [(mode, "short", 3) for mode in MODES]
    + [(mode, last, 2) for mode in ("all", "mix+buckets", "repeats+buckets") for last in LAST]
    + [pytest.param(mode, "short", 1, marks=pytest.mark.long) for mode in MODES]
    + [pytest.param(mode, last, 2, marks=pytest.mark.long) for mode in ("buckets", "weights") for last in LAST],
)
def test_from_every_step(all_modes: dict[str, Mode], pure: Pure, mode: str, last: str, world_size: int) -> None:
    """Of an epoch; resumed with steps of other sizes to the end of the epoch, and into the next one."""
    options = all_modes[mode]
    # from three ranks to others; the cases of two ranks, and the long ones of a single rank, resume on one and on three
    sizes = {1: [(3, other) for other in WORLDS], 2: [(1, 1), (5, 1), (2, 3)], 3: [(3, 2), (3, 5)]}[world_size]
    others = [Run(options, *size, last_batch=last) for size in sizes]
    first, head = Run(options, 3 if world_size == 2 else 4, world_size, last_batch=last), []
    for step in first.iterate(1):
        head.append(step)
        state = first.state()
        for other in others:
            tail = [*other.iterate(1, state), *islice(other.iterate(1), 2)]
            check(options, [*head, *tail], pure, last)
            if last == "drop" and mode not in IS_DRAWN:
                size = max(6, len(tail[0].rows))
                used = Counter((each.epoch, each.name) for each in [*head, *tail] for _ in each.rows)
                assert all(len(rows) - used[stream] < size for stream, rows in options.reference(0).items())


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(MODES),
    st.sampled_from(LAST),
    st.lists(st.tuples(st.sampled_from(WORLDS), st.integers(1, 6), st.integers(1, 8)), max_size=6),
)
def test_chains(all_modes: dict[str, Mode], pure: Pure, mode: str, last: str, runs: list[tuple[int, int, int]]) -> None:
    assume(last != "drop" or all(world_size * batch_size < 7 for world_size, batch_size, _ in runs))
    options, taken, state = all_modes[mode], [], None
    for world_size, batch_size, count in runs:
        one = Run(options, batch_size, world_size, last_batch=last)
        taken += islice(one.iterate(3, state), count)
        state = one.state()
    taken += Run(options, 2, 3, last_batch=last).iterate(1, state)
    check(options, taken, pure, last)


@pytest.mark.parametrize(
    ("mode", "kind", "workers"),
    [("mix+weights", tc.Loader, 2), ("repeats+buckets", tc.torch_loader, 1)]
    + [
        pytest.param(mode, tc.Loader, 2, marks=pytest.mark.long)
        for mode in ("blocks", "weights+buckets", "repeats+buckets")
    ]
    + [pytest.param(mode, tc.torch_loader, 1, marks=pytest.mark.long) for mode in ("blocks", "mix+weights")],
)
def test_loaders(all_modes: dict[str, Mode], mode: str, kind: Any, workers: int) -> None:
    """Loaders have the states and batches of the steps above, before and after they resume."""
    options = all_modes[mode].options | READ
    options |= {"num_threads": 2, "prefetch_batches": 3} if kind is tc.Loader else {"num_workers": workers}

    def begun(batch_size: int, world_size: int) -> list[Any]:
        return [kind(batch_size=batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)]

    first, steps = begun(3, 2), Run(all_modes[mode], 3, 2)
    count = len(first[0])
    worlds = WORLDS if kind is tc.Loader else (1, 3)
    resumed_at = {count * number // len(worlds) + 1: world_size for number, world_size in enumerate(worlds)}
    for at, (rows, step) in enumerate(zip(islice(steps_of(first), count), steps.iterate(1), strict=True), 1):
        assert rows == step.dated()
        states = [from_files(loader.state_dict()) for loader in first]
        assert states[0] == states[1]
        expected = steps.state()
        assert at == count or states[0] == expected
        if at not in resumed_at and at < count:
            continue
        resumed, run = begun(4, resumed_at.get(at, 2)), Run(all_modes[mode], 4, resumed_at.get(at, 2))
        for loader in resumed:
            loader.load_state_dict(states[0])
        tail = [step.dated() for step in (*run.iterate(1, expected), *islice(run.iterate(1), 2))]
        assert list(islice(steps_of(resumed), len(tail))) == tail
        for loader in resumed:
            loader.close()
    for loader in first:
        loader.close()
