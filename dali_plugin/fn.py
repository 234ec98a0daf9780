"""Functions for `@pipeline_def`: tensors of a cache as nodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nvidia.dali import fn
from nvidia.dali.pipeline import Pipeline

from dali_plugin.source import TensorCacheSource

__all__ = ["tensorcache"]


def tensorcache(
    cache: Any,
    tensors: Iterable[str] | None = None,
    members: Iterable[str] = (),
    *,
    device: str = "cpu",
    parallel: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Return a node for each tensor, for each member, and one with the numbers of the samples; in a pipeline's definition.

    Args:
        cache: A `TensorCacheSource`, or what one is made of together with `tensors`, `members` and `options`; the batch
            size is the pipeline's.
        device: `"gpu"` gives the tensors on the pipeline's GPU; members and numbers are on the CPU.
        parallel: Let DALI's worker processes (`py_num_workers`, spawned) read batches.

    Returns:
        Nodes in the order of the source's `outputs`. bf16, fp8, complex and bool are integers of their width in the
        pipeline; `TensorCacheIterator` gives them their dtype back.
    """
    pipeline: Any = Pipeline.current()  # type: ignore[no-untyped-call]
    if pipeline is None:
        raise RuntimeError("tensorcache() makes nodes: call it in the function that @pipeline_def decorates")
    if isinstance(cache, TensorCacheSource):
        source = cache
        if source.batch_size != pipeline.max_batch_size:
            raise ValueError(f"batches of {source.batch_size} for a pipeline of batch_size={pipeline.max_batch_size}")
    else:
        depth = pipeline.prefetch_queue_depth  # an int, or one for each of DALI's stages
        options.setdefault("keep", 4 + (max(depth.values()) if isinstance(depth, dict) else depth))
        source = TensorCacheSource(cache, tensors, members, batch_size=pipeline.max_batch_size, **options)
    pipeline.tensorcache_source = source  # where TensorCacheIterator looks for it
    nodes = fn.external_source(
        source=source,
        num_outputs=source.num_outputs,
        batch=True,
        batch_info=True,
        parallel=parallel,
        no_copy=not parallel or None,
    )
    if device == "gpu":
        nodes = [node.gpu() if at < len(source.tensors) else node for at, node in enumerate(nodes)]
    return tuple(nodes)
