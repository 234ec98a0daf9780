"""Names of samples from the paths of their media files, which trainers store as absolute paths."""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Iterable, Sequence


def name_media(paths: Sequence[str]) -> list[str]:
    """Return distinct names: paths relative to the folder that contains all files, without suffix if that is unique.

    A path that occurs again gets a number: `clips/a`, `clips/a~2`.
    """
    parts = [path.replace("\\", "/").strip("/").split("/") for path in paths]
    folders = sorted(each[:-1] for each in parts)
    num_common = 0
    while folders and folders[0][num_common : num_common + 1] == folders[-1][num_common : num_common + 1] != []:
        num_common += 1
    names = ["/".join(each[num_common:]) for each in parts]
    stems = {name: os.path.splitext(name)[0] for name in names}
    counts = Counter(stems.values())
    return number_repeats(stems[name] if counts[stems[name]] == 1 else name for name in names)


def number_repeats(names: Iterable[str]) -> list[str]:
    """Return the names with a number at the end of each name that occurred before."""
    found: dict[str, None] = {}
    counts: Counter[str] = Counter()
    for name in names:
        distinct = name
        while distinct in found:
            counts[name] += 1
            distinct = f"{name}~{counts[name] + 1}"
        found[distinct] = None
    return list(found)
