"""NVIDIA DALI for caches of nested tensors: any tensors of a cache as nodes of a pipeline, and the nested batch back.

`TensorCacheSource` is a source for `fn.external_source`, `fn.tensorcache` one line in a pipeline, `TensorCacheIterator`
gives the batches in the structure that was written. Only `fn` and the iterator need DALI itself.
"""

from typing import Any

from dali_plugin.source import TensorCacheSource
from dali_plugin.stream import TensorCacheStream

__all__ = ["TensorCacheIterator", "TensorCacheSource", "TensorCacheStream", "fn"]

INSTALL = "this needs NVIDIA DALI: pip install nvidia-dali-cuda130 (runs without a GPU too)"


def __getattr__(name: str) -> Any:
    if name not in ("TensorCacheIterator", "fn"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        importlib.import_module("nvidia.dali")
    except ImportError as exc:
        raise ImportError(INSTALL) from exc
    if name == "fn":
        return importlib.import_module("dali_plugin.fn")
    return importlib.import_module("dali_plugin.iterator").TensorCacheIterator
