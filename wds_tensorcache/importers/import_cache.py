"""The import of another program's files into shards, by several processes."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from wds_tensorcache.arguments import as_int
from wds_tensorcache.codec.dtypes import STORED
from wds_tensorcache.errors import FormatError, format_count
from wds_tensorcache.importers.conversion import Conversion, Written, plan_shards
from wds_tensorcache.importers.formats import choose_format
from wds_tensorcache.importers.report import ImportReport, Skipped
from wds_tensorcache.importers.source import Source, SourceSample
from wds_tensorcache.importers.source_folder import SourceFolder, naming
from wds_tensorcache.reading.find_shards import CachePaths, expand_pattern, find_shards, iterate_texts
from wds_tensorcache.shards.fingerprint import SOURCE
from wds_tensorcache.shards.names import hashed_key, safe_key
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.urls import is_url
from wds_tensorcache.writing.pattern import ShardPattern
from wds_tensorcache.writing.resume import FinishedShards
from wds_tensorcache.writing.writer import MAX_SAMPLES, ShardWriter


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
    """Write shards from files that a trainer or another program wrote.

    Samples are stored in the order of the source. They are divided into shards by their number and the sizes of their files, so
    the shards have the same bytes for any `num_workers`. `tc.safe_key` makes the keys from the names of the samples, and
    `cache.original_name` returns these names. Keys in tars that `tc.safe_key` may have made stay the same, unless several tars
    have an equal key.

    Args:
        source: Folder with the files; or a file such as a tar, a pattern such as `"photos-{000..099}.tar"`, or a list of these.
        out: Folder or pattern of the shards, as for `ShardWriter`; it may be a url. For a url, `ImportReport.changed` stays
            empty, because the clocks of the store and of this machine cannot be compared.
        format: Name of the format, or "auto".
        fingerprint: Further entries for the fingerprint. The fingerprint also contains the format, the path of `source`, the
            provenance of the files, and the options that change samples. A further entry replaces an entry of the same name.
        narrow: Store each float32 tensor as bfloat16 or float16 if no bit of any number is lost.
        trim: Mask names by tensor name. Rows of the tensor `[N, …]` after the last true element of its mask `[N]` are not
            stored. A tensor `[1, N, …]` may have a mask `[1, N]`. A sample is bad if it lacks the tensor or the mask, or if
            such a row is not zero.
        drop_padding: Trim rows even if they are not zero. Padding with zeros then cannot restore the rows.
        on_error: `"stop"` raises the error of the first bad sample; `"skip"` leaves bad samples out, and reports them.
        trust: Read pickles that may run code, with `torch.load` or `pickle.loads`.
        num_workers: Number of processes that read and convert files; each process writes whole shards. Threads replace the
            processes for few samples, if `out` is a url, and where a fork is not safe: outside Linux, with several threads,
            with CUDA, or after an import of pyarrow or jax.
        resume: Continue after an interruption: samples whose keys are in finished shards are not read again.
        max_samples: Maximum number of samples in a shard. To keep all workers busy, an import of at least 128 samples or 64 MiB
            makes several shards with about equal numbers of samples. If `out` names a single shard, the shard has no limits.
        max_nbytes: Approximate maximum length of a shard in bytes, estimated from the lengths of the imported files.
        progress: As for `tc.build`.

    Returns:
        The counts, and every sample or file that was skipped.

    Raises:
        TypeError, ValueError: `source` or an option has a wrong type or value, or the format is unknown or cannot be chosen. Or
            the folder has no samples, or two samples have the same name.
        FormatError: A file is bad or cannot be read, and `on_error` is "stop"; or the source has bad files and no samples.
        EncodeError, InvalidKeyError: A value or the name of a member cannot be stored, and `on_error` is "stop".
        OSError: Memory or file descriptors ran out, or a shard cannot be written.
        ChildProcessError: A worker process was killed, for example for lack of memory.
        ImportError: The format needs a package that is not installed; the message contains the command that installs it.
        FileExistsError: `out` contains shards, and `resume` is False; or `out` is a folder with other shards. Or another writer
            has the same pattern.
        FileNotFoundError: `source` does not exist.
        StaleCacheError: `out` contains shards with another fingerprint.
    """
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error={on_error!r}, expected 'stop' or 'skip'")
    num_workers = as_int("num_workers", num_workers)
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers}, expected at least 1")
    folder, origin = _open_folder(source, trust)
    chosen = choose_format(folder, format)
    with naming(folder.path):
        opened = chosen.open(folder)
    samples, bad = opened.samples, {**opened.bad, **dict(sorted(folder.faults.items()))}
    keys = _keys_of(opened, folder, chosen.name)
    if bad and on_error == "stop":
        name, problem = next(iter(bad.items()))
        raise (None if opened.bad else folder.first_fault()) or FormatError(problem).at(name)
    changes: dict[str, Any] = {"narrow": narrow, "trim": dict(trim or {}), "drop_padding": drop_padding}
    complete = {**opened.provenance, "format": chosen.name, SOURCE: origin}
    complete |= {name: value for name, value in changes.items() if value} | dict(fingerprint or {})
    report = ImportReport(chosen.name, num_read=len(samples), notes=list(opened.notes), fingerprint=complete)
    report.skipped = [Skipped(name, (name,), fault) for name, fault in bad.items()]
    used = {*opened.metadata_files, *opened.bad}.union(*(sample.files for sample in samples))
    report.unused = [file for file in folder.names if file not in used] + folder.ignored
    pattern = ShardPattern(os.fsdecode(out))
    if not is_url(pattern.folder):
        names = folder_of(pattern.folder).names()
        own = pattern.existing(names).values()
        for name in own if not resume else ():
            remedy = "continue an interrupted import with --resume (resume=True), or choose another folder"
            raise FileExistsError(f"{pattern.locate(name)} exists; {remedy}")
        for name in names if pattern.is_default else ():
            if name.endswith(".tar") and not name.startswith(".") and name not in own:
                raise FileExistsError(f"{pattern.locate(name)} is not a shard of this import; choose another folder")
    limits: dict[str, Any] = {"max_samples": max_samples, "max_nbytes": max_nbytes}

    # This writer locks the pattern. Each shard has a writer of its own, unless the path means a single shard.
    with ShardWriter(out, resume=resume, fingerprint=complete, **limits) as whole:

        def open_writer(number: int) -> ShardWriter:
            return ShardWriter(pattern.path(number), fingerprint=complete) if pattern.is_numbered else whole

        plan = partial(plan_shards, samples=samples, folder=folder, **(limits if pattern.is_numbered else {}))
        shards = _missing_shards(whole, pattern, keys, plan)
        present = set(range(len(samples))).difference(*shards.values())
        report.num_present = len(present)
        report.num_gone = len(whole.finished) - len(present)
        report.changed = _changed({keys[index]: samples[index] for index in sorted(present)}, folder, whole.finished)
        conversion = Conversion(folder, samples, keys, on_error == "stop", open_writer, **changes)
        may_fork = not is_url(pattern.folder)  # the client of a store has threads
        parts = conversion.write_all(shards, num_workers, may_fork, progress, report.num_present)
    _complete(report, parts)
    report.notes += _note_dtypes(parts, narrow)
    return report


def _open_folder(source: CachePaths, trust: bool) -> tuple[SourceFolder, str | list[str]]:
    """Return a source's files, and its entry in the fingerprint."""
    texts = list(iterate_texts(source))
    origin = [os.path.abspath(text) for text in texts]
    if len(texts) == 1 and os.path.isdir(texts[0]):
        return SourceFolder(texts[0], trust), origin[0]
    for path in (path for text in texts if not is_url(text) for path in expand_pattern(text)):
        if os.path.isdir(path):  # `find_shards` would see only the tars in the folder itself
            remedy = "pass 'FOLDER/*.tar', or import folders of other files one by one, and merge the caches"
            raise ValueError(f"{path} is a folder, but patterns and lists must give files; {remedy}")
    paths = [os.path.abspath(shard.path) for shard in find_shards(texts, copies=True, local_for="imported").shards]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    files = [os.path.relpath(path, root).replace(os.sep, "/") for path in paths]
    return SourceFolder(root, trust, files), origin[0] if len(origin) == 1 else origin


