"""Functions for `@pipeline_def`: tensors of a cache as nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from nvidia.dali import fn
from nvidia.dali.pipeline import Pipeline, do_not_convert
from nvidia.dali.types import Constant, DALIDataType
from torch.utils.data import IterableDataset

from dali_plugin.carriers import known_names
from dali_plugin.native import NativeReader
from dali_plugin.source import TensorCacheSource
from dali_plugin.stream import TensorCacheStream

__all__ = ["native_reader", "tensorcache"]


@do_not_convert
def tensorcache(
    cache: Any,
    tensors: Iterable[str] | None = None,
    members: Iterable[str] = (),
    *,
    device: str = "cpu",
    parallel: bool = False,
    as_float: Iterable[str] = (),
    layouts: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Return a node for each tensor, for each member, and one with the numbers of the samples; in a pipeline's definition.

    Args:
        cache: A `TensorCacheSource`, or what one is made of together with `tensors`, `members` and `options`; the batch
            size is the pipeline's. Or a stream, a `wds.DataPipeline` that ends in `tc.decode()`: see `TensorCacheStream`.
        device: `"gpu"` gives the tensors on the pipeline's GPU, by way of page-locked memory; members and numbers are on
            the CPU.
        as_float: bfloat16 tensors whose nodes are float32, exactly, for operators that compute.
        layouts: DALI's names of the dimensions of some tensors, by which operators know rows from columns:
            `{"latent": "CHW"}`. Without, `fn.flip` and others take `[4, 64, 64]` for an image of 4 rows.
        parallel: Let DALI's worker processes (`py_num_workers`, spawned) read batches.

    Returns:
        Nodes in the order of the source's `outputs`. bf16, fp8, complex and bool are integers of their width in the
        pipeline; `TensorCacheIterator` gives them their dtype back. Operators may move these bits, but not compute with
        them: `as_float=[…]` is for that. The iterator sees that they have if the dtype is another one then; it cannot if
        they made integers of integers, as `fn.resize` does.

    Raises:
        ValueError: The pipeline has such nodes already, or is for batches of another size.
        TypeError: A source that is ready, and `tensors` or options of one.
    """
    pipeline = _current("tensorcache", device)
    if isinstance(cache, (TensorCacheSource, TensorCacheStream)):
        source: Any = cache
        if tensors is not None or members or options:
            raise TypeError("the source has its tensors, members and options already")
        if source.batch_size != pipeline.max_batch_size:
            raise ValueError(f"batches of {source.batch_size} for a pipeline of batch_size={pipeline.max_batch_size}")
    else:
        options["batch_size"] = pipeline.max_batch_size
        if isinstance(cache, IterableDataset):
            source = TensorCacheStream(cache, tensors, members, **options)
        else:
            options.setdefault("pin_memory", device == "gpu" and not parallel)
            source = TensorCacheSource(cache, tensors, members, **options)
    source.use_float(as_float)
    depth = pipeline.prefetch_queue_depth  # an int, or one for each of DALI's stages
    source.keep_at_least(4 + (max(depth.values()) if isinstance(depth, dict) else depth))
    layouts = layouts or {}
    known_names(layouts, source.tensors, "tensor of this source")
    if parallel and isinstance(source, TensorCacheStream):
        raise ValueError("a stream is read by one process: parallel=True needs a cache")
    pipeline.tensorcache_source = source  # where TensorCacheIterator looks for it
    nodes: Any = fn.external_source(
        source=source,
        num_outputs=source.num_outputs,
        batch=True,
        batch_info=True,
        parallel=parallel,
        no_copy=not parallel or None,
        layout=[layouts.get(name, "") for name in source.outputs],
    )
    for at, name in enumerate(source.tensors):
        node = nodes[at].gpu() if device == "gpu" and source.schema[name].kind == "tensor" else nodes[at]
        nodes[at] = _floats(node) if name in source.as_float else node
    return tuple(nodes)


@do_not_convert
def native_reader(
    paths: Any,
    index_paths: Iterable[str] | None = None,
    tensors: Iterable[str] | None = None,
    members: Iterable[str] = (),
    *,
    device: str = "cpu",
    shuffle: bool = False,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    last_batch: str = "short",
    **options: Any,
) -> tuple[Any, ...]:
    """Return nodes of DALI's `fn.readers.webdataset`, which reads shards without any Python; in a pipeline's definition.

    The tensors of a sample arrive as one array of bytes. `TensorCacheIterator` cuts them out on the device where they are, as
    views; operators in the pipeline see the bytes alone. To augment tensors, use `tensorcache`.

    Args:
        paths: Whole shards on disks: a cache, or what `tc.open` takes.
        index_paths: DALI's indexes of them; by default the `.idx` beside each, made for this pipeline where there is none.
        tensors: Which of them batches have, by name; all by default. All are read.
        members: Suffixes of other members, whose bytes arrive as they are: `["jpg"]`.
        device: `"gpu"` sends the bytes to the pipeline's GPU.
        shuffle, seed: Out of a buffer of `initial_fill` samples (1,024 by default), not over the whole epoch.
        rank, world_size: Which part of every epoch this process has; which one changes each epoch, unless
            `stick_to_shard=True`. All have as many batches.
        last_batch: As of `tensorcache`, without `"wrap"`; padding repeats the last sample.
        options: Others of `fn.readers.webdataset`: `initial_fill`, `prefetch_queue_depth`, `dont_use_mmap` …

    Returns:
        Nodes of uint8: the tensors' bytes `[n]`, each member, and what says which sample it is.

    Raises:
        KeyError: An unknown tensor or member; the message has those that are spelt alike.
        ValueError: A view or a joined cache, a member that some samples lack, or fewer samples than ranks.
    """
    pipeline = _current("native_reader", device)
    reader = NativeReader(
        paths,
        index_paths,
        tensors,
        members,
        batch_size=pipeline.max_batch_size,
        rank=rank,
        world_size=world_size,
        last_batch=last_batch,
        shuffle=shuffle,
        seed=seed,
    )
    pipeline.tensorcache_source = reader
    return reader.nodes(device, options)


def _current(name: str, device: str) -> Any:
    pipeline: Any = Pipeline.current()  # type: ignore[no-untyped-call]
    if pipeline is None:
        raise RuntimeError(f"{name}() makes nodes: call it in the function that @pipeline_def decorates")
    if device not in ("cpu", "gpu"):
        raise ValueError(f"device={device!r}, expected 'cpu' or 'gpu'")
    if hasattr(pipeline, "tensorcache_source"):
        raise ValueError("the pipeline has such nodes already; join caches: tc.open([…], join='key')")
    return pipeline


def _floats(node: Any) -> Any:
    """Return float32 of the bits of bfloat16: these are its upper half."""
    upper: Any = fn.cast(fn.reinterpret(node, dtype=DALIDataType.UINT16), dtype=DALIDataType.UINT32)
    return fn.reinterpret(upper * Constant(np.uint32(1 << 16)), dtype=DALIDataType.FLOAT)  # type: ignore[no-untyped-call]
