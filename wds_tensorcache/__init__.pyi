from wds_tensorcache import ray as ray
from wds_tensorcache.checking.repair import repair
from wds_tensorcache.checking.verify import verify
from wds_tensorcache.codec.lazy import LazyArray, LazyTensor
from wds_tensorcache.codec.sample import decode_sample, encode_sample
from wds_tensorcache.codec.tree import flatten, realize
from wds_tensorcache.errors import (
    BatchError,
    BuildError,
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
from wds_tensorcache.importers.import_cache import import_cache
from wds_tensorcache.integrations.exporting import export_cache
from wds_tensorcache.integrations.torch_dataloader import StepDataset, torch_loader
from wds_tensorcache.integrations.webdataset import decode, encoder
from wds_tensorcache.integrations.webdataset_resumable import ResumablePipeline
from wds_tensorcache.integrations.webdataset_tar import tarfile_to_samples
from wds_tensorcache.reading.batch_info import BatchInfo
from wds_tensorcache.reading.cache import Cache, TensorCache
from wds_tensorcache.reading.collate import pad
from wds_tensorcache.reading.join import JoinedCache, join
from wds_tensorcache.reading.open_cache import open
from wds_tensorcache.reading.structure import nest
from wds_tensorcache.shards.names import original_name, safe_key
from wds_tensorcache.sharing.dataset import SharedDataset
from wds_tensorcache.sharing.manage import shared_clear, shared_list
from wds_tensorcache.training.buckets import by_length
from wds_tensorcache.training.loader import Loader
from wds_tensorcache.training.order import EpochOrder
from wds_tensorcache.training.sampler import StepSampler
from wds_tensorcache.training.transforms import drop_text, sample_moments
from wds_tensorcache.writing.build import build
from wds_tensorcache.writing.index_shard import write_index
from wds_tensorcache.writing.merge import merge, reshard
from wds_tensorcache.writing.versions import drop
from wds_tensorcache.writing.writer import ShardWriter

__all__ = [
    "BatchError",
    "BatchInfo",
    "BuildError",
    "Cache",
    "EncodeError",
    "EpochOrder",
    "FormatError",
    "InvalidKeyError",
    "JoinedCache",
    "LazyArray",
    "LazyTensor",
    "Loader",
    "MissingShardError",
    "RemoteError",
    "ResumablePipeline",
    "ShardWriter",
    "SharedDataset",
    "StaleCacheError",
    "StepDataset",
    "StepSampler",
    "TarFormatError",
    "TensorCache",
    "TensorCacheError",
    "UnsafeSkeletonError",
    "build",
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
]

__version__: str
