"""NVIDIA DALI pipelines over caches. Tensors become nodes of a pipeline, and its outputs become nested batches.

`TensorCacheSource` is a source for `fn.external_source`. `fn.tensorcache` adds a cache to a pipeline in one line.
`TensorCacheIterator` returns batches in the structure that was written. `fn` and the iterator need DALI itself, and so does a
source with `pin_memory=True`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dali_plugin.source import TensorCacheSource
from dali_plugin.stream import TensorCacheStream

if TYPE_CHECKING:
    from dali_plugin import fn
    from dali_plugin.iterator import TensorCacheIterator

__all__ = ["TensorCacheIterator", "TensorCacheSource", "TensorCacheStream", "fn"]

INSTALL = "this needs NVIDIA DALI: pip install nvidia-dali-cuda130 (runs without a GPU too)"


def __getattr__(name: str) -> Any:
    if name not in ("TensorCacheIterator", "fn"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("nvidia.dali")
    except ImportError as exc:
        raise ImportError(INSTALL) from exc
    module = import_module("dali_plugin.fn" if name == "fn" else "dali_plugin.iterator")
    return module if name == "fn" else module.TensorCacheIterator
