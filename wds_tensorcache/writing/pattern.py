"""Names of the files of one writer, or of a build's ranks. These are shards, their indexes, and temporary files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from wds_tensorcache.shards.names import DALI_SUFFIX, SIDECAR_SUFFIX, dali_index_path
from wds_tensorcache.storage.atomic import remove_temporary
from wds_tensorcache.storage.folder import folder_of
from wds_tensorcache.storage.urls import WRITABLE, check_not_url, check_writable, is_url, join_url

DEFAULT_NAME = "%06d.tar"
_SIDECARS = (DALI_SUFFIX, SIDECAR_SUFFIX)
_OTHER_FILES = (".npy", ".npz", ".pkl", ".pt", ".pth", ".safetensors", ".gz", ".tgz", ".zip")
_DEFAULT_RANK = 1, 0  # world size and rank of a build on one process
_NUMBER = re.compile(r"%(?:0\d+)?d")
_RANK = re.compile(r"r([0-9]+)of([0-9]+)-(?=%(?:0\d+)?d)")  # before the number, in patterns of ranks


class ShardPattern:
    """Names of the shards of one writer.

    A build on several ranks has a pattern for each rank. For example, rank 3 of 8 has the pattern `r3of8-%06d.tar`. Without the
    label of the rank, `%06d.tar` is the pattern of a build on one process.

    Args:
        pattern: As for `ShardWriter`. A path means a folder if the folder exists, or if the path has no number and does not end
            in `.tar`.
    """

    def __init__(self, pattern: str) -> None:
        is_remote = is_url(pattern)
        if is_remote:
            check_writable(pattern)
        else:
            check_not_url(pattern, WRITABLE)
        if not pattern:
            raise ValueError("the path is empty, expected a folder or a pattern such as 'cache/%06d.tar'")
        is_file = "%" in pattern or pattern.endswith((".tar", *_SIDECARS, *_OTHER_FILES))
        self.is_default = not is_file or os.path.isdir(pattern)
        self._join = join_url if is_remote else os.path.join
        if self.is_default:
            pattern = self._join(pattern, DEFAULT_NAME)
        self.folder, self.name = pattern.rpartition("/")[::2] if is_remote else os.path.split(pattern)
        if is_remote and self.folder.endswith(":/"):
            raise ValueError(f"{pattern}: expected a bucket and a folder or pattern, such as s3://bucket/cache")
        if is_remote and set("*?[{") & set(self.folder):
            raise ValueError(f"{pattern}: readers expand '*', '?', '[' and '{{' in urls; use another folder")
        self._pattern = pattern
        self.is_numbered = len(_NUMBER.findall(self.name)) == 1
        self._base, self._rank = _without_rank(self.name)
        if "%" in _NUMBER.sub("", self.name, count=1) or "%" in self.folder:
            raise ValueError(f"pattern {pattern!r}: expected at most one number, such as %06d, in its last part")

        if self.name.endswith(_OTHER_FILES):
            raise ValueError(f"{pattern!r}: a shard is a tar; expected a folder, or a name that ends in .tar")
        first, second = dali_index_path(self.path(0)), dali_index_path(self.path(1))
        if self.name.endswith(_SIDECARS) or (self.is_numbered and first == second):
            raise ValueError(
                f"pattern {pattern!r}: a shard or index would share a name with another index; end the pattern in .tar"
            )

    def __str__(self) -> str:
        return self._pattern

    def of_rank(self, rank: int, world_size: int) -> ShardPattern:
        return ShardPattern(self.locate(_with_rank(self._base, rank, world_size)))

    def shard_name(self, number: int) -> str:
        return self.name % number if self.is_numbered else self.name

    def path(self, number: int) -> str:
        return self.locate(self.shard_name(number))

    def locate(self, name: str) -> str:
        return self._join(self.folder, name)

    def number(self, name: str) -> int | None:
        """Return the number in a shard's name; None for any other name."""
        place = self._parse(name)
        return place[2] if place is not None and place[:2] == self._rank else None

    def covers(self, name: str) -> bool:
        return self.number(name) is not None

    def is_in_build(self, name: str) -> bool:
        """Return whether a name belongs to a shard of the same build. The shard may be of any rank and any world size."""
        return self._parse(name) is not None

    def is_of_other_rank(self, name: str) -> bool:
        """Return whether a shard's name has another rank, but this world size."""
        place = self._parse(name)
        return place is not None and place[0] == self._rank[0] and place[1] != self._rank[1]

    def _parse(self, name: str) -> tuple[int, int, int] | None:
        """Return world size, rank and number in a shard's name, or None."""
        base, (world_size, rank) = self._base, _DEFAULT_RANK
        if self.is_numbered:
            match = re.fullmatch(_build_regex(base), name)
            if match is None:
                return None
            if match[1] is not None:
                world_size, rank = int(match[2]), int(match[1])
            number = int(match[3])
            base = _with_rank(base, rank, world_size) % number
        else:
            number = 0
        return (world_size, rank, number) if base == name else None

    def is_other_world_size(self, name: str) -> bool:
        """Return whether `name` is this build's pattern with another world size.

        `name` has no folder. Ranks of both world sizes would compute the same samples.
        """
        base, (world_size, _) = _without_rank(name)
        return base == self._base and world_size != self._rank[0]

    def existing(self, names: Iterable[str]) -> dict[int, str]:
        """Return the shards of this pattern among file names, by number, ascending."""
        numbers = {number: name for name in names if (number := self.number(name)) is not None}
        return dict(sorted(numbers.items()))

    def build_shards(self, names: Iterable[str]) -> list[str]:
        """Return the build's shards among `names`, by world size, rank and number."""
        places = {name: place for name in names if (place := self._parse(name)) is not None}
        return sorted(places, key=lambda name: (places[name], name))

    def shards_by_age(self) -> list[tuple[int, str]]:
        """Return number and path of the build's existing shards, by number.

        If each writer starts at the next number in the folder, shards with higher numbers contain the newer samples of a key.
        """
        places = {name: self._parse(name) for name in folder_of(self.folder).names()}
        return sorted((place[2], self.locate(name)) for name, place in places.items() if place is not None)

    def remove_strays(self) -> None:
        """Delete the temporary files of killed writers, but no folders.

        The `WriterLock` of this pattern must be held: then a rank of a build with another world size cannot be running.
        """

        def is_ours(stray: str) -> bool:
            name = os.path.basename(stray)[1:].rsplit(".", 2)[0]
            shard = os.path.splitext(name)[0] + os.path.splitext(self._base)[1]
            place = self._parse(shard if name == dali_index_path(shard) else name)
            return place is not None and (place[:2] == self._rank or place[0] != self._rank[0])

        remove_temporary(self.folder, ".*", is_ours)


def _build_regex(base: str) -> str:
    """Return a regular expression with the groups rank, world size and number."""
    rank = "(?:r([0-9]{1,9})of([0-9]{1,9})-)?"
    return rf"{rank}([0-9]+)".join(re.escape(part) for part in _NUMBER.split(base, maxsplit=1))


def _with_rank(base: str, rank: int, world_size: int) -> str:
    """Add the label of a rank, such as `r3of8-`, before the number."""
    label = f"r{rank:0{len(str(world_size - 1))}}of{world_size}-" if world_size > 1 else ""
    return _NUMBER.sub(lambda number: label + number[0], base, count=1)


def _without_rank(name: str) -> tuple[str, tuple[int, int]]:
    """Split a pattern's name into the base and (world size, rank)."""
    match = _RANK.search(name)
    if match is not None:
        base, rank, world_size = name[: match.start()] + name[match.end() :], int(match[1]), int(match[2])
        if _with_rank(base, rank, world_size) == name:
            return base, (world_size, rank)
    return name, _DEFAULT_RANK
