"""The sampler of training steps: a plan and its current position."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch.utils.data import DistributedSampler, IterableDataset

from wds_tensorcache.arguments import as_int, user_level
from wds_tensorcache.ranks import find_rank, is_distributed
from wds_tensorcache.reading.cache import Cache
from wds_tensorcache.reading.choose import Alternatives
from wds_tensorcache.training.options import by_source, check_repeats, make_streams, split_mix
from wds_tensorcache.training.plan import MAX_EPOCHS, Plan, Position, RowCounts, Step
from wds_tensorcache.training.step_reader import StepReader
from wds_tensorcache.training.weights import Weights

_LAST_BATCH = ("short", "pad", "wrap", "drop")
_EARLY_EXITS = ("next_epoch", "continue")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class StepSampler(DistributedSampler[Step]):
    """The steps of training, as a sampler for torch's data loaders.

    The seed, the epoch and the number of samples that all ranks have used determine the samples of a step. `tc.Loader` and
    `tc.torch_loader` make their own sampler. Other data loaders combine a sampler with the dataset of its batches:

        sampler = tc.StepSampler(cache, 32, shuffle=True)
        loader = StatefulDataLoader(tc.StepDataset(sampler), batch_size=None, sampler=sampler, num_workers=4)

    Each iteration begins the next epoch, even if the previous iteration was abandoned. torchdata's `StatefulDataLoader` resumes
    exactly if it has as many workers as before, and its default `snapshot_every_n_steps=1`. After loading a state from the end
    of an epoch, the first loop is empty, unless `set_epoch` has requested a different epoch. torch's plain `DataLoader` saves
    no state: use `tc.torch_loader`.

    Args:
        cache: Cache from `tc.open` or `tc.join`; None with `mix`.
        batch_size: Number of samples in a batch of one rank; 1 by default.
        shuffle: True for a new order in each epoch. With False, all epochs have the same order, even with buckets or a mix, but
            not with weights. `"blocks"`, for remote shards, reads shards in random order, and shuffles samples within windows
            of `window` samples.
        seed: Seed of all random choices; the same on all ranks.
        rank, world_size: Rank of this process among the data-parallel processes, and their number. By default, both come from
            torch.distributed, even if a trainer initializes it after the sampler is made but before the first iteration.
            Without torch.distributed, they come from torchrun's environment, or else are 0 and 1. Pass both arguments or
            neither.
        group: Process group, or DeviceMesh of one dimension, that determines rank and world size, in place of both. Needed
            with tensor or pipeline parallelism, where the global rank is not the data-parallel rank.
        last_batch: Treatment of an epoch's last step if samples do not fill it. With `bucket_by` or `mix`, it applies to the
            last step of every bucket and cache. The same on all ranks. `"short"` shortens the step; at most `world_size - 1` of
            its samples, over all ranks, are padding. `"pad"` fills the step with padding. `"wrap"` fills it with the first
            samples of the epoch or the bucket, not marked as padding. `"drop"` drops the step. `count_rows` returns the cost.
        weights: One finite number of at least 0 for each sample, not all 0. Samples are drawn with replacement, in proportion
            to these weights. An epoch has as many samples as the cache, rounded up to whole steps (down with `"drop"`), without
            padding. With `bucket_by`, each step's bucket is drawn in proportion to the sum of the weights in it. In a `mix`
            with weights, a dict from names of caches to weights of their samples, `weights={"a": […]}`. Samples of all other
            caches come in passes.
        mix: `{"a": (cache, 0.7), "b": (other, 0.3)}`: each step has samples of one cache, drawn in proportion to the
            weights. An exhausted cache starts again. An epoch has as many samples as all caches together, rounded as with
            `weights`. Without weights, `{"a": cache, "b": other}`, an epoch has every sample once, or `repeats` times.
        repeats: Number of times that an epoch has each sample; with `mix`, a dict from names to numbers, where a missing name
            counts as 1. Not allowed with weights. The samples come in that many passes; with `shuffle`, each pass has a new
            order.
        bucket_by: Name of a tensor, `tc.by_length(…)`, or function of an entry as in `cache.filter`. All samples of a step
            have the same shape of the tensor, or the same result of the function.
        window: Number of samples to shuffle together with `shuffle="blocks"`; 4,096 by default.

    Raises:
        ValueError: Arguments are mutually exclusive or out of range. A cache is empty or not a `Cache`. With `"drop"`, no step
            is full. A function in `bucket_by` returns NaN. Or `tc.by_length` meets a tensor without dimensions.
        TypeError: A number is not an integer, `bucket_by` is neither a name nor a function, or a result of the function is not
            hashable.
        KeyError: `bucket_by` names no tensor, or a sample lacks the tensor. Errors of a function in `bucket_by` are not
            changed.

    Raises (when first used): ValueError, if torch.distributed was initialized later, and no step is full on its ranks.

    Memory: at most 64 KiB for each cache or bucket. Also, for each sample, 8 bytes with `bucket_by`, about 16 with `weights`,
        and about 24 with both.
    Threads/fork/pickle: one thread at a time may use a sampler, and only in the process that made it.
    """

    def __init__(
        self,
        cache: Any = None,
        batch_size: int = 1,
        *,
        shuffle: bool | str = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        group: Any = None,
        last_batch: str = "short",
        weights: Any = None,
        mix: Mapping[str, Any] | None = None,
        repeats: int | Mapping[str, int] | None = None,
        bucket_by: Any = None,
        window: int = 4096,
    ) -> None:
        # a trainer may initialize torch.distributed later
        self._is_rank_open = rank is None and group is None and not is_distributed()
        rank, world_size = find_rank(rank, world_size, group, is_final=not self._is_rank_open)
        if (cache is None) == (mix is None):
            raise ValueError("expected either a cache, or mix= with several caches")
        batch_size, seed, window = as_int("batch_size", batch_size), as_int("seed", seed), as_int("window", window)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}, expected at least 1")
        if last_batch not in _LAST_BATCH:
            raise ValueError(f"last_batch={last_batch!r}, expected one of {', '.join(_LAST_BATCH)}")
        if shuffle not in (True, False, "blocks"):
            raise ValueError(f"shuffle={shuffle!r}, expected True, False or 'blocks'")
        shuffle = shuffle if isinstance(shuffle, str) else bool(shuffle)
        names = None if mix is None else list(mix)
        caches, cache_weights = ([cache], None) if mix is None else split_mix(mix)
        for member in caches:
            if not isinstance(member, Cache):
                remedy = "open it with tc.open. In place of a Subset of a cache, pass cache[indices]"
                if isinstance(member, IterableDataset):
                    remedy = "pass a stream to torch's DataLoader, with batch_size=None if the stream makes batches"
                raise ValueError(f"{member!r:.200} is not a cache; {remedy}")
            if not len(member):
                raise ValueError("the cache has no samples: did a filter or a slice leave none?")
        sample_weights, passes = by_source("weights", weights, mix), by_source("repeats", repeats, mix)
        if sample_weights and mix is not None and cache_weights is None:
            raise ValueError("weights of samples in a mix need a weight of each cache, too: mix={'a': (cache, 0.7), …}")
        if repeats is not None and (cache_weights is not None or sample_weights):
            raise ValueError(
                "repeats and weights are mutually exclusive: leave out the weights, as in mix={'a': cache, 'b': other}"
            )
        counts = [check_repeats(passes.get(source, 1)) for source in range(len(caches))]
        streams = make_streams(caches, names, bucket_by, counts, shuffle, window, seed)
        modes = {"weights": bool(sample_weights), "mix": mix is not None, "buckets": bucket_by is not None}
        settings: dict[str, Any] = {
            "seed": seed,
            "shuffle": shuffle,
            "mode": "+".join(name for name, is_used in modes.items() if is_used) or "all",
            "streams": [str(stream.name) for stream in streams],
        }
        if names is not None and sample_weights:
            settings["weighted"] = sorted((names[source] for source in sample_weights), key=str)
        if repeats is not None or (mix is not None and cache_weights is None):
            settings["repeats"] = counts
        self._plan = Plan(
            caches,
            streams,
            Weights(names or [], cache_weights, sample_weights, streams, seed),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            last_batch=last_batch,
            seed=seed,
            settings=settings,
        )
        self._check_steps()
        self._position = self._before = self._plan.start  # `_before` is the position before the last batch of a loader
        self._is_resumed = False  # the next iteration starts at the position, even in the middle of an epoch
        self._requested_epoch: int | None = None  # the epoch that set_epoch requested since the last iteration began
        self._num_moves = 0  # the number of times that the position was set other than by a batch
        # steps for a TorchLoader, which moves the position itself; None for other data loaders
        self._scheduled: deque[Any] | None = None
        self._is_elsewhere = False  # another data loader iterates, so the batches that it returned are unknown
        self._has_warned = False  # of samples that set_epoch left out
        self._continues = False  # a loader's loop begins where its previous loop was left

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_scheduled": None}

    def __len__(self) -> int:
        """Return the number of steps in an epoch, equal on all ranks."""
        self._find_rank()
        return self._plan.num_steps()

    def _find_rank(self) -> None:
        """Take over the rank if torch.distributed was initialized after this sampler."""
        if not self._is_rank_open:
            return
        plan, is_final = self._plan, is_distributed()
        rank, world_size = find_rank(None, None)
        if (rank, world_size) != (plan.rank, plan.world_size):
            plan.set_rank(rank, world_size)
            self._position = plan.settle(self._position)  # a larger step may not fit into the rest of the epoch
        self._check_steps()  # each use raises this error until the check passes
        self._is_rank_open = not is_final

    def _check_steps(self) -> None:
        plan = self._plan
        if not plan.num_steps():
            raise ValueError(
                f"{plan.num_samples} samples do not fill one step of {plan.batch_size} on {plan.world_size} ranks; "
                "use last_batch='short'"
            )

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator; its first step begins an epoch."""
        return _StepIterator(self)

    def __repr__(self) -> str:
        """Return a summary of the options, and the next epoch and step."""
        return f"{type(self).__name__}({self._shown}, epoch={self.epoch}, step={self._position.step})"

    @property
    def _shown(self) -> str:
        plan, settings, rows = self._plan, self._plan.settings, self._plan.count_rows()
        shown = f"{plan.num_samples:,} samples, batch_size={plan.batch_size}, {plan.num_steps():,} steps per epoch"
        shown += f", rank={plan.rank}, world_size={plan.world_size}, shuffle={settings['shuffle']!r}, seed={plan.seed}"
        shown += f", last_batch={plan.last_batch!r}"
        if "buckets" in settings["mode"]:
            shown += f", {len(plan.streams):,} buckets"
        if plan.weights.samples:
            shown += ", drawn by weights" + (f" in {settings['weighted']!r:.200}" if "weighted" in settings else "")
        if "repeats" in settings:
            shown += f", repeats={settings['repeats']!r:.200}"
        for name, count in (("padding", rows.num_padding), ("repeated", rows.num_repeated)):
            shown += f", {name}={count} of {rows.num_rows} rows ({count / rows.num_rows:.0%})" if count else ""
        if rows.num_dropped:
            shown += f", dropped={rows.num_dropped} of {rows.num_samples} samples ({rows.num_dropped / rows.num_samples:.0%})"
        return shown + (f", mix={plan.weights.mix!r:.200}" if plan.weights.mix else "")

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch that the next iteration begins.

        During an iteration over this sampler itself, it is one more than the epoch of the steps. In a `tc.Loader` or
        `tc.torch_loader`, the sampler follows the returned batches, and this is the epoch of the next batch.
        """
        return self._position.epoch

    def count_rows(self) -> RowCounts:
        """Count the rows and dropped samples of an epoch over all ranks."""
        self._find_rank()
        return self._plan.count_rows()

    def _set_early_exit(self, on_early_exit: str) -> None:
        """Choose whether a loader's loop continues the previous loop; see `tc.Loader`."""
        if on_early_exit not in _EARLY_EXITS:
            raise ValueError(f"on_early_exit={on_early_exit!r}, expected one of {', '.join(_EARLY_EXITS)}")
        self._continues = on_early_exit == "continue"

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration begin the given epoch. If a state in that epoch was just loaded, the iteration resumes there.

        If the state is in a later epoch, it is discarded, and `set_epoch` warns. If the sampler is at the beginning of that
        epoch, nothing changes. With weights in `mix`, each cache continues after its last used sample. `set_epoch` then warns
        if the loader has used no sample, and `epoch` is not 0. Without weights, it warns once if samples of an earlier epoch
        are left out. In a loader with `on_early_exit="continue"`, it has no effect after the first batch.

        Raises:
            TypeError: `epoch` is not an integer.
            ValueError: `epoch` is not in `[0, 2^31)`.
            RuntimeError: Lightning resumes at another batch than this sampler.
        """
        epoch = as_int("epoch", epoch)
        if not 0 <= epoch < MAX_EPOCHS:
            raise ValueError(f"epoch={epoch} out of range [0, {MAX_EPOCHS:,})")
        before, loop = self._position, _lightning_loop()
        # trainers call this for each loop
        if self._continues and before.step:
            return
        is_training = hasattr(loop, "epoch_loop")
        is_earlier = self._is_resumed and epoch < before.epoch
        if is_training and is_earlier and _num_resumed(loop) >= len(self):
            # a shorter loader of several, which has ended or begun again in this epoch of Lightning
            if getattr(getattr(loop, "_combined_loader", None), "_mode", None) == "max_size":
                self._move(self._plan.end(epoch, before), is_resumed=True)
            return
        self._requested_epoch = epoch
        # when Lightning begins an epoch, a shorter loader of several may be in the middle of its own epoch of that number
        is_epoch_new = is_training and getattr(loop, "_loaded_from_state_dict", False)
        is_epoch_new = is_epoch_new and loop.epoch_progress.current.ready == loop.epoch_progress.current.processed
        is_there = epoch == before.epoch and ((self._is_resumed and not is_epoch_new) or not before.used)
        if not is_there:
            if is_earlier and loop is None:
                warn_of_earlier_epoch(epoch, before.epoch)
            if self._plan.weights.caches is not None and epoch and not any(before.counts):
                warnings.warn(
                    f"epoch {epoch} begins with the first samples of each cache, because this loader has used none yet, and "
                    "epochs of a mix with weights continue each other; to resume training, load the loader's state",
                    stacklevel=user_level(),
                )
            self._move(replace(self._plan.next_epoch(before), epoch=epoch))
        if is_training:
            self._check_counters(loop)
        is_left = before.used and epoch > before.epoch and not self._plan.weights.are_used
        num_left = sum(self._plan.remaining(before)) if is_left else 0
        # Lightning's validation may be limited, and its sanity check always is
        if num_left and not self._has_warned and (loop is None or is_training):
            self._has_warned = True
            warnings.warn(
                f"set_epoch({epoch}) leaves out {num_left:,} of the {self.count_rows().num_samples:,} samples of epoch "
                f"{before.epoch}, which was not finished; iterate to its end to use them. Ignore this if epochs end early on "
                "purpose; later epochs do not warn",
                stacklevel=user_level(),
            )

    def _check_counters(self, loop: Any) -> None:
        """Raise RuntimeError if Lightning resumes at another batch than this sampler."""
        batches, epoch = loop.epoch_loop.batch_progress, self._position.epoch
        if getattr(loop, "_loaded_from_state_dict", False) and self._continues and batches.total.ready:
            raise RuntimeError(
                f"Lightning resumes after {batches.total.ready} batches, but this loader has no state of them. "
                "Pass callbacks=[ResumeLoaders()] to the Trainer, from wds_tensorcache.integrations.lightning; or train from "
                "the checkpoint's weights alone"
            )
        number, used = _num_resumed(loop), self._plan.num_steps() - self._plan.num_steps(self._position)
        # torchdata's loader keeps its own position
        if number and number != used and not self._is_elsewhere:
            raise RuntimeError(
                f"Lightning resumes epoch {epoch} after {number} batches, but this loader is at batch {used} of epoch {epoch}, "
                "so samples would be lost or repeated. Pass callbacks=[ResumeLoaders()] to the Trainer, from "
                "wds_tensorcache.integrations.lightning. A checkpoint without this loader's state resumes only at the end "
                "of an epoch"
            )

    def _move(self, position: Position, *, is_resumed: bool = False, is_elsewhere: bool = False) -> None:
        self._position, self._is_resumed, self._is_elsewhere = position, is_resumed, is_elsewhere
        self._num_moves += 1

    def _beginning(self) -> Position:
        self._find_rank()
        is_abandoned = self._position.used and not self._is_resumed and not self._continues
        return self._plan.next_epoch(self._position) if is_abandoned else self._position

    def _end_of_loop(self, begin: Position) -> int:
        """Return the number of the first step after a loop from `begin`."""
        # loops that continue have equal lengths: Lightning neither validates nor steps schedules after a shorter loop
        return begin.step + self._plan.num_steps(None if self._continues else begin)

    def _step(self, epoch: int, number: int) -> Step:
        """Return a step of an epoch, for samplers without mix and buckets."""
        self._find_rank()
        used = number * self._plan.step_size
        return self._plan.step(Position(epoch, (used,), used))[0]

    def _reader(self, choose: Any = None) -> StepReader:
        """Return a reader of the steps; see `Alternatives.check` for errors."""
        plan = self._plan
        names = [stream.name for stream in plan.streams]
        return StepReader(plan.caches, names, plan.seed, Alternatives.for_caches(choose, plan.caches))


def warn_of_earlier_epoch(epoch: int, loaded: int) -> None:
    """Warn if `set_epoch(epoch)` discards the state of a later epoch, `loaded`."""
    if epoch < loaded:
        warnings.warn(
            f"set_epoch({epoch}) discards the loaded state, which resumes in epoch {loaded}, so epoch {epoch} begins again. To "
            f"resume, begin the loop over epochs at {loaded}. Lightning Fabric's setup_dataloaders begins it at 0, so use a "
            "tc.Loader without setup_dataloaders",
            stacklevel=user_level(),
        )


def show_step_options(function: _Function) -> _Function:
    """Show the options of `StepSampler` in a signature in place of `**steps`."""
    signature = inspect.signature(function)
    parameters = [value for value in signature.parameters.values() if value.kind != value.VAR_KEYWORD]
    options = [
        value for value in inspect.signature(StepSampler).parameters.values() if value.kind == value.KEYWORD_ONLY
    ]
    vars(function)["__signature__"] = signature.replace(parameters=[*parameters, *options])
    return function


def _lightning_loop() -> Any:
    """Return the loop of Lightning that called `set_epoch`, or None."""
    # Lightning passes the epoch alone, through a function; only its loop knows whether it resumes
    caller = sys._getframe(2).f_back
    loop = None if caller is None else caller.f_locals.get("self")
    return loop if type(loop).__module__.startswith(("lightning.pytorch.loops.", "pytorch_lightning.loops.")) else None


def _num_resumed(loop: Any) -> int:
    """Return the batch of an epoch at which Lightning resumes, or 0."""
    batches = loop.epoch_loop.batch_progress
    number: int = batches.current.processed  # one less than `ready` if the checkpoint was saved within a step
    # a checkpoint saved in a hook of an epoch's last batch resumes in this epoch, if a new batch size gives it more batches
    is_over = batches.is_last_batch and number == batches.current.ready
    is_over = is_over and (batches.current.completed == number or number >= loop.max_batches)
    return number if getattr(loop, "_loaded_from_state_dict", False) and not is_over else 0


class _StepIterator(Iterator[Step | None]):
    """Iterator over the remaining steps of an epoch, with torchdata's state methods."""

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler
        self._scheduled: deque[Any] | None = None
        self._at: Position | None = None  # None before the first step
        self._end = 0  # the number of the step before which a loader's loop ends
        self._num_moves = -1
        self._num_steps = 0
        self._num_used = 0  # steps of a loaded state that another data loader must skip
        # steps at the last `state_dict`; None unless its first call was before the first step
        self._num_saved: int | None = None

    def __next__(self) -> Step | None:
        sampler, plan = self._sampler, self._sampler._plan
        # a data loader may create several iterators and use only one, so the first step begins the epoch
        if self._at is None:
            self._at, self._scheduled = sampler._beginning(), sampler._scheduled
            self._end = sampler._end_of_loop(self._at)
            if self._scheduled is None and sampler._is_resumed:
                self._num_used = self._at.step - self._at.began
            self._leave()
        if self._num_used:
            # accelerate skips batches from the beginning of the epoch
            self._num_used -= 1
            return None
        if plan.is_over(self._at) if self._scheduled is None else self._at.step >= self._end:
            if self._num_moves == sampler._num_moves:
                self._leave()
            raise StopIteration
        step, self._at = plan.step(self._at)
        if self._scheduled is not None:
            self._at = plan.settle(self._at)
            self._scheduled.append((step, self._at))
        self._num_steps += 1
        return step

    def _leave(self) -> None:
        """Make the sampler's next iteration begin the next epoch."""
        # a TorchLoader moves the sampler itself
        if self._scheduled is None and self._at is not None:
            self._sampler._move(self._sampler._plan.next_epoch(self._at), is_elsewhere=True)
            self._sampler._requested_epoch = None
        self._num_moves = self._sampler._num_moves

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step, like `tc.Loader.state_dict`. After an epoch, return the state at its end.

        Raises:
            ValueError: torchdata has `snapshot_every_n_steps` above 1.
        """
        # with workers, torchdata calls this before the first step, and then at each snapshot
        if self._num_saved is not None and self._num_steps > self._num_saved + 1:
            # torchdata would skip the batches after a snapshot by their number, whatever the batch size is then
            raise ValueError("a StepSampler resumes only with snapshot_every_n_steps=1, which is torchdata's default")
        if self._num_steps == 0 or self._num_saved is not None:
            self._num_saved = self._num_steps
        return self._sampler._plan.state(self._sampler._beginning() if self._at is None else self._at)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after a state's last step, or in the requested epoch. See `Plan.load` for errors."""
        sampler, plan = self._sampler, self._sampler._plan
        self._at = position = plan.load(state)
        requested = sampler._requested_epoch
        if requested is None or requested == position.epoch:
            self._leave()
            return
        warn_of_earlier_epoch(requested, position.epoch)
        begin = replace(plan.next_epoch(position), epoch=requested)
        if plan.is_over(position):  # no step of the state's epoch remains
            sampler._move(begin, is_elsewhere=True)
        else:
            self._at = begin
            self._leave()
