"""List and clear shared memory by name: `tc.shared_list` and `tc.shared_clear`."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from wds_tensorcache.sharing.folder import (
    base_folder,
    find_folders,
    folder_holders,
    named_folder,
    read_head,
    remove_if_left,
)
from wds_tensorcache.sharing.reaper import IS_PERSISTENT
from wds_tensorcache.sharing.table import TABLE, Table

__all__ = ["SharedInfo", "shared_clear", "shared_list"]


@dataclass(frozen=True, slots=True)
class SharedInfo:
    """The shared memory of one name.

    Attributes:
        name: Name of the SharedDataset.
        fingerprint: Type and length of the dataset, and the text that was passed.
        num_samples, nbytes: Number of samples in the memory, and the bytes they take.
        holders: Process ids of the processes that hold it.
        is_persistent: True if it is kept after the last holder is gone.
    """

    name: str
    fingerprint: dict[str, object]
    num_samples: int
    nbytes: int
    holders: tuple[int, ...]
    is_persistent: bool


def shared_list(directory: str | os.PathLike[str] | None = None) -> list[SharedInfo]:
    """Return all shared memory of this user in `directory`, by default in `/dev/shm`, in the order of the names.

    Raises:
        NotImplementedError: The system is not Linux.
    """
    found = []
    for path in find_folders(base_folder(directory)):
        if os.path.basename(path).startswith("."):
            continue  # being made or removed
        # removed just now, or damaged by a crash of the machine: opening it tells
        with suppress(OSError, ValueError, TypeError, KeyError):
            described = read_head(path)
            table = Table(os.path.join(path, TABLE), described["fingerprint"]["length"])
            found.append(
                SharedInfo(
                    described["name"],
                    described["fingerprint"],
                    len(table.present()),
                    sum(segment.reserved for segment in table.segments()),
                    tuple(folder_holders(path)),
                    os.path.exists(os.path.join(path, IS_PERSISTENT)),
                )
            )
    return sorted(found, key=lambda each: each.name)


def shared_clear(name: str, directory: str | os.PathLike[str] | None = None) -> None:
    """Free the shared memory of a name, also if it is persistent.

    Raises:
        FileNotFoundError: There is none with this name.
        InvalidKeyError: No shared memory can have this name.
        BlockingIOError: Processes hold it; the message lists them.
    """
    path = named_folder(base_folder(directory), name)
    if not os.path.isdir(path):
        raise FileNotFoundError(
            f"no shared memory {name!r:.200}; there is {[each.name for each in shared_list(directory)]}"
        )
    if not remove_if_left(path, even_persistent=True):
        raise BlockingIOError(f"{path} is held by processes {folder_holders(path)}; close it there, or end them")
