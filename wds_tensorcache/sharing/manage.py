"""List and clear shared memory by name: `tc.shared_list` and `tc.shared_clear`."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass

from wds_tensorcache.sharing.folder import (
    base_folder,
    find_folders,
    folder_holders,
    named_folder,
    read_head,
    remove_if_abandoned,
)
from wds_tensorcache.sharing.reaper import IS_PERSISTENT
from wds_tensorcache.sharing.table import TABLE, Table

_MAX_WAIT_S = 2.0  # for a process that is removing the folder, or checking whether it may


@dataclass(frozen=True, slots=True)
class SharedInfo:
    """The shared memory of one name.

    Attributes:
        name: Name of the SharedDataset.
        fingerprint: As `SharedDataset.fingerprint`.
        num_samples: Number of samples in the shared memory.
        nbytes: Bytes of shared memory that these samples take, without the table.
        holders: Process ids of the processes that hold the shared memory, ascending; may be empty if it is persistent.
        is_persistent: True if the shared memory is kept after its last holder is gone.
    """

    name: str
    fingerprint: dict[str, object]
    num_samples: int
    nbytes: int
    holders: tuple[int, ...]
    is_persistent: bool


def shared_list(directory: str | os.PathLike[str] | None = None) -> list[SharedInfo]:
    """Return the shared memory of this user in `directory`, by default `/dev/shm`, in the order of the names.

    Damaged folders are left out.

    Raises:
        NotImplementedError: The system is not Linux.
        FileNotFoundError: The directory does not exist.
        PermissionError: The folder in `directory` does not belong to this user alone.
    """
    found = []
    for path in find_folders(base_folder(directory)):
        if os.path.basename(path).startswith("."):
            continue  # a process is making it
        # Leave out folders that another process is removing, and damaged ones: opening such a name raises the error.
        with suppress(OSError, ValueError, TypeError, KeyError):
            described = read_head(path)
            table = Table(os.path.join(path, TABLE), described["fingerprint"]["length"])
            found.append(
                SharedInfo(
                    described["name"],
                    described["fingerprint"],
                    int(table.present().sum()),
                    sum(segment.reserved for segment in table.segments()),
                    tuple(folder_holders(path)),
                    os.path.exists(os.path.join(path, IS_PERSISTENT)),
                )
            )
    return sorted(found, key=lambda each: each.name)


def shared_clear(name: str, directory: str | os.PathLike[str] | None = None) -> None:
    """Free the shared memory of a name, even if it is persistent.

    Args:
        name: Name of the SharedDataset.
        directory: As in SharedDataset.

    Raises:
        FileNotFoundError: No shared memory has this name; the message lists the names that exist.
        InvalidKeyError: The name is not allowed.
        BlockingIOError: Processes hold the shared memory, and the message lists their ids; or its removal has not ended.
        IsADirectoryError: Another program has made a folder in it.
        NotImplementedError: The system is not Linux.
    """
    path = named_folder(base_folder(directory), name)
    if not os.path.isdir(path) or os.path.islink(path):
        raise FileNotFoundError(
            f"no shared memory {name!r:.200}; the names are {[each.name for each in shared_list(directory)]}"
        )
    deadline = time.monotonic() + _MAX_WAIT_S
    while not remove_if_abandoned(path, even_persistent=True):
        holders = folder_holders(path)
        if holders or time.monotonic() > deadline:
            if holders:
                raise BlockingIOError(
                    f"{path} is held by processes {holders}; close the SharedDataset there, or end them"
                )
            raise BlockingIOError(
                f"{path} is being removed, or was only partly removed; call tc.shared_clear again later"
            )
        time.sleep(0.01)  # another process is removing it, or checking whether it may
