"""`BatchInfo`: the record of a batch, for transforms and for trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from wds_tensorcache.errors import list_names
from wds_tensorcache.reading.choose import Choices, Randomness
from wds_tensorcache.reading.collate import Pad, as_collate
from wds_tensorcache.reading.schema import name_matcher

Array = np.ndarray[Any, Any]
_NUM_INDICES = 8  # indices that the repr shows


class BatchInfo:
    """Record of a batch's samples, epoch and step; do not change it.

    Records are equal if keys, indices, padding, epoch, step, source, seeds and choices are equal.

    Attributes:
        indices: Sample indices in the cache, int64 `[B]`, read-only.
        is_padding: True for each row that is padding, bool `[B]`, on the batch's device; in a pickled copy, on the CPU.
            Training should ignore these rows. `read_batch_with_info` makes no padding rows.
        epoch, step: Epoch and step of a loader's batch; steps are numbered through all epochs. With `read_batch_with_info`,
            both are 0.
        source: Name of the batch's cache in `mix`, or value of its bucket in `bucket_by`. With both, a tuple of name and value;
            with neither, None.
        cache: Cache of the samples; None in a copy by pickle or `copy`, which has keys, shapes, seeds and choices.

    Threads/fork/pickle: safe everywhere.
    """

    # Not a dataclass: to move a dataclass to a device, trainers rebuild it field by field. They move this record by its `to`.

    # set only in a copy without a cache
    _keys: Sequence[str] = ()
    _shapes: Mapping[str, torch.Tensor] = {}
    _lengths: Mapping[str, int] = {}
    _choices = Choices({}, {})

    def __init__(
        self,
        indices: Array,
        is_padding: torch.Tensor,
        epoch: int = 0,
        step: int = 0,
        source: object = None,
        cache: Any = None,
        *,
        collate: Any = None,
        randomness: Randomness | None = None,
        edits: Sequence[Any] = (),
    ) -> None:
        self.indices: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = indices.copy()
        self.indices.flags.writeable = False
        self.is_padding = is_padding
        self.epoch, self.step, self.source, self.cache = epoch, step, source, cache
        # None if the batch was collated by a function
        self._collate = None if collate is None or callable(collate) else as_collate(collate, 0)
        self._randomness = randomness or Randomness(epochs=epoch)
        self._edits = list(edits)  # transforms that have run and changed shapes, in order

    @property
    def keys(self) -> list[str]:
        """Keys of the samples, in the order of the rows."""
        if self.cache is None:
            return list(self._keys)
        keys = self.cache.keys()
        return [keys[index] for index in self.indices.tolist()]

    @property
    def shapes(self) -> dict[str, torch.Tensor]:
        """Shapes before padding, by tensor name, int64 `[B, ndim]` on the CPU.

        Tensors that differ in their number of dimensions, or that all samples of the batch lack, are left out. The shape of a
        tensor that a sample lacks is zeros. After `tc.drop_text` and `tc.sample_moments`, the shapes describe the tensors in
        the batch.
        """
        return self._held()[0]

    def _held(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Return `shapes`, and the padded lengths of tensors that transforms reshaped."""
        stored = self._shapes_in_cache() if self.cache is not None else self._shapes
        shapes, lengths = {name: part.clone() for name, part in stored.items() if part is not None}, dict(self._lengths)
        for transform in self._edits:
            transform.edit_shapes(shapes, lengths, self)
        return shapes, lengths

    def _shapes_in_cache(self) -> dict[str, torch.Tensor | None]:
        request = self.cache._request_chosen(self.indices, self._randomness)
        return self.cache._shapes(request)  # type: ignore[no-any-return]

    @property
    def seeds(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """A random seed for each row, int64 `[B]`, in `[0, 2^63)`.

        A seed depends only on the loader's seed, the epoch and the sample index: not on the batch size, the ranks or the
        position in the batch. With `repeats`, and with weights in `mix`, the number of the pass over the sample's cache
        replaces the epoch. So a sample has a different seed in each pass. In a mix with weights of samples, a pass is as many
        draws as the cache or bucket has samples. A sample that `weights` draw twice in an epoch has the same seed twice. A row
        that fills an epoch's last step has the seed of the row that it repeats.
        """
        return self._randomness.seeds(self.indices)

    @property
    def choices(self) -> Choices:
        """Index of each row's chosen alternative, by name, int64 `[B]`. Empty without `choose=`.

        Each access chooses again, with the same result. The cache must be open, or this record a pickled copy.
        """
        if self.cache is None or not self._randomness.alternatives.groups:
            return self._choices
        request = self.cache._request_chosen(self.indices, self._randomness)
        return request.named_choices()  # type: ignore[no-any-return]

    def mask(self, name: str) -> torch.Tensor:
        """Return the mask of a padded tensor, bool `[B, T]`: True for data.

        The mask is on the batch's device. T is the length of the rows after padding: a length in `tc.pad(to=…)`, or else the
        length of the longest row. A sample that lacks the tensor has no data. After `tc.drop_text`, this is the mask of the
        texts in the batch. Any other transform that changes lengths must make its own mask.

        Raises:
            KeyError: No tensor has this name, or samples differ in its number of dimensions. Or this record is a pickled copy,
                and no sample of the batch has the tensor.
            ValueError: The tensor has no dimensions.
        """
        shapes, held_lengths = self._held()
        if name not in shapes and self._is_lacking(name):
            shapes = {name: torch.zeros((len(self.indices), 1), dtype=torch.int64, device="cpu")}  # no sample has it
        if name not in shapes:
            fault = f"no tensor {name!r:.100} with the same number of dimensions in all samples of the batch"
            raise KeyError(f"{fault}; there are {list_names(shapes, name)}")
        if not shapes[name].shape[1]:
            raise ValueError(f"tensor {name!r} has no dimensions, so it is not padded and has no mask")
        lengths = shapes[name][:, :1]
        length = held_lengths[name] if name in held_lengths else self._length(name, lengths)
        mask = torch.arange(length, device=lengths.device) < lengths
        return _move(mask, self.is_padding.device)

    def _length(self, name: str, lengths: torch.Tensor) -> int:
        """Return the length of a tensor's rows after padding."""
        way, longest = self._way(name), int(lengths.max())
        return way.length(longest) if isinstance(way, Pad) else longest

    def _way(self, name: str) -> str | Pad | None:
        return None if self._collate is None else self._collate.way(name)

    def _is_lacking(self, name: str) -> bool:
        """Return whether the cache has the tensor, but no row does."""
        if self.cache is None or name in self._shapes_in_cache():
            return False
        patterns = self._randomness.alternatives.patterns_for([name])
        return any(map(name_matcher(patterns), self.cache._batch_names()))

    def to(self, device: torch.device | str | None = None, non_blocking: bool = False) -> BatchInfo:
        """Return a copy whose `is_padding` is on `device`. None leaves it where it is.

        Lightning and accelerate call this when they move a batch.
        """
        moved = BatchInfo.__new__(BatchInfo)
        vars(moved).update(vars(self), is_padding=_move(self.is_padding, device, non_blocking))
        return moved

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchInfo):
            return NotImplemented
        return (
            (self.epoch, self.step, self.source, self.keys) == (other.epoch, other.step, other.source, other.keys)
            and np.array_equal(self.indices, other.indices)
            and torch.equal(self.is_padding.cpu(), other.is_padding.cpu())
            and np.array_equal(self.seeds, other.seeds)
            and self.choices == other.choices
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return a summary of bounded length."""
        indices = ", ".join(map(str, self.indices[:_NUM_INDICES].tolist())) + ", …" * (len(self.indices) > _NUM_INDICES)
        cache = "None" if self.cache is None else f"{type(self.cache).__name__} of {len(self.cache):,} samples"
        return (
            f"BatchInfo({len(self.indices):,} samples, {int(self.is_padding.sum()):,} of them padding, indices=[{indices}], "
            f"epoch={self.epoch}, step={self.step}, source={self.source!r:.100}, cache={cache})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # arrays, because torch would send a file descriptor for each tensor
        shapes, lengths = self._held()
        return vars(self) | {
            "cache": None,
            "is_padding": self.is_padding.cpu().numpy(),
            "_edits": [],
            "_randomness": Randomness(self._randomness.seed, self._randomness.epochs),
            "_keys": self.keys,
            "_shapes": {name: part.numpy() for name, part in shapes.items()},
            "_lengths": lengths,
            "_choices": self.choices,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        shapes = {name: torch.from_numpy(part) for name, part in state["_shapes"].items()}
        vars(self).update(state, is_padding=torch.from_numpy(state["is_padding"]), _shapes=shapes)
        self.indices.flags.writeable = False


def _move(mask: torch.Tensor, device: torch.device | str | None, non_blocking: bool = False) -> torch.Tensor:
    if device is not None and torch.device(device).type == "cuda" and mask.device.type == "cpu":
        # A copy from pageable memory would wait for all work that is queued on the GPU.
        mask, non_blocking = mask.pin_memory(), True
    return mask.to(device, non_blocking=non_blocking)


default_collate_fn_map.setdefault(BatchInfo, lambda batch, *, collate_fn_map=None: list(batch))
