"""The result of an import: counts of samples, and faults."""

from __future__ import annotations

from dataclasses import dataclass, field

from wds_tensorcache.errors import format_count


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample or file that was not imported.

    Attributes:
        name: Name of the sample, or of the file.
        files: Relative paths of its files.
        what: Description of the fault.
    """

    name: str
    files: tuple[str, ...]
    what: str


@dataclass(slots=True)
class ImportReport:
    """The counts of an import; `num_read == num_written + num_present + num_skipped`.

    Attributes:
        format: Name of the format.
        num_read: Number of samples in the source.
        num_written: Number of samples that this call has written.
        num_present: Number of samples that an earlier call had written (`resume=True`).
        num_hashed: Number of samples that this call has written with a hash in the key, because their names are too long.
            `cache.original_name(key)` returns the name.
        num_skipped: Number of samples that were not written because they are bad.
        skipped: Samples and files that were left out, links out of the folder or to no file, and folders that cannot be read.
        changed: Names of samples whose files have changed since an earlier call wrote the samples. The cache keeps the old
            content.
        num_gone: Number of samples in the cache that the source no longer contains.
        lacking: For each top-level entry, and each member such as `.txt`, that samples written by this call lack: the number of
            these samples, and the name of the first.
        notes: Sentences about facts that the files do not contain, for example why there are more samples than files.
        unused: Relative paths of files that belong to no sample, for example pictures.
        nbytes: Bytes of the written tensors.
        nbytes_narrowed: Bytes that `narrow=True` has saved.
        nbytes_narrowable: Bytes that `narrow=True` would save, estimated from some samples; 0 with `narrow=True`.
        nbytes_trimmed: Bytes that `trim=` has saved.
        fingerprint: Fingerprint of the cache.
    """

    format: str
    num_read: int = 0
    num_written: int = 0
    num_present: int = 0
    num_skipped: int = 0
    num_hashed: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    num_gone: int = 0
    lacking: dict[str, tuple[int, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    nbytes: int = 0
    nbytes_narrowed: int = 0
    nbytes_narrowable: int = 0
    nbytes_trimmed: int = 0
    fingerprint: dict[str, object] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if nothing was skipped."""
        return not self.skipped

    @property
    def num_bad_files(self) -> int:
        """Number of entries in `skipped` that are not samples."""
        return len(self.skipped) - self.num_skipped

    def __str__(self) -> str:
        present = f", {self.num_present:,} were there" if self.num_present else ""
        bad = f"; {format_count(self.num_bad_files, 'bad file')} left out" if self.num_bad_files else ""
        return (
            f"{self.num_read:,} samples read, {self.num_written:,} written, {self.num_skipped:,} skipped{present}{bad}"
        )
