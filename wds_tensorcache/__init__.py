"""Caches of nested tensors in ordinary WebDataset tar shards: lazy, safe, and readable by every stock tool."""

from wds_tensorcache.checking.repair import repair
from wds_tensorcache.checking.report import Fault, Report
from wds_tensorcache.checking.verify import verify
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.codec.sample import decode_sample, encode_sample
from wds_tensorcache.codec.tree import realize
from wds_tensorcache.errors import (
    BatchError,
    EncodeError,
    FormatError,
    KeyRuleError,
    MissingShardError,
    StaleCacheError,
    TarFormatError,
    TensorCacheError,
    UnsafeSkeletonError,
)
from wds_tensorcache.integrations import torch_collate as collate
from wds_tensorcache.integrations.torch_dataloader import StepDataset, TorchLoader, torch_loader
from wds_tensorcache.integrations.webdataset import decode, encoder
from wds_tensorcache.integrations.webdataset_resumable import resumable
from wds_tensorcache.integrations.webdataset_tar import tarfile_to_samples
from wds_tensorcache.reading.batch.nest import fill_samples, named_tensors
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.join import JoinedCache
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.shards.catalog import index
from wds_tensorcache.training.batch_info import BatchInfo
from wds_tensorcache.training.loader import Loader
from wds_tensorcache.training.order import EpochOrder
from wds_tensorcache.training.step_sampler import StepSampler
from wds_tensorcache.writing.build import build
from wds_tensorcache.writing.versions import drop
from wds_tensorcache.writing.writer import ShardWriter

__all__ = [
    "BatchError",
    "BatchInfo",
    "EncodeError",
    "EpochOrder",
    "Fault",
    "FormatError",
    "JoinedCache",
    "KeyRuleError",
    "LazyArray",
    "LazyTensor",
    "Loader",
    "MissingShardError",
    "Report",
    "ShardWriter",
    "StaleCacheError",
    "StepDataset",
    "StepSampler",
    "TarFormatError",
    "TensorCache",
    "TensorCacheError",
    "TorchLoader",
    "UnsafeSkeletonError",
    "build",
    "decode",
    "decode_sample",
    "drop",
    "encode_sample",
    "encoder",
    "fill_samples",
    "index",
    "named_tensors",
    "open",
    "realize",
    "repair",
    "resumable",
    "tarfile_to_samples",
    "torch_loader",
    "verify",
]

__version__ = "0.1.0"

collate.register()
