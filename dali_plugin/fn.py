"""Functions that add a cache's tensors to a pipeline as nodes. Call them in a function decorated with `@pipeline_def`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from nvidia.dali import fn
from nvidia.dali.pipeline import Pipeline, do_not_convert
from nvidia.dali.types import Constant, DALIDataType
from torch.utils.data import IterableDataset

from dali_plugin.native import NativeReader
from dali_plugin.source import TensorCacheSource
from dali_plugin.stream import TensorCacheStream
from dali_plugin.tensors import is_tensor, match_names

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
    """Add a cache to the pipeline that is being defined.

    Args:
        cache: A `TensorCacheSource`, a cache, its shards, or a stream (a `wds.DataPipeline` that ends in `tc.decode()`, see
            `TensorCacheStream`). Anything but a source is wrapped in a source with the pipeline's batch size. Several
            pipelines may take the same source, because each pipeline reads with its own copy,
            `pipeline.tensorcache_source`. Call `nest` of this copy: the source that you passed keeps no batches.
        tensors, members, options: As for `TensorCacheSource` or `TensorCacheStream`, if `cache` is not already a source.
        device: `"gpu"` copies the tensors to the pipeline's GPU; arrays of numpy, members and indices stay on the CPU. Batches
            of a cache or its shards are then read into page-locked memory, unless `parallel` is True.
        parallel: Let DALI's worker processes read batches. `py_num_workers` of the pipeline is their number. DALI forks them by
            default, but not after the process has used CUDA: then pass `py_start_method="spawn"` to the pipeline. DALI raises
            an error of a worker as a plain Exception, whose text contains the worker's traceback.
        as_float: Names of bfloat16 tensors to convert exactly to float32, for operators that compute.
        layouts: DALI's layouts of tensors by name: `{"latent": "CHW"}`. Without a layout, `fn.flip` and similar operators
            treat `[4, 64, 64]` as an image with 4 rows.

    Returns:
        A node for each tensor, each member and the sample indices, in the order of the source's `outputs`. In the pipeline,
        bf16, fp8, complex and bool are integers of the same width. Elements of other widths than 1, 2, 4 or 8 bytes are uint8,
        with their bytes as an additional last dimension. `TensorCacheIterator` restores their dtypes. Operators may move these
        bits, but must not compute with them; use `as_float=[…]` to compute with bfloat16. The iterator raises TypeError if an
        operator changed the integer dtype. It cannot detect a computation that keeps this dtype, as `fn.resize` does.

    Raises:
        ValueError: The pipeline already reads a cache, or its batch size differs from the source's batch size. Or `device` is
            unknown, a name occurs twice, or `parallel` is True for a stream, which only one process can read.
        TypeError: `cache` is a source, but `tensors`, `members` or `options` are also given. A tensor in `as_float` is not
            bfloat16, or an option is unknown.
        KeyError: A name in `tensors`, `members`, `as_float` or `layouts` is unknown.
        RuntimeError: No pipeline is being defined.
        Exception: The source that is made for `cache` raised it; see `TensorCacheSource` and `TensorCacheStream`.
        RuntimeError (when a batch is requested): A tensor's number of dimensions differs within a batch, which DALI refuses.
    """
    pipeline = _current_pipeline("tensorcache", device)
    if isinstance(cache, (TensorCacheSource, TensorCacheStream)):
        source: Any = cache.for_pipeline()
        if tensors is not None or members or options:
            raise TypeError("the source has its tensors, members and options already; leave them out here")
    else:
        options.setdefault("batch_size", pipeline.max_batch_size)
        if isinstance(cache, IterableDataset):
            source = TensorCacheStream(cache, tensors, members, **options)
        else:
            options.setdefault("pin_memory", device == "gpu" and not parallel)
            source = TensorCacheSource(cache, tensors, members, **options)
    if source.batch_size != pipeline.max_batch_size:
        problem = f"batches of {source.batch_size} for a pipeline of batch_size={pipeline.max_batch_size}"
        raise ValueError(f"{problem}; give source and pipeline the same batch_size")
    source.use_float(as_float)
    depth = pipeline.prefetch_queue_depth  # an int, or an int for each of DALI's stages
    source.keep_at_least(4 + (max(depth.values()) if isinstance(depth, dict) else depth))
    layouts = dict(layouts or {})
    match_names(layouts, source.tensors, "tensor of this source")
    if parallel and isinstance(source, TensorCacheStream):
        raise ValueError("parallel=True needs a cache, because only one process can read a stream")
    pipeline.tensorcache_source = source  # TensorCacheIterator looks for the source there
    if isinstance(source, TensorCacheSource):
        if parallel:
            source.read_on_request()
        else:
            source.layouts, layouts = layouts, {}
            source.device_id = pipeline.device_id
    # Hazard: DALI's operators and their outputs refer to each other. If they referred to the source, all batches that it keeps
    # would stay in memory until the garbage collector finds that cycle. The pipeline keeps the source alive.
    nodes: Any = fn.external_source(
        source=source if parallel else weakref.proxy(source),
        num_outputs=source.num_outputs,
        batch=True,
        batch_info=True,
        parallel=parallel,
        no_copy=not parallel or None,
        # hazard: with a layout, even with "", DALI replaces its tensors by new objects (see `as_dali`)
        layout=[layouts.get(name) for name in source.outputs],  # type: ignore[misc]
    )
    for at, name in enumerate(source.tensors):
        node = nodes[at].gpu() if device == "gpu" and is_tensor(source.schema[name]) else nodes[at]
        nodes[at] = _as_floats(node) if name in source.as_float else node
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
    """Add DALI's `fn.readers.webdataset` to the pipeline that is being defined. It reads shards without Python.

    The tensors of a sample arrive as one array of bytes. `TensorCacheIterator` makes tensors of it on the same device. They are
    views of the array where alignment, dtype and shapes allow it. Numpy arrays stay on the CPU. Operators in the pipeline see
    only the bytes. To augment tensors, use `tensorcache`.

    Args:
        paths: Whole local shards: a cache, or anything that `tc.open` accepts.
        index_paths: DALI's indexes of the shards; by default, the `.idx` of each shard. For a shard whose index is missing or
            stale, an index is made for this pipeline in a temporary folder.
        tensors: Names of the tensors in the batches; all by default. DALI reads all tensors in any case.
        members: Suffixes of other members, for example `["jpg"]`; their bytes arrive unchanged.
        device: `"gpu"` sends the bytes to the pipeline's GPU.
        shuffle, seed: Shuffle within a buffer of `initial_fill` samples (1,024 by default), not the whole epoch.
        rank, world_size: Rank of this process, and number of ranks. Each rank reads one part of the samples, a different
            part in each epoch unless `stick_to_shard=True`. All ranks have the same number of batches.
        last_batch: As for `TensorCacheSource`, except `"wrap"`; padding repeats the last sample.
        options: More options of `fn.readers.webdataset`: `initial_fill`, `prefetch_queue_depth`, `dont_use_mmap` … Instead of
            `shuffle`, `shuffle_after_epoch` shuffles the shards, and keeps the order of the samples in each.

    Returns:
        Nodes of dtype uint8: the tensors' bytes `[n]`, each member, and the sample's origin. If `device` is `"gpu"` and
        a tensor is a numpy array, the second node is the same bytes on the CPU. Zeros may follow the bytes of the tensors and
        of the origin, so that all samples of a batch have the same length. The names of the nodes
        in `outputs` of `TensorCacheIterator` are `"packed"`, `"packed_host"` for the bytes on the CPU, the members' suffixes,
        and `"number"`.

    Raises:
        KeyError: A tensor or member is unknown; the message lists similar names. Or `fn.readers.webdataset` lacks an option.
        TypeError: `paths` is a joined cache, or another cache without shards.
        BatchError: Some samples lack a tensor or member.
        ValueError: `paths` is a view of some samples, or contains a url or a shard twice. A name occurs twice, there are no
            samples, or fewer than ranks, or with `"drop"` fewer than `batch_size * world_size`. `index_paths` does not have
            one existing file for each shard. An argument is out of range, or the pipeline already reads a cache.
        RuntimeError: No pipeline is being defined.
        Exception: `tc.open` raised it.
        BatchError (when a batch is requested): A tensor's dtype differs within a batch.
        FormatError (when a batch is requested): A shard is damaged or has changed.
    """
    pipeline = _current_pipeline("native_reader", device)
    steps = {"batch_size": pipeline.max_batch_size, "shuffle": shuffle, "seed": seed, "rank": rank}
    steps |= {"world_size": world_size, "last_batch": last_batch}
    reader = NativeReader(paths, index_paths, tensors, members, steps)
    pipeline.tensorcache_source = reader
    return reader.nodes(device, options)


def _current_pipeline(name: str, device: str) -> Any:
    pipeline: Any = Pipeline.current()  # type: ignore[no-untyped-call]
    if pipeline is None:
        raise RuntimeError(f"{name}() makes nodes of a pipeline; call it in the function that @pipeline_def decorates")
    if device not in ("cpu", "gpu"):
        raise ValueError(f"device={device!r}, expected 'cpu' or 'gpu'")
    if hasattr(pipeline, "tensorcache_source"):
        raise ValueError("the pipeline already reads a cache; to read several, join them first: tc.join([…])")
    return pipeline


def _as_floats(node: Any) -> Any:
    """Convert bfloat16 bits to float32."""
    # the bits of a bfloat16 are the upper half of the bits of the equal float32
    upper: Any = fn.cast(fn.reinterpret(node, dtype=DALIDataType.UINT16), dtype=DALIDataType.UINT32)
    return fn.reinterpret(upper * Constant(np.uint32(1 << 16)), dtype=DALIDataType.FLOAT)  # type: ignore[no-untyped-call]
