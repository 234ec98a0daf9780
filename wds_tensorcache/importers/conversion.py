"""Conversion of the samples of a source into shards. Each worker writes whole shards."""

from __future__ import annotations

import errno
import gc
import math
import mmap
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from wds_tensorcache.codec.tree import rebuild
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.importers.report import Skipped
from wds_tensorcache.importers.shrink import narrow, trim
from wds_tensorcache.importers.source import Loaded, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder, naming
from wds_tensorcache.progress import Progress
from wds_tensorcache.shards.names import FIELD, MAX_MEMBER_NBYTES, NamedKey, hashed_key, older_key
from wds_tensorcache.storage.output import write_at_once
from wds_tensorcache.storage.system import end_with_parent
from wds_tensorcache.writing.writer import ShardWriter

_MIN_SAMPLES = 32  # starting processes takes longer than converting fewer samples
_MANY_SAMPLES, _MANY_NBYTES = 128, 1 << 26  # this many samples or bytes are worth several shards
_NUM_SHARDS = 4  # about a multiple of this, so that two or four workers end together
_NUM_PROBED = 64  # samples in which to look for tensors that could be narrowed
_LARGE_NBYTES = 1 << 17  # longer samples are written at once: other workers run while this worker waits for the disk
_POLL_S = 0.1


def plan_shards(
    indexes: Sequence[int],
    samples: Sequence[SourceSample],
    folder: SourceFolder,
    max_samples: float = math.inf,
    max_nbytes: float = math.inf,
) -> list[Sequence[int]]:
    """Divide sample indices into shards by number and file sizes."""
    shared = Counter(file for index in indexes for file in samples[index].files)
    sizes: dict[str, float] = {}
    for file, count in shared.items():
        with suppress(OSError):  # reading the sample reports it
            sizes[file] = os.path.getsize(folder.locate(file)) / count
    nbytes = [sum(sizes.get(file, 0) for file in samples[index].files) for index in indexes]
    num_shards = math.ceil(max(len(indexes) / max_samples, sum(nbytes) / max_nbytes, 1))
    if max_samples < math.inf and (len(indexes) >= _MANY_SAMPLES or sum(nbytes) >= _MANY_NBYTES):
        num_shards += -num_shards % _NUM_SHARDS
    most = min(max_samples, math.ceil(len(indexes) / num_shards))
    starts, num_bytes = [0], 0.0
    for at, size in enumerate(nbytes):
        if at - starts[-1] >= most or num_bytes >= max_nbytes:
            starts.append(at)
            num_bytes = 0
        num_bytes += size
    return [indexes[begin:end] for begin, end in zip(starts, [*starts[1:], len(indexes)], strict=True) if begin < end]


