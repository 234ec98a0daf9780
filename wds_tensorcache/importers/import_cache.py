"""Import the files that a program has written: read them in several processes, and write shards in the order of the source."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from wds_tensorcache.arguments import as_int
from wds_tensorcache.errors import FormatError, TensorCacheError
from wds_tensorcache.importers.conversion.convert import BAD_SAMPLE, Conversion
from wds_tensorcache.importers.conversion.pools import open_pool
from wds_tensorcache.importers.formats import choose_format
from wds_tensorcache.importers.report import ImportReport, Skipped
from wds_tensorcache.importers.source import Format, Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder
from wds_tensorcache.progress import Progress
from wds_tensorcache.reading.find_shards import CachePaths, find_shards, iterate_texts
from wds_tensorcache.shards.fingerprint import SOURCE
from wds_tensorcache.shards.names import NamedKey, hashed_key, safe_key
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.urls import is_url
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.writer import MAX_SAMPLES, ShardWriter

_NUM_PROBED = 64  # samples in which to look for tensors that could be narrowed


def import_cache(
    source: CachePaths,
    out: str | os.PathLike[str],
    *,
    format: str = "auto",
    fingerprint: Mapping[str, Any] | None = None,
    narrow: bool = False,
    trim: Mapping[str, str] | None = None,
    drop_padding: bool = False,
    on_error: str = "stop",
    trust: bool = False,
    num_workers: int = 2,
    resume: bool = False,
    max_samples: int = MAX_SAMPLES,
    max_nbytes: int = 1 << 30,
    progress: bool | Callable[[int, int | None], object] | None = None,
) -> ImportReport:
    """Write shards from files that a trainer or another program has made.

    Samples are stored in the order of the source, and the shards have the same bytes for any `num_workers`. `tc.safe_key` makes
    the keys from the names of the samples, and `cache.original_name` returns these names.

    Args:
        source: Folder with the files; or a file such as a tar, a pattern such as `"photos-{000..099}.tar"`, or a list of these.
        out: Folder or pattern of the shards, as for `ShardWriter`, also at a url. Then `ImportReport.changed` stays empty,
            because the clocks of stores and of this machine cannot be compared.
        format: Name of the format, or "auto".
        fingerprint: Further entries for the fingerprint. It always contains the format, the path of `source`, the provenance of
            the files, and the options that change samples.
        narrow: Store each float32 tensor as bfloat16 or float16 if no bit of any number is lost.
        trim: Name of the mask by name of the tensor. Rows of the tensor after the last true element of its mask are not stored.
        drop_padding: Trim rows even if their elements are not all equal, so that padding cannot restore them.
        on_error: `"stop"` raises the error of the first bad sample; `"skip"` leaves bad samples out, and reports them.
        trust: Read pickles that may run code, with `torch.load` or `pickle.loads`.
        num_workers: Number of processes that read and convert files. Threads are used instead if a fork is not safe: on
            other systems than Linux, in a process with several threads or with CUDA, for few samples, and if `out` is a url.
        resume: Continue after an interruption: samples whose keys are in finished shards are not read again.
        max_samples, max_nbytes: As for `ShardWriter`.
        progress: As for `tc.build`.

    Returns:
        The counts, and every sample or file that was skipped.

    Raises:
        ValueError: The format is unknown or cannot be chosen; the folder has no samples; or two samples have one name.
        FormatError: A file is bad, and `on_error` is "stop"; or all files are bad.
        OSError: A file cannot be read, and `on_error` is "stop"; or a shard cannot be written.
        ImportError: The format needs another package, which is not installed; the message has the command that installs it.
        FileExistsError: `out` contains shards, and `resume` is False.
        FileNotFoundError: `source` does not exist.
        StaleCacheError: `out` contains shards with another fingerprint.
    """
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error={on_error!r}, expected 'stop' or 'skip'")
    num_workers = as_int("num_workers", num_workers)
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers}, expected at least 1")
    folder, origin = _open_folder(source, trust)
    try:
        chosen = choose_format(folder, format)
    finally:
        folder.check_shortage()
    found = _open(chosen, folder)
    keys = _keys_of(found, folder, chosen.name)
    made = {**_finite(found.provenance), "format": chosen.name, SOURCE: origin}
    options = {"narrow": narrow, "trim": dict(trim or {}), "drop_padding": drop_padding}
    made |= {name: value for name, value in options.items() if value} | dict(fingerprint or {})
    report = _begin_report(chosen.name, found, folder, made)
    if report.skipped and on_error == "stop":
        first = report.skipped[0]
        raise FormatError(first.what).at(first.name)
    existing = _list_shards(out, resume)
    writer = ShardWriter(out, resume=resume, fingerprint=made, max_samples=max_samples, max_nbytes=max_nbytes)
    changes = narrow, dict(trim or {}), drop_padding
    conversion = Conversion(keys, found.samples, writer._pack, *changes, folder.check_shortage)
    num_probed = num_narrowable = 0
    # sets of entries: how many samples have each, and the first of these
    forms: dict[frozenset[str], tuple[int, str]] = {}
    with writer:
        todo = [index for index, key in enumerate(keys) if key not in writer]
        report.num_present = len(keys) - len(todo)
        report.num_gone = writer.num_finished - report.num_present
        new = {found.samples[index].name for index in todo}
        report.changed = _changed(found.samples, new, folder, existing)
        items = [(index, number < _NUM_PROBED) for number, index in enumerate(todo)]
        # Workers start first: a bar may have a thread, and a process with threads is not forked.
        with (
            open_pool(num_workers, conversion, items, may_fork=not is_url(os.fsdecode(out))) as results,
            closing(Progress(progress, report.num_read, unit=" samples", smoothing=0)) as bar,
        ):
            bar.show(report.num_present, report.num_present)
            for result, index in zip(results, todo, strict=True):
                sample = found.samples[index]
                try:
                    if isinstance(result, Exception):
                        raise result
                    writer._place(result.packed)
                except BAD_SAMPLE as exc:
                    bad = FormatError("the values are nested too deeply") if isinstance(exc, RecursionError) else exc
                    error = bad.at(sample.name) if isinstance(bad, TensorCacheError) else bad.error
                    if on_error == "stop":
                        raise error from exc.__cause__
                    report.num_skipped += 1
                    report.skipped.append(Skipped(sample.name, sample.files, str(error)))
                else:
                    report.num_written += 1
                    report.num_hashed += isinstance(result.packed.key, NamedKey)
                    report.nbytes += result.nbytes
                    report.nbytes_narrowed += result.nbytes_narrowed
                    report.nbytes_trimmed += result.nbytes_trimmed
                    num_probed += result.nbytes * (result.nbytes_narrowable is not None)
                    num_narrowable += result.nbytes_narrowable or 0
                    count, first_name = forms.get(result.names, (0, sample.name))
                    forms[result.names] = count + 1, first_name
                bar.show(report.num_present + report.num_written + report.num_skipped, report.num_present)
    if num_probed:
        report.nbytes_narrowable = report.nbytes * num_narrowable // num_probed
    for name in sorted(set().union(*forms)):
        without = [each for form, each in forms.items() if name not in form]
        if without:
            report.lacking[name] = sum(count for count, _ in without), without[0][1]
    return report


def _open_folder(source: CachePaths, trust: bool) -> tuple[SourceFolder, str | list[str]]:
    """Open a source; return what its fingerprint has of it, too."""
    texts = list(iterate_texts(source))
    origin = [os.path.abspath(text) for text in texts]
    if len(texts) == 1 and os.path.isdir(texts[0]):
        return SourceFolder(texts[0], trust), origin[0]
    paths = [os.path.abspath(shard.path) for shard in find_shards(texts, copies=True, local_for="imported").shards]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    files = [os.path.relpath(path, root).replace(os.sep, "/") for path in paths]
    return SourceFolder(root, trust, files), origin[0] if len(origin) == 1 else origin


def _begin_report(format: str, found: Source, folder: SourceFolder, fingerprint: dict[str, Any]) -> ImportReport:
    """Return a report with what is known before samples are read."""
    report = ImportReport(format, num_read=len(found.samples), notes=list(found.notes), fingerprint=fingerprint)
    report.skipped += [Skipped(name, (name,), what) for name, what in found.bad.items()]
    report.skipped += [Skipped(name, (name,), what) for name, what in folder.faults.items()]
    used = {file for sample in found.samples for file in sample.files} | found.bad.keys() | set(found.metadata_files)
    report.unused += [file for file in folder.names if file not in used] + folder.ignored
    return report


def _list_shards(out: str | os.PathLike[str], resume: bool) -> list[str]:
    """Return the paths of the existing shards; raise FileExistsError if there are some, and the import does not resume."""
    pattern = ShardPattern(os.fsdecode(out))
    names = [] if is_url(pattern.folder) else folder_of(pattern.folder).names()
    existing = [pattern.locate(name) for name in pattern.existing(names).values()]
    if existing and not resume:
        what = "continue an interrupted import with --resume (resume=True), or choose another folder"
        raise FileExistsError(f"{existing[0]} exists; {what}")
    return existing


def _changed(samples: Sequence[SourceSample], new: set[str], folder: SourceFolder, shards: list[str]) -> list[str]:
    """Return the names of the samples that are in shards, and have a file that was changed after the last shard."""
    if not shards:
        return []
    written_ns = max(os.stat(path).st_ctime_ns for path in shards)
    return [
        sample.name
        for sample in samples
        if sample.name not in new
        and any(os.stat(folder.locate(file)).st_ctime_ns > written_ns for file in sample.files)
    ]


def _open(chosen: Format, folder: SourceFolder) -> Source:
    try:
        found = chosen.open(folder)
        folder.check_shortage()
        return found
    except (TensorCacheError, ImportError, MemoryError, OSError):
        folder.check_shortage()
        raise
    except Exception as exc:  # hostile files may have any values
        raise FormatError(
            f"{folder.path}: the files of the format {chosen.name!r} cannot be read: {exc!r:.300}"
        ) from exc


def _finite(value: Any) -> Any:
    """Return a JSON value with texts in place of NaN and infinities, which a fingerprint cannot have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _key_of(sample: SourceSample) -> str:
    """Return the key of a sample, with its name if the key is a hash of the name."""
    key = safe_key(sample.name)
    if sample.key is None or sample.key == key:
        return key
    key = hashed_key(sample.name)
    return key if sample.key == key else sample.key


def _keys_of(found: Source, folder: SourceFolder, name: str) -> list[str]:
    """Return the keys of all samples."""
    if not found.samples:
        what = f"{folder.path} has no samples of the format {name!r}"
        if found.bad:
            raise FormatError("{}; {}: {}".format(what, *next(iter(found.bad.items()))))
        raise ValueError(what)
    keys = [_key_of(sample) for sample in found.samples]
    if len(set(keys)) < len(keys):
        (twice, _), *_ = Counter(keys).most_common(1)
        name = next(sample.name for key, sample in zip(keys, found.samples, strict=True) if key == twice)
        raise ValueError(f"{folder.path}: two samples have the name {name!r:.200}")
    return keys