def _missing_shards(
    writer: ShardWriter,
    pattern: ShardPattern,
    keys: Sequence[str],
    plan: Callable[[Sequence[int]], list[Sequence[int]]],
) -> dict[int, Sequence[int]]:
    """Return the sample indices of unwritten shards, by shard number."""
    shards = dict(enumerate(plan(range(len(keys)))))
    stored_keys = [writer.finished.stored_key(key) for key in keys]
    missing = [index for index, key in enumerate(stored_keys) if key not in writer]
    is_same = True
    for path, index in writer.finished.indexes.items():
        planned = shards.pop(pattern.number(os.path.basename(path)) or 0, ())
        is_same &= {stored_keys[at] for at in planned}.issuperset(index.keys)
    if not is_same:  # the source has changed, so missing samples go into new shards after the existing shards
        return dict(enumerate(plan(missing), writer._number))
    rest = sorted(set(missing).difference(*shards.values()))  # bad samples of finished shards
    return shards | dict(enumerate(plan(rest), max(writer._number, 1 + max(shards, default=-1))))


def _complete(report: ImportReport, parts: Sequence[Written]) -> None:
    """Add the counts of the written shards to a report."""
    counts = sum((part.counts for part in parts), Counter[str]())
    report.skipped += [skipped for part in parts for skipped in part.skipped]
    probed, narrowable = counts.pop("probed", 0), counts.pop("narrowable", 0)
    for name, count in counts.items():
        setattr(report, name, count)
    if probed:
        report.nbytes_narrowable = report.nbytes * narrowable // probed
    forms = [(_entries_of(form), *count) for part in parts for form, count in part.forms.items()]
    having = Counter[str]()
    for entries, count, _ in forms:
        having.update(dict.fromkeys(entries, count))
    for name in sorted(set().union(*(form for part in parts for form in part.forms))):
        if having[name] < report.num_written:
            first = next(first for entries, _, first in forms if name not in entries)
            report.lacking[name] = report.num_written - having[name], first


