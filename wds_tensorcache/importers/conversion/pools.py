"""Convert samples by several threads or worker processes at once, in the order of the source."""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing import get_context
from typing import Any, BinaryIO

import torch

from wds_tensorcache.codec.header import Layout, form_of, make_layout
from wds_tensorcache.errors import FormatError, add_note
from wds_tensorcache.importers.conversion.convert import BAD_SAMPLE, Conversion, Converted, Item
from wds_tensorcache.storage.threads import Threads, run_in_order

_MIN_SAMPLES = 32  # starting processes takes longer than converting fewer samples
_PIPE_NBYTES = 1 << 20  # the most that a pipe can have without privileges
_IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


@contextmanager
def open_pool(
    num_workers: int, conversion: Conversion, items: Sequence[Item], *, may_fork: bool
) -> Iterator[Iterator[Converted | Exception]]:
    """Start worker processes if a fork is safe and worth its time, otherwise threads; yield their results, in order.

    Threads take turns for the GIL, so that two convert hardly more than one. `may_fork` is False if a client of an object
    store has threads of its own.

    Raises:
        ChildProcessError: A worker process was killed.
    """
    num_files = len({name for index, _ in items for name in conversion.samples[index].files})
    workers: list[_Worker] = []
    # Samples that share a file are converted by threads, which share what they have read of it.
    if may_fork and len(items) >= _MIN_SAMPLES and 2 * num_files >= len(items) and _is_fork_safe():
        try:
            with contextlib.suppress(OSError):  # the system allows no more processes
                for first in range(num_workers):
                    workers.append(_Worker(conversion, items[first::num_workers]))
            if len(workers) == num_workers:
                yield (workers[number % num_workers].receive() for number in range(len(items)))
                return
        finally:
            for worker in workers:
                worker.kill()
    with Threads(num_workers, "import") as pool, closing(run_in_order(items, conversion, pool, num_workers)) as results:
        yield results


def _is_fork_safe() -> bool:
    """Return whether a forked child of this process may run torch, and the system kills it when this process ends.

    Hazard: another thread may hold a lock, which the child would have forever. CUDA and Arrow do not work after a fork.
    """
    return (
        _IS_LINUX
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        and not sys.modules.keys() & {"pyarrow", "jax"}
    )


class _Worker:
    """A forked process that converts samples, and waits while its pipe is full.

    Raises:
        OSError: The system allows no more processes or descriptors.
    """

    def __init__(self, conversion: Conversion, items: Sequence[Item]) -> None:
        import fcntl  # not on all systems

        reading, writing = os.pipe()
        self._results, self._buffer = open(reading, "rb"), bytearray()  # noqa: SIM115 closed by `kill`
        with open(writing, "wb") as results, warnings.catch_warnings():
            # Python 3.12 warns of the threads of OpenBLAS, which handles forks itself
            warnings.simplefilter("ignore", DeprecationWarning)
            with contextlib.suppress(PermissionError):  # the user has many large pipes
                fcntl.fcntl(results, fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
            arguments = conversion, items, results, os.getpid()
            self._process = get_context("fork").Process(target=_work, args=arguments, daemon=True)
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def receive(self) -> Converted | Exception:
        """Return the next result. Memory: the parts of a sample are valid until the next call."""
        try:
            # The sender is a forked copy of this process, so the pickle is as safe as the process itself.
            result: Converted | Exception = pickle.load(self._results)  # noqa: S301
            if isinstance(result, Converted):
                nbytes = result.packed.nbytes
                if len(self._buffer) < nbytes:
                    self._buffer = bytearray(nbytes)  # recycled, since new pages take as long as the copy
                result.packed.parts = [memoryview(self._buffer)[:nbytes]]
                if self._results.readinto(result.packed.parts[0]) < nbytes:
                    raise EOFError
        except (EOFError, pickle.UnpicklingError) as exc:
            self._process.join()
            status = self._process.exitcode
            end = f"was killed by {signal.Signals(-status).name}" if status and status < 0 else f"has ended ({status})"
            remedy = "finished shards stay, and the import can resume"
            raise ChildProcessError(f"worker process {self._process.pid} {end}; {remedy}") from exc
        return result

    def kill(self) -> None:
        self._results.close()
        self._process.kill()
        self._process.join()


def _work(conversion: Conversion, items: Sequence[Item], results: BinaryIO, parent: int) -> None:
    """Convert samples in a worker process, and send the results to the parent process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    gc.freeze()  # a collection would copy the pages of all objects
    torch.set_num_threads(1)  # Hazard: the child does not have the threads of OpenMP, and would wait for them
    for item in items:
        result: Converted | Exception
        try:
            result = conversion(item)
        except Exception as exc:
            add_note(exc, f"in a worker process:\n{traceback.format_exc()}")
            result = exc
        parts: list[Any] = []
        if isinstance(result, Converted):
            parts, result.packed.parts = result.packed.parts, parts
        else:
            result = _portable(result)
        pickler = pickle.Pickler(results, 5)
        pickler.dispatch_table = _REDUCERS
        pickler.dump(result)
        for part in parts:
            results.write(part)
        results.flush()


def _portable(error: Exception) -> Exception:
    """Return an error that another process can unpickle, such as `error` itself."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (made here)
    except Exception:
        text = f"{type(error).__name__}: {error}"
        return FormatError(text) if isinstance(error, BAD_SAMPLE) else RuntimeError(text)
    return error


def _reduce_layout(layout: Layout) -> tuple[Any, ...]:
    """Leave out what other samples taught the layout and its form, such as templates."""
    dims = [dim for tensor in layout.tensors.values() for dim in tensor.shape]
    return _layout, (layout.form.entries, dims, layout.data_begin, layout.texts, layout.further)


def _layout(entries: Any, dims: Any, data_begin: Any, texts: Any, further: Any) -> Layout:
    return make_layout(form_of(entries), dims, data_begin, texts, further)


_REDUCERS = {**copyreg.dispatch_table, Layout: _reduce_layout}
