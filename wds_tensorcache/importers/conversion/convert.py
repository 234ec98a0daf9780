"""Read one sample of a source, trim and narrow its tensors, and pack it for a shard."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.importers.narrow import narrow as narrow_tensor
from wds_tensorcache.importers.source import SourceSample
from wds_tensorcache.importers.trim import trim as trim_sample
from wds_tensorcache.shards.names import FIELD, MAX_MEMBER_NBYTES, hashed_key, older_key
from wds_tensorcache.shards.packed_sample import PackedSample
from wds_tensorcache.storage.system import SHORTAGES

Item = tuple[int, bool]  # index of a sample in the source, and whether to test which tensors could be narrowed


class LoadError(Exception):
    """A file that cannot be read, unlike an OSError of the writer, which always ends the import."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


BAD_SAMPLE = (TensorCacheError, LoadError, RecursionError)  # errors of one sample; the import may continue


@dataclass(slots=True)
class Converted:
    """A sample to write, and the bytes of its tensors: stored, and saved by each conversion."""

    packed: PackedSample
    names: frozenset[str]  # of the entries, if the sample is a dict, and of its members, such as `.txt`
    nbytes: int = 0
    nbytes_narrowed: int = 0
    nbytes_trimmed: int = 0
    nbytes_narrowable: int | None = None  # None if it was not tested


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversion of samples.

    Args:
        keys, samples: The samples of the source, and their keys.
        pack: Function that packs a sample, such as `ShardWriter._pack`.
        narrow, masks, drop_padding: The options of `import_cache`.
        check: Function that raises OSError if descriptors or memory are short, such as `SourceFolder.check_shortage`.
    """

    keys: Sequence[str]
    samples: Sequence[SourceSample]
    pack: Callable[..., PackedSample]
    narrow: bool
    masks: dict[str, str]
    drop_padding: bool
    check: Callable[[], None]

    def __call__(self, item: Item) -> Converted | Exception:
        """Read and pack a sample; return the error if the sample is bad.

        Raises:
            OSError: Descriptors or memory are short.
        """
        index, is_probed = item
        result: Converted | Exception
        try:
            result = self._convert(self.keys[index], self.samples[index], is_probed)
        except (TensorCacheError, RecursionError) as exc:
            result = exc
        except OSError as exc:
            if exc.errno in SHORTAGES:
                raise
            result = LoadError(exc)
        except MemoryError as exc:
            raise OSError(errno.ENOMEM, f"{self.samples[index].name}: not enough memory") from exc
        self.check()
        return result

    def _convert(self, key: str, sample: SourceSample, is_probed: bool) -> Converted:
        try:
            loaded = sample.load()
        except (TensorCacheError, ImportError, MemoryError, OSError, RecursionError):
            raise
        except Exception as exc:  # hostile files may have any values
            raise FormatError(f"cannot be decoded: {exc!r:.300}") from exc
        for suffix in loaded.members:
            if suffix == FIELD or suffix.endswith(f".{FIELD}"):
                raise FormatError(f"member {suffix!r:.100} has a name that is reserved for caches")
        value, nbytes_narrowed, nbytes_trimmed = loaded.value, 0, 0
        nbytes_narrowable = 0 if is_probed and not self.narrow else None
        if self.masks:
            value, nbytes_trimmed = trim_sample(value, self.masks, self.drop_padding)

        def convert(leaf: Any) -> Any:
            nonlocal nbytes_narrowed, nbytes_narrowable
            if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
                return leaf  # packing refuses a sparse tensor, and says where it is
            narrowed = narrow_tensor(leaf)
            saved = leaf.nbytes - narrowed.nbytes
            if self.narrow:
                nbytes_narrowed += saved
                return narrowed
            nbytes_narrowable = (nbytes_narrowable or 0) + saved
            return leaf

        if self.narrow or is_probed:
            value = rebuild(value, convert)
        entries = map(str, value) if isinstance(value, dict) else ()
        names = frozenset((*entries, *(f".{suffix}" for suffix in loaded.members)))
        if older_key(key) and any(len(f"{key}.{suffix}") > MAX_MEMBER_NBYTES for suffix in loaded.members):
            key = hashed_key(sample.name)  # at most 80 characters instead of 88, so that the members' names fit
        packed = self.pack(key, value, loaded.members)
        nbytes = sum(cache.layout.nbytes - cache.layout.data_begin for cache in packed.caches)
        return Converted(packed, names, nbytes, nbytes_narrowed, nbytes_trimmed, nbytes_narrowable)