def _note_dtypes(parts: Sequence[Written], is_narrow: bool) -> list[str]:
    """Return a note if a tensor has several dtypes."""
    dtypes: dict[str, set[str]] = {}
    for part in parts:
        for name, of_shard in part.dtypes.items():
            dtypes.setdefault(name, set()).update(of_shard)
    mixed = [name for name in dtypes if len(dtypes[name]) > 1]
    if not mixed:
        return []
    listed = " and ".join(sorted(STORED[dtype][1] for dtype in dtypes[mixed[0]]))
    remedy = "import without --narrow (narrow=False), or " if is_narrow else ""
    return [
        f"different dtypes, which no batch stacks, in {format_count(len(mixed), 'tensor')}, for example {listed} in "
        f"{mixed[0]!r:.100}; {remedy}convert the dtypes with collate="
    ]


def _entries_of(form: Iterable[str]) -> set[str]:
    """Return the entries of a form, also those that members replace."""
    # A picture is a member such as `.image.png`; where it is null, the sample has an entry `image` instead.
    members = [part for part in form if part[:1] == "."]
    return {*form, *(member[1:end] for member in members for end in range(1, len(member)) if member[end] == ".")}


def _changed(samples: Mapping[str, SourceSample], folder: SourceFolder, finished: FinishedShards) -> list[str]:
    """Return the names of stored samples whose files changed or vanished later."""
    if any(map(is_url, finished.indexes)):
        return []
    written_ns = {path: os.stat(path).st_ctime_ns for path in finished.indexes}
    files = {file for sample in samples.values() for file in sample.files}
    changed_ns = {file: os.stat(folder.locate(file)).st_ctime_ns for file in files if file in folder}
    changed = []
    for key, sample in samples.items():
        (path, _), *_ = finished.find(finished.stored_key(key))
        if any(changed_ns.get(file, math.inf) > written_ns[path] for file in sample.files):
            changed.append(sample.name)
    return changed


def _keys_of(source: Source, folder: SourceFolder, name: str) -> list[str]:
    """Return the keys of all samples; hashed keys carry the samples' names."""
    if not source.samples:
        problem, fault = f"{folder.path} has no samples of the format {name!r}", folder.first_fault()
        if source.bad:
            raise FormatError("{}; {}: {}".format(problem, *next(iter(source.bad.items()))))
        if fault is not None:
            raise FormatError(f"{problem}; {fault}")
        raise ValueError(problem)
    keys = []
    for sample in source.samples:
        key = safe_key(sample.name)
        if sample.key not in (None, key):
            key = hashed_key(sample.name)
            key = key if sample.key == key else sample.key
        keys.append(key)
    (most, count), *_ = Counter(keys).most_common(1)
    if count > 1:
        sample = source.samples[keys.index(most)]
        raise ValueError(f"{folder.path}: two samples have the name {sample.name!r:.200}")
    return keys
