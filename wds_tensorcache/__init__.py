"""Caches of nested tensors in ordinary WebDataset tar shards.

They load lazily, are safe to open, and stock tools can read them.
Types of results, such as `LoaderStats`, are public in the modules that define them; docs/reading.md lists the modules.
Functions for Ray Data are in `wds_tensorcache.ray`.
"""

# After the main thread has ended, `concurrent.futures.thread` cannot be imported, but other threads may still need it.
import concurrent.futures.thread as _  # noqa: F401
from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"

# Module -> its public names. Modules are imported on first use: importing torch takes more than a second, during which
# `tensorcache --help` would not answer. Type checkers read `__init__.pyi`. Types of results are public where they are defined.
_NAMES = {
    "checking.repair": "repair",
    "checking.verify": "verify",
    "codec.lazy": "LazyArray LazyTensor",
    "codec.sample": "decode_sample encode_sample",
    "codec.tree": "flatten realize",
    "errors": (
        "BatchError BuildError EncodeError FormatError InvalidKeyError MissingShardError RemoteError StaleCacheError "
        "TarFormatError TensorCacheError UnsafeSkeletonError"
    ),
    "integrations.exporting": "export_cache",
    "importers.import_cache": "import_cache",
    "integrations.torch_dataloader": "StepDataset torch_loader",
    "integrations.webdataset": "decode encoder",
    "integrations.webdataset_resumable": "ResumablePipeline",
    "integrations.webdataset_tar": "tarfile_to_samples",
    "reading.collate": "pad",
    "reading.batch_info": "BatchInfo",
    "reading.cache": "Cache TensorCache",
    "reading.join": "JoinedCache join",
    "reading.open_cache": "open",
    "reading.structure": "nest",
    "shards.names": "original_name safe_key",
    "sharing.dataset": "SharedDataset",
    "sharing.manage": "shared_clear shared_list",
    "training.buckets": "by_length",
    "training.loader": "Loader",
    "training.order": "EpochOrder",
    "training.sampler": "StepSampler",
    "training.transforms": "drop_text sample_moments",
    "writing.build": "build",
    "writing.index_shard": "write_index",
    "writing.merge": "merge reshard",
    "writing.versions": "drop",
    "writing.writer": "ShardWriter",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> _Any:
    if name == "ray":
        return _import_module(f"{__name__}.ray")
    if name not in _MODULES:
        where = "; functions for Ray are in tc.ray" if "ray" in name else ""
        if name[:1].isupper():
            where = "; docs/reading.md lists the modules of types that functions return"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where}")
    value = globals()[name] = getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__, "ray"]
