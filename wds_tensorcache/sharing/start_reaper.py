"""Start the reaper, the process that removes a shared folder after its last holder is gone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from wds_tensorcache.sharing import reaper
from wds_tensorcache.sharing.reaper import HOLDERS, REAPER_BYTE
from wds_tensorcache.storage.range_locks import RangeLocks


@contextlib.contextmanager
def reaper_started(action: str, folder: str, renamed: str) -> Iterator[None]:
    """Start the reaper of a folder, unless it has one. It begins to wait for the holders at the end of the `with` block.

    Without a reaper, for example because the system allows no more processes, the next process that opens a folder removes
    abandoned ones.

    Args:
        action: "make" if the reaper makes the folder before the `with` block, "wait" if the folder exists.
        folder: Path of the folder. The caller holds it before the end of the `with` block.
        renamed: Path to which the caller will rename the folder, or `folder`.
    """
    if not os.path.basename(sys.executable or "").startswith(("python", "pypy")):
        yield  # Python is embedded in another program
        return
    if action == "wait" and RangeLocks(os.path.join(folder, HOLDERS)).locked_by_others(REAPER_BYTE, 1):
        yield
        return
    gate, opened = os.pipe()
    try:
        with contextlib.suppress(OSError):  # no such executable, no more processes
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, action, folder, renamed],
                stdin=gate,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            process.wait()  # for the folder, and for the process in the background that waits for the holders
        yield
    finally:
        # Closing the pipe is not enough while a child, forked meanwhile by another thread, has it open.
        os.write(opened, b"\n")
        os.close(opened)
        os.close(gate)
