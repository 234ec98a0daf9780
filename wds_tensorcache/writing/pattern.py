"""The files that a pattern of a writer stands for: shards, their sidecars, and what killed writers left."""

from __future__ import annotations

import os
import re

from wds_tensorcache.shards.catalog import dali_index_path
from wds_tensorcache.shards.sidecar import check_replaceable, sidecar_path
from wds_tensorcache.storage.atomic import find_temporary, remove_stray

__all__ = ["DEFAULT_NAME", "ShardPattern"]

DEFAULT_NAME = "%06d.tar"
_SIDECARS = (".idx", ".index")
_NUMBER = re.compile(r"%(?:0\d+)?d")


class ShardPattern:
    """What the shards of a writer are called.

    Args:
        pattern: A path with one `%d`-style number in its last part, or a path that ends in `.tar`, for a single shard. All
            other paths, and folders that are there, are folders, for shards `000000.tar`, `000001.tar`, …

    Raises:
        ValueError: It has more than one number, or one in a folder's name; or it is empty.
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
                f"pattern {pattern!r}: shards would share a name with each other's indexes; end it in .tar"
            )

    def __str__(self) -> str:
        return self._pattern

    def path(self, number: int) -> str:
        """Return where a shard is."""
        return self._pattern % number if self.is_numbered else self._pattern

    def locate(self, name: str) -> str:
        """Return the path of a file of the folder."""
        return os.path.join(self.folder, name)

    def number(self, name: str) -> int | None:
        """Return the number of the shard of this pattern that a file of the folder is; None if it is none."""
        if not self.is_numbered:
            return 0 if name == self.name else None
        match = re.fullmatch(_regex(self.name), name)
        is_ours = match is not None and self.path(int(match[1])) == self.locate(name)
        return int(match[1]) if match is not None and is_ours else None

    def covers(self, name: str) -> bool:
        """Return whether a file of the folder that is called so is a shard of this pattern."""
        return self.number(name) is not None

    def overlaps(self, name: str) -> bool:
        """Return whether a shard of this pattern may be called like one of another in the folder, whose last part is `name`.

        Numbers are taken for any digits: `%d` and `%03d` have names in common from 100 on.
        """
        mine, other = _parts(self.name), _parts(name)
        found, todo = set[tuple[int, int]](), [(0, 0)]
        while todo:
            at = todo.pop()
            if at in found:
                continue
            found.add(at)
            i, j = at
            if i == len(mine) and j == len(other):
                return True
            more = mine[i] if i < len(mine) else "", other[j] if j < len(other) else ""
            todo += [(i + 1, j)] * (more[0] == _MORE) + [(i, j + 1)] * (more[1] == _MORE)
            if all(more) and _have_in_common(*more):
                todo.append((i + (more[0] != _MORE), j + (more[1] != _MORE)))
        return False

    def existing(self) -> dict[int, str]:
        """Return the shards that are there, by their numbers, ascending."""
        if not self.is_numbered:
            return {0: self._pattern} if os.path.exists(self._pattern) else {}
        numbers = map(self.number, os.listdir(self.folder or "."))
        return {number: self.path(number) for number in sorted(each for each in numbers if each is not None)}

    def check_removable(self, paths: list[str]) -> None:
        """Raise FileExistsError if one of these shards is a folder, or what would go with it is no index."""
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
        """Delete what killed writers had not finished, and nothing but files: the names may be used for anything else."""
        for name in (self.name, dali_index_path(self.name)):
            for stray in find_temporary(self.folder, _regex(name)):
                remove_stray(stray)


_DIGITS = frozenset("0123456789")
_DIGIT, _MORE = "%", "%*"  # of a number: its first digit, and any others


def _parts(name: str) -> list[str]:
    """Return a pattern letter by letter, with two parts for a number."""
    first, *rest = _NUMBER.split(name, maxsplit=1)
    return [*first, *(_DIGIT, _MORE), *rest[0]] if rest else [*first]


def _have_in_common(part: str, other: str) -> bool:
    digits = [each in (_DIGIT, _MORE) for each in (part, other)]
    return part == other or all(digits) or (any(digits) and (part in _DIGITS or other in _DIGITS))


def _regex(name: str) -> str:
    return r"([0-9]{1,18})".join(re.escape(part) for part in _NUMBER.split(name))
