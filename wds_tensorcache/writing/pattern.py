"""Names of the files of one writer: shards, their indexes, and temporary files."""

from __future__ import annotations

import os
import re

from wds_tensorcache.shards.index_paths import (
    DALI_SUFFIX,
    SIDECAR_SUFFIX,
    check_replaceable,
    dali_index_path,
    sidecar_path,
)
from wds_tensorcache.storage.atomic import find_temporary, remove_stray

__all__ = ["DEFAULT_NAME", "ShardPattern"]

DEFAULT_NAME = "%06d.tar"
_SIDECARS = (DALI_SUFFIX, SIDECAR_SUFFIX)
_NUMBER = re.compile(r"%(?:0\d+)?d")


class ShardPattern:
    """Names of the shards of one writer.

    Args:
        pattern: A path with one number such as `%06d` in its last part; or a path that ends in `.tar`, for a single shard. Any
            other path, or that of an existing folder, means a folder with shards `000000.tar`, `000001.tar`, …

    Raises:
        ValueError: The path is empty, has more than one number, or has a number in a folder's name; or names of shards and
            indexes would collide.
    """

    def __init__(self, pattern: str) -> None:
        if not pattern:
            raise ValueError("the path is empty, expected a folder or a pattern such as 'cache/%06d.tar'")
        is_file = "%" in pattern or pattern.endswith((".tar", *_SIDECARS))
        self.is_default = not is_file or os.path.isdir(pattern)
        if self.is_default:
            pattern = os.path.join(pattern, DEFAULT_NAME)
        self.folder, self.name = os.path.split(pattern)
        self._pattern = pattern
        self.is_numbered = len(_NUMBER.findall(self.name)) == 1
        if "%" in _NUMBER.sub("", self.name, count=1) or "%" in self.folder:
            raise ValueError(f"pattern {pattern!r}: expected at most one number, such as %06d, in its last part")

        first, second = dali_index_path(self.path(0)), dali_index_path(self.path(1))
        if self.name.endswith(_SIDECARS) or (self.is_numbered and first == second):
            raise ValueError(
                f"pattern {pattern!r}: a shard or index would share a name with another index; end the pattern in .tar"
            )

    def __str__(self) -> str:
        return self._pattern

    def path(self, number: int) -> str:
        """Return the path of a shard."""
        return self._pattern % number if self.is_numbered else self._pattern

    def locate(self, name: str) -> str:
        """Return the path of the file `name` in the folder."""
        return os.path.join(self.folder, name)

    def number(self, name: str) -> int | None:
        """Return the number in the name of a shard; None if the file does not match this pattern."""
        if not self.is_numbered:
            return 0 if name == self.name else None
        match = re.fullmatch(_regex(self.name), name)
        return int(match[1]) if match and self.path(int(match[1])) == self.locate(name) else None

    def covers(self, name: str) -> bool:
        """Return whether the name of a file in the folder matches this pattern."""
        return self.number(name) is not None

    def overlaps(self, name: str) -> bool:
        """Return whether this pattern and another pattern, whose last part is `name`, can produce the same shard name.

        The numbers may have different widths: `%d` and `%03d` produce the same names from 100 on.
        """
        halves = [(*_NUMBER.split(each, maxsplit=1), "")[:2] for each in (self.name, name)]
        # A common name starts with both prefixes and ends with both suffixes. Testing one digit between them is enough.
        prefix, suffix = (max(parts, key=len) for parts in zip(*halves, strict=True))
        names = [prefix + suffix[n:] for n in range(len(suffix) + 1) if prefix.endswith(suffix[:n])]
        patterns = [re.compile(_regex(each)) for each in (self.name, name)]
        return any(all(each.fullmatch(common) for each in patterns) for common in (f"{prefix}0{suffix}", *names))

    def existing(self) -> dict[int, str]:
        """Return the paths of existing shards by number, ascending."""
        if not self.is_numbered:
            return {0: self._pattern} if os.path.exists(self._pattern) else {}
        numbers = map(self.number, os.listdir(self.folder or "."))
        return {number: self.path(number) for number in sorted(each for each in numbers if each is not None)}

    def check_removable(self, paths: list[str]) -> None:
        """Raise FileExistsError if a shard is a folder, or if a file has the name of its index, but is not an index."""
        for path in paths:
            if os.path.isdir(path) and not os.path.islink(path):
                raise FileExistsError(f"{path} is a folder, expected a file; move it away, or write to another folder")
            check_replaceable(dali_index_path(path), sidecar_path(path))

    def remove(self, paths: list[str]) -> None:
        """Delete shards and their sidecars."""
        self.check_removable(paths)
        for path in paths:
            for file in (path, dali_index_path(path), sidecar_path(path)):
                if os.path.lexists(file):
                    os.remove(file)

    def remove_strays(self) -> None:
        """Delete the temporary files of killed writers, but no folders with such names."""
        for name in (self.name, dali_index_path(self.name)):
            for stray in find_temporary(self.folder, _regex(name)):
                remove_stray(stray)


def _regex(name: str) -> str:
    return r"([0-9]{1,18})".join(re.escape(part) for part in _NUMBER.split(name, maxsplit=1))
