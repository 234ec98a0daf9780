"""Results of `verify` and `repair`: a record for each fault, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import groupby

from wds_tensorcache.errors import Kind, format_count

_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a shard or manifest.

    Attributes:
        shard: Path of the shard or manifest.
        key: Key of the sample; None if the fault is not in a sample, or the sample is unknown.
        offset: Byte offset of the fault in the shard; None if the fault is not in the shard's bytes.
        what: Description of the fault.
        kind: Kind of the fault, as in `FormatError.kind`. Faults of a tar are `truncated`, `compressed`, `checksum`, `header`,
            `extended-header`, `sparse`, `zeros` or `trailing`, and faults of a sample are `duplicate`, `damaged`, `lost` or
            `unsafe`. A member or a shard may be `missing`, and a file `unreadable`. A sidecar or manifest that is damaged or
            disagrees with the shards is `index`. `format` is any other violation of FORMAT.md.
    """

    shard: str
    key: str | None
    offset: int | None
    what: str
    kind: Kind = "format"

    def __str__(self) -> str:
        key = "" if self.key is None else f": sample {self.key!r:.100}"
        return f"{self.shard}{key}{'' if self.offset is None else f': byte {self.offset}'}: {self.what}"


@dataclass(slots=True)
class Report:
    """Faults and counts of the shards that `verify` or `repair` read.

    Attributes:
        faults: Faults grouped by shard; within a shard, faults in its bytes come first, by offset.
        num_shards: Number of shards that were read.
        num_missing: Number of shards that could not be read: listed shards that do not exist, and unreadable shards.
        num_samples: Number of samples in the shards, including damaged samples.
        num_damaged: Number of samples with a fault in their own bytes or names. `repair` leaves them out.
        num_lost: Number of samples that an index or the manifest lists, but no shard contains.
        num_repeated: Number of keys that occur in several shards; for these, `cache[key]` raises KeyError. Repeated keys are
            not faults, since a folder may contain unrelated shards.
        num_unverified: Number of samples from other writers that lack a digest of the skeleton or the tensors. Damage to these
            bytes goes unnoticed.
        num_unread: Number of samples whose skeletons need a class that is not in `allow=`; only their digests were compared.
        needs: Names of the classes that these skeletons need: your own classes, or an attack. Nothing was executed.
        nbytes: Length of the shards in bytes.
    """

    faults: list[Fault] = field(default_factory=list)
    num_shards: int = 0
    num_missing: int = 0
    num_samples: int = 0
    num_damaged: int = 0
    num_lost: int = 0
    num_repeated: int = 0
    num_unverified: int = 0
    num_unread: int = 0
    needs: set[str] = field(default_factory=set)
    nbytes: int = 0

    @property
    def ok(self) -> bool:
        """True if there are no faults."""
        return not self.faults

    def __bool__(self) -> bool:
        raise TypeError("a report has no truth value; use report.ok")

    def add(self, part: Report) -> None:
        for attribute in fields(part):
            value, more = getattr(self, attribute.name), getattr(part, attribute.name)
            setattr(self, attribute.name, value | more if isinstance(value, set) else value + more)

    def __str__(self) -> str:
        faults = "nothing is wrong"
        if self.faults:
            damaged = f"{format_count(self.num_damaged, 'sample')} damaged"
            faults = f"{format_count(len(self.faults), 'fault')}, {damaged}, {self.num_lost:,} lost"
        lines = [f"{_sizes(self.num_shards, self.num_samples, self.nbytes)}: {faults}"]
        if self.num_unverified:
            lines.append(f"no digests: {format_count(self.num_unverified, 'sample')}; their bytes could not be checked")
        if self.num_unread:
            names = ", ".join(sorted(self.needs)[:_MAX_SHOWN])
            lines.append(
                f"not decoded: {format_count(self.num_unread, 'sample')}; pass allow=[…] if you trust the shards: {names}"
            )
        if self.num_repeated:
            lines.append(f"in several shards: the keys of {format_count(self.num_repeated, 'sample')}")
        # after a cut, hundreds of samples have the same fault
        runs = [list(run) for _, run in groupby(self.faults, lambda fault: (fault.shard, fault.what, fault.offset))]
        for run in runs[:_MAX_SHOWN]:
            more = f" (and {len(run) - 1:,} more like this, up to {run[-1].key!r:.100})" if len(run) > 1 else ""
            lines.append(f"  {run[0]}{more}")
        if len(runs) > _MAX_SHOWN:
            lines.append(f"  … and {sum(map(len, runs[_MAX_SHOWN:])):,} more")
        return "\n".join(lines)


@dataclass(slots=True)
class RepairReport(Report):
    """Faults and counts of the shards that `repair` read and wrote.

    Attributes:
        num_shards_written: Number of shards in the new folder; 0 if there is no new folder.
        num_samples_written: Number of samples in the new shards.
        nbytes_written: Length of the new shards in bytes.
    """

    num_shards_written: int = 0
    num_samples_written: int = 0
    nbytes_written: int = 0

    def __str__(self) -> str:
        written = _sizes(self.num_shards_written, self.num_samples_written, self.nbytes_written)
        return f"read: {Report.__str__(self)}\nwritten: {written}"


def _sizes(num_shards: int, num_samples: int, nbytes: int) -> str:
    return f"{format_count(num_shards, 'shard')}, {format_count(num_samples, 'sample')}, {nbytes:,} bytes"
