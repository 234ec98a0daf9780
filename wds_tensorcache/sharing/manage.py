"""Shared memory by name: `tc.shared_list` and `tc.shared_clear`."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from wds_tensorcache.sharing.folder import base_folder, find_folders, folder_holders, named_folder, read_head
from wds_tensorcache.sharing.reaper import PERSISTENT, remove_if_abandoned
from wds_tensorcache.sharing.table import TABLE, Table
from wds_tensorcache.storage.locks import locked_folder


@dataclass(frozen=True, slots=True)
class SharedInfo:
    """The shared memory of one name.

    Attributes:
        name: Name of the SharedDataset.
        fingerprint: As `SharedDataset.fingerprint`.
        num_samples: Number of samples in the shared memory.
        nbytes: Bytes of shared memory that these samples take, without the table.
        holders: Process ids of the processes that hold the shared memory, ascending. Empty if it is persistent and not in use,
            or is about to be freed.
        is_persistent: True if the shared memory is kept after its last holder is gone.
    """

    name: str
    fingerprint: dict[str, object]
    num_samples: int
    nbytes: int
    holders: tuple[int, ...]
    is_persistent: bool


def shared_list(directory: str | os.PathLike[str] | None = None) -> list[SharedInfo]:
    """Return this user's shared memory in `directory`, sorted by name.

    By default, `directory` is `/dev/shm`. Damaged folders are left out. Persistent memory, and memory of killed processes that
    was not freed yet, is listed with no holders.

    Raises:
        NotImplementedError: The system is not Linux.
        FileNotFoundError: The directory does not exist.
        PermissionError: The folder in `directory` belongs to another user, or other users can access it.
    """
    infos = []
    for path in find_folders(base_folder(directory)):
        # Leave out damaged folders, which `SharedDataset` reports, and folders that another process is making or removing.
        with suppress(OSError, ValueError):
            head = read_head(path)
            table = Table(os.path.join(path, TABLE), head["fingerprint"]["length"])
            infos.append(
                SharedInfo(
                    head["name"],
                    head["fingerprint"],
                    int(table.find_present().sum()),
                    sum(segment.reserved for segment in table.segments()),
                    tuple(folder_holders(path)),
                    os.path.exists(os.path.join(path, PERSISTENT)),
                )
            )
    return sorted(infos, key=lambda info: info.name)


def shared_clear(name: str, directory: str | os.PathLike[str] | None = None) -> None:
    """Free the shared memory of a name, even if it is persistent.

    Args:
        name: Name of the SharedDataset.
        directory: As in SharedDataset.

    Raises:
        FileNotFoundError: No shared memory has this name, and the message lists the names; or `directory` does not exist.
        InvalidKeyError: The name is not allowed.
        BlockingIOError: Processes hold the shared memory, perhaps this one. The message lists their ids.
        FileExistsError: Another process opens or clears shared memory, and has not ended that after a minute.
        IsADirectoryError: Another program has made a folder in the folder of the shared memory.
        NotImplementedError, PermissionError: As for `shared_list`.
    """
    base = base_folder(directory)
    path = named_folder(base, name)
    if not os.path.isdir(path) or os.path.islink(path):
        names = [info.name for info in shared_list(directory)]
        raise FileNotFoundError(f"no shared memory {name!r:.200}; the names are {names}")
    with locked_folder(base):
        if not remove_if_abandoned(path, even_persistent=True):
            raise BlockingIOError(
                f"{path} is held by processes {folder_holders(path)}; close the SharedDataset there, or end them"
            )