@dataclass(slots=True)
class Written:
    """The counts of one written shard.

    Attributes:
        counts: Numbers by attribute of `ImportReport`, and the numbers of "probed" and "narrowable" bytes.
        skipped: Samples that were left out.
        forms: Number of samples with each set of entries and members, and the name of the first such sample.
        dtypes: Dtypes of each tensor, as safetensors names them.
    """

    counts: Counter[str] = field(default_factory=Counter)
    skipped: list[Skipped] = field(default_factory=list)
    forms: dict[frozenset[str], tuple[int, str]] = field(default_factory=dict)
    dtypes: dict[str, set[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Conversion:
    """The conversion of a source's samples with the options of `import_cache`."""

    folder: SourceFolder
    samples: Sequence[SourceSample]
    keys: Sequence[str]
    stops: bool  # at the first bad sample
    open_writer: Callable[[int], ShardWriter]  # makes the writer of a shard, from the shard's number
    narrow: bool
    trim: dict[str, str]
    drop_padding: bool
    _probed: set[int] = field(default_factory=set)
    # shared by all workers: whether the import is over, then the number of finished samples of each shard
    _shared: Any = None

    def write_all(
        self,
        shards: Mapping[int, Sequence[int]],
        num_workers: int,
        may_fork: bool,
        progress: bool | Callable[[int, int | None], object] | None,
        num_present: int,
    ) -> list[Written]:
        """Write all shards, and return the counts of each shard.

        `shards` contains sample indices by the number of the shard. `num_present` samples are in finished shards.

        Raises:
            TensorCacheError: A sample is bad, and `stops` is True.
            ChildProcessError: A worker process was killed.
            OSError: Memory or descriptors ran out, or a shard cannot be written.
        """
        todo = sorted(index for shard in shards.values() for index in shard)
        self._probed = set() if self.narrow else set(todo[:_NUM_PROBED])
        self._shared = np.frombuffer(mmap.mmap(-1, 8 * (1 + len(shards))), np.int64)
        num_workers = min(num_workers, len(shards))
        num_torch_threads = torch.get_num_threads()
        pool: Executor
        if may_fork and num_workers > 1 and len(todo) >= _MIN_SAMPLES and _is_fork_safe():
            pool = ProcessPoolExecutor(num_workers, get_context("fork"), _begin_worker, (self, os.getpid()))
            write: Callable[..., Written] = _write_shard
        else:
            # Each thread that computes would start OpenMP threads of its own, which then spin. The setting of a thread also
            # applies to threads that start later, until another thread changes it.
            pool = ThreadPoolExecutor(max(1, num_workers), initializer=torch.set_num_threads, initargs=(1,))
            write = self.write_shard
        try:
            # Workers start first: a bar may have a thread, and a process with threads must not be forked. Until then, Ctrl-C
            # has to wait: Python loses it in its own functions for forks, and a worker ignores it only after `_begin_worker`.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                futures = [pool.submit(write, slot, *shard) for slot, shard in enumerate(shards.items(), 1)]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            with closing(Progress(progress, num_present + len(todo), unit=" samples", smoothing=0)) as bar:
                for future in futures:
                    bar.show(num_present + int(self._shared[1:].sum()), num_present)
                    while not wait([future], _POLL_S).done:
                        bar.show(num_present + int(self._shared[1:].sum()), num_present)
                    future.result()
                bar.show(num_present + len(todo), num_present)
            return [future.result() for future in futures]
        except BrokenExecutor as exc:
            remedy = "finished shards stay, and the import can resume"
            raise ChildProcessError(f"a worker process was killed, for example for lack of memory; {remedy}") from exc
        finally:
            self._shared[0] = True
            pool.shutdown(cancel_futures=True)
            if isinstance(pool, ThreadPoolExecutor):
                restore = threading.Thread(target=torch.set_num_threads, args=(num_torch_threads,))
                restore.start()
                restore.join()

    def write_shard(self, slot: int, number: int, indexes: Sequence[int]) -> Written:
        """Write one shard; leave out bad samples unless `stops` is True. Raise InterruptedError if the import has ended."""
        written = Written()
        with self.open_writer(number) as writer:
            for index in indexes:
                if self._shared[0]:
                    raise InterruptedError("the import has ended")
                self._write_sample(writer, index, written)
                self._shared[slot] += 1
        return written

    def _write_sample(self, writer: ShardWriter, index: int, written: Written) -> None:
        sample = self.samples[index]
        try:
            with naming(sample.name):
                loaded, saved = self._convert(sample, index)
                key = self.keys[index]
                if older_key(key) and any(len(f"{key}.{suffix}") > MAX_MEMBER_NBYTES for suffix in loaded.members):
                    key = hashed_key(sample.name)  # at most 80 characters instead of 88, so that the members' names fit
                packed = writer._pack(key, loaded.value, dict(loaded.members))
        except TensorCacheError as exc:
            if self.stops:
                raise
            written.skipped.append(Skipped(sample.name, sample.files, str(exc)))
            written.counts["num_skipped"] += 1
            return
        except MemoryError as exc:
            raise OSError(errno.ENOMEM, f"{sample.name}: not enough memory") from exc
        writer._place(packed)
        nbytes = sum(cache.layout.nbytes - cache.layout.data_begin for cache in packed.caches)
        for cache in packed.caches:
            for name, tensor in cache.layout.named.items():
                written.dtypes.setdefault(name, set()).add(tensor.dtype)
        written.counts.update(saved, num_written=1, num_hashed=isinstance(key, NamedKey), nbytes=nbytes)
        if index in self._probed:
            written.counts["probed"] += nbytes
        entries = map(str, loaded.value) if isinstance(loaded.value, dict) else ()
        form = frozenset((*entries, *(f".{suffix}" for suffix in loaded.members)))
        number, first = written.forms.get(form, (0, sample.name))
        written.forms[form] = number + 1, first

    def _convert(self, sample: SourceSample, index: int) -> tuple[Loaded, Counter[str]]:
        """Read, trim and narrow a sample; count the saved bytes."""
        loaded = sample.load()
        for suffix in loaded.members:
            if suffix == FIELD or suffix.endswith(f".{FIELD}"):
                raise FormatError(f"member {suffix!r:.100} has a name that is reserved for caches")
        value, saved = loaded.value, Counter[str]()
        if self.trim:
            value, saved["nbytes_trimmed"] = trim(value, self.trim, self.drop_padding)

        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
                return leaf  # packing refuses a sparse tensor, and says where it is
            narrowed = narrow(leaf)
            saved["nbytes_narrowed" if self.narrow else "narrowable"] += leaf.nbytes - narrowed.nbytes
            return narrowed if self.narrow else leaf

        if self.narrow or index in self._probed:
            value = rebuild(value, convert)
        return Loaded(value, loaded.members), saved


def _is_fork_safe() -> bool:
    # Hazard: a lock that another thread holds stays locked in the child. CUDA and Arrow do not work after a fork. Only Linux
    # ends a child with its parent.
    return (
        sys.platform == "linux"
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        and not sys.modules.keys() & {"pyarrow", "jax"}
    )


_worker: Conversion  # of a worker process


def _begin_worker(conversion: Conversion, parent: int) -> None:
    global _worker
    _worker = conversion
    end_with_parent(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # a collection would copy the pages of all objects
    write_at_once(_LARGE_NBYTES)
    torch.set_num_threads(1)  # Hazard: the child does not have the threads of OpenMP, and would wait for them


def _write_shard(slot: int, number: int, indexes: Sequence[int]) -> Written:
    return _worker.write_shard(slot, number, indexes)
