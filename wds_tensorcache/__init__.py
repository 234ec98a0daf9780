"""Caches of nested tensors in ordinary WebDataset tar shards: lazy, safe, and readable by every stock tool."""

from wds_tensorcache.codec.lazy import LazyTensor
from wds_tensorcache.codec.lazy_array import LazyArray
from wds_tensorcache.codec.realize import realize
from wds_tensorcache.codec.sample import decode_sample, encode_sample
from wds_tensorcache.errors import EncodeError, FormatError, KeyRuleError, TensorCacheError, UnsafeSkeletonError
from wds_tensorcache.integrations import collate
from wds_tensorcache.integrations.webdataset import decode, encoder

__all__ = [
    "EncodeError",
    "FormatError",
    "KeyRuleError",
    "LazyArray",
    "LazyTensor",
    "TensorCacheError",
    "UnsafeSkeletonError",
    "decode",
    "decode_sample",
    "encode_sample",
    "encoder",
    "realize",
]

collate.register()
