from wds_tensorcache.checking.repair import repair
from wds_tensorcache.checking.report import Fault, RepairReport, Report
from wds_tensorcache.checking.verify import verify
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.codec.sample import decode_sample, encode_sample
from wds_tensorcache.codec.tree import flatten, realize
from wds_tensorcache.errors import (
    BatchError,
    EncodeError,
    FormatError,
    InvalidKeyError,
    MissingShardError,
    RemoteError,
    StaleCacheError,
    TarFormatError,
    TensorCacheError,
    UnsafeSkeletonError,
)
from wds_tensorcache.integrations.exporting.export_cache import ExportReport, export_cache
from wds_tensorcache.integrations.importers.import_cache import import_cache
from wds_tensorcache.integrations.importers.report import ImportReport, Skipped
from wds_tensorcache.integrations.ray.batches import ray_collate, ray_from_torch, ray_sample, ray_table, ray_to_torch
from wds_tensorcache.integrations.ray.build import build_ray
from wds_tensorcache.integrations.ray.read import read_ray
from wds_tensorcache.integrations.ray.write import write_ray
from wds_tensorcache.integrations.torch_dataloader import StepDataset, TorchLoader, torch_loader
from wds_tensorcache.integrations.webdataset import Decode, decode, encoder
from wds_tensorcache.integrations.webdataset_resumable import ResumablePipeline
from wds_tensorcache.integrations.webdataset_tar import TarSamples, tarfile_to_samples
from wds_tensorcache.reading.base_cache import BatchInfo, Cache
from wds_tensorcache.reading.batch.collate import Pad, pad
from wds_tensorcache.reading.cache import TensorCache
from wds_tensorcache.reading.choose import Choices
from wds_tensorcache.reading.description import Description, TensorDescription, ValueDescription
from wds_tensorcache.reading.join import JoinedCache, join
from wds_tensorcache.reading.lookup.keys import KeysView
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.reading.schema import Entry, TensorSchema
from wds_tensorcache.reading.structure import nest
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.names import original_name, safe_key
from wds_tensorcache.sharing.dataset import SharedDataset
from wds_tensorcache.sharing.manage import SharedInfo, shared_clear, shared_list
from wds_tensorcache.sharing.samples import SharedStats
from wds_tensorcache.training.buckets import ByLength, by_length
from wds_tensorcache.training.loader import Loader
from wds_tensorcache.training.order import EpochOrder
from wds_tensorcache.training.plan import RowCounts, Step
from wds_tensorcache.training.sampler import StepSampler
from wds_tensorcache.training.stats import LoaderStats
from wds_tensorcache.training.transforms import DropText, SampleMoments, drop_text, sample_moments
from wds_tensorcache.writing.build import build
from wds_tensorcache.writing.copy_shards import CopyReport
from wds_tensorcache.writing.index_shard import write_index
from wds_tensorcache.writing.merge import merge, reshard
from wds_tensorcache.writing.versions import drop
from wds_tensorcache.writing.writer import ShardWriter

__all__ = [
    "BatchError",
    "BatchInfo",
    "ByLength",
    "Cache",
    "Choices",
    "CopyReport",
    "Decode",
    "Description",
    "DropText",
    "EncodeError",
    "Entry",
    "EpochOrder",
    "ExportReport",
    "Fault",
    "FormatError",
    "ImportReport",
    "InvalidKeyError",
    "JoinedCache",
    "KeysView",
    "LazyArray",
    "LazyTensor",
    "Loader",
    "LoaderStats",
    "MissingShardError",
    "Pad",
    "RemoteError",
    "RepairReport",
    "Report",
    "ResumablePipeline",
    "RowCounts",
    "SampleMoments",
    "ShardIndex",
    "ShardWriter",
    "SharedDataset",
    "SharedInfo",
    "SharedStats",
    "Skipped",
    "StaleCacheError",
    "Step",
    "StepDataset",
    "StepSampler",
    "TarFormatError",
    "TarSamples",
    "TensorCache",
    "TensorCacheError",
    "TensorDescription",
    "TensorSchema",
    "TorchLoader",
    "UnsafeSkeletonError",
    "ValueDescription",
    "build",
    "build_ray",
    "by_length",
    "decode",
    "decode_sample",
    "drop",
    "drop_text",
    "encode_sample",
    "encoder",
    "export_cache",
    "flatten",
    "import_cache",
    "join",
    "merge",
    "nest",
    "open",
    "original_name",
    "pad",
    "ray_collate",
    "ray_from_torch",
    "ray_sample",
    "ray_table",
    "ray_to_torch",
    "read_ray",
    "realize",
    "repair",
    "reshard",
    "safe_key",
    "sample_moments",
    "shared_clear",
    "shared_list",
    "tarfile_to_samples",
    "torch_loader",
    "verify",
    "write_index",
    "write_ray",
]

__version__: str
