"""What is wrong with shards: one record for each fault, and a report of all."""

from __future__ import annotations

from dataclasses import dataclass, field

from wds_tensorcache.errors import Kind

__all__ = ["Fault", "Report"]

_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        shard: Path of the shard, or of the manifest that is wrong.
        key: Of the sample, None if it is of no sample, or not known of which.
        offset: Byte of the shard where it is, None if it is not in the shard's bytes.
        what: What is wrong, for people.
        kind: What is wrong, for code, as in `FormatError.kind`: `truncated`, `compressed`, `checksum`, `header`,
            `extended-header`, `sparse`, `zeros` and `trailing` of the tar, `unreadable` of the file, `duplicate`, `missing`,
            `damaged`, `lost` and `unsafe` of samples, `index` of sidecars and manifests, and `format` of any other rule.
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
    """What was found in shards; true when nothing is wrong.

    Attributes:
        faults: Shard by shard, in each by offset where they have one.
        num_shards: That were there.
        num_missing: Shards that are listed, and are not there or cannot be opened.
        num_samples: That were found in the shards, damaged ones too.
        num_damaged: Samples with a fault in their own bytes or names: those that `repair` leaves out.
        num_lost: Samples of which an index or the manifest tells, and which are in no shard.
        num_repeated: Samples whose key another shard has, too: `cache[key]` raises. No fault, since a folder may hold shards
            of several kinds.
        num_unverified: Samples without a digest in one half at least, of other writers: their bytes may be anything.
        num_unread: Samples whose skeletons need what is not in `allow=`; of them, only the digests were compared.
        needs: What that is, by name: a class of yours, or an attack. Nothing of it was executed.
        nbytes: Of the shards.
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

    def __bool__(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        found = "nothing is wrong"
        if self.faults:
            found = f"{_many(len(self.faults), 'fault')}, {_many(self.num_damaged, 'sample')} damaged, {self.num_lost:,} lost"
        size = f"{_many(self.num_shards, 'shard')}, {_many(self.num_samples, 'sample')}, {self.nbytes:,} bytes"
        lines = [f"{size}: {found}"]
        if self.num_unverified:
            lines.append(
                f"no digests: {_many(self.num_unverified, 'sample')}; nothing tells whether the bytes are right"
            )
        if self.num_unread:
            names = ", ".join(sorted(self.needs)[:_MAX_SHOWN])
            lines.append(
                f"not decoded: {_many(self.num_unread, 'sample')}, whose skeletons need what only allow=[…] would let in, "
                f"from somebody whom you trust: {names}"
            )
        if self.num_repeated:
            lines.append(f"in several shards: the keys of {_many(self.num_repeated, 'sample')}")
        lines += [f"  {fault}" for fault in self.faults[:_MAX_SHOWN]]
        if len(self.faults) > _MAX_SHOWN:
            lines.append(f"  … and {len(self.faults) - _MAX_SHOWN:,} more")
        return "\n".join(lines)


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
