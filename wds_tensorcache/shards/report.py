"""What is wrong with shards: one record for each fault, and a report of all."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Fault", "Report"]

_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        shard: Path of the shard, or of the manifest that is wrong.
        key: Of the sample, None if it is of no sample, or not known of which.
        offset: Byte of the shard where it is, None if it is not in the shard's bytes.
        what: Is wrong.
    """

    shard: str
    key: str | None
    offset: int | None
    what: str

    def __str__(self) -> str:
        key = "" if self.key is None else f": sample {self.key!r:.100}"
        return f"{self.shard}{key}{'' if self.offset is None else f': byte {self.offset}'}: {self.what}"


@dataclass(slots=True)
class Report:
    """What was found in shards; true when nothing is wrong.

    Attributes:
        faults: Shard by shard, in each by offset where they have one.
        num_shards: That were there.
        num_samples: That were found in them, damaged ones too.
        num_damaged: Samples with a fault in their own bytes or names: those that `repair` leaves out.
        num_unverified: Samples without a digest in one half at least, of other writers: their bytes may be anything.
        num_unread: Samples whose skeletons need classes in `allow=`, which were not given; their digests were compared.
        nbytes: Of the shards.
    """

    faults: list[Fault] = field(default_factory=list)
    num_shards: int = 0
    num_samples: int = 0
    num_damaged: int = 0
    num_unverified: int = 0
    num_unread: int = 0
    nbytes: int = 0

    def __bool__(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        lines = [
            f"{self.num_shards:,} shards, {self.num_samples:,} samples, {self.nbytes:,} bytes: "
            f"{f'{len(self.faults):,} faults, {self.num_damaged:,} samples damaged' if self.faults else 'nothing is wrong'}"
        ]
        if self.num_unverified:
            lines.append(
                f"{self.num_unverified:,} samples have no digests: nothing tells whether their bytes are right"
            )
        if self.num_unread:
            lines.append(f"{self.num_unread:,} samples have skeletons that need allow=[…]: they were not decoded")
        lines += [f"  {fault}" for fault in self.faults[:_MAX_SHOWN]]
        if len(self.faults) > _MAX_SHOWN:
            lines.append(f"  … and {len(self.faults) - _MAX_SHOWN:,} more")
        return "\n".join(lines)
