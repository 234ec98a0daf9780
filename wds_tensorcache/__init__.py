"""Caches of nested tensors in ordinary WebDataset tar shards: loaded lazily, safe to open, readable by stock tools."""

# Hazard: it cannot be imported after the main thread has ended, when other threads may still import modules of this package.
import concurrent.futures.thread as _  # noqa: F401
from importlib import import_module as _import_module
from typing import Any as _Any

__version__ = "0.1.0"

# The public names by their modules, which are imported on first use: importing torch takes more than a second, during which
# `tensorcache --help` would not answer. Type checkers read `__init__.pyi`.
_NAMES = {
    "checking.repair": "repair",
    "checking.report": "Fault RepairReport Report",
    "checking.verify": "verify",
    "codec.lazy": "LazyArray LazyTensor",
    "codec.sample": "decode_sample encode_sample",
    "codec.tree": "flatten realize",
    "errors": (
        "BatchError EncodeError FormatError InvalidKeyError MissingShardError RemoteError StaleCacheError TarFormatError "
        "TensorCacheError UnsafeSkeletonError"
    ),
    "integrations.exporting.export_cache": "ExportReport export_cache",
    "integrations.importers.import_cache": "import_cache",
    "integrations.importers.report": "ImportReport Skipped",
    "integrations.ray.batches": "ray_collate ray_from_torch ray_sample ray_table ray_to_torch",
    "integrations.ray.build": "build_ray",
    "integrations.ray.read": "read_ray",
    "integrations.ray.write": "write_ray",
    "integrations.torch_dataloader": "StepDataset TorchLoader torch_loader",
    "integrations.webdataset": "Decode decode encoder",
    "integrations.webdataset_resumable": "ResumablePipeline",
    "integrations.webdataset_tar": "TarSamples tarfile_to_samples",
    "reading.base_cache": "BatchInfo Cache",
    "reading.batch.collate": "Pad pad",
    "reading.cache": "TensorCache",
    "reading.choose": "Choices",
    "reading.description": "Description TensorDescription ValueDescription",
    "reading.join": "JoinedCache join",
    "reading.lookup.keys": "KeysView",
    "reading.open_cache": "open",
    "reading.schema": "Entry TensorSchema",
    "reading.structure": "nest",
    "shards.index": "ShardIndex",
    "shards.names": "original_name safe_key",
    "sharing.dataset": "SharedDataset",
    "sharing.manage": "SharedInfo shared_clear shared_list",
    "sharing.samples": "SharedStats",
    "training.buckets": "ByLength by_length",
    "training.loader": "Loader",
    "training.order": "EpochOrder",
    "training.stats": "LoaderStats",
    "training.sampler": "StepSampler",
    "training.plan": "RowCounts Step",
    "training.transforms": "DropText SampleMoments drop_text sample_moments",
    "writing.build": "build",
    "writing.index_shard": "write_index",
    "writing.copy_shards": "CopyReport",
    "writing.merge": "merge reshard",
    "writing.versions": "drop",
    "writing.writer": "ShardWriter",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> _Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
