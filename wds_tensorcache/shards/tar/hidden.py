"""Members after the end of an archive, as after `cat a.tar b.tar`: readers stop at the end, and do not see them."""

from __future__ import annotations

import os
from collections.abc import Callable

from wds_tensorcache.errors import TarFormatError
from wds_tensorcache.shards.tar.fields import adds_up
from wds_tensorcache.shards.tar.headers import BLOCK

__all__ = ["HIDDEN_REMEDY", "find_header", "find_header_in", "hidden_members", "lost_members"]

HIDDEN_REMEDY = (
    "if tars were concatenated, keep each as a shard, or join caches with `tensorcache merge` (tc.merge); if a header was "
    "lost, `tensorcache repair` (tc.repair) saves all other samples"
)

_CHUNK_NBYTES = 1 << 20
_MAGIC, _MAGIC_BEGIN = b"ustar", 257


def find_header(read: Callable[[int, int], bytes], begin: int, end: int) -> int | None:
    """Return the offset of the first tar header in the bytes `[begin, end)` of a file, or None; `begin` is that of a block."""
    for at in range(begin, end, _CHUNK_NBYTES):
        found = find_header_in(read(at, min(at + _CHUNK_NBYTES, end)))
        if found is not None:
            return at + found
    return None


def find_header_in(blocks: bytes) -> int | None:
    """Return the offset of the first tar header in a sequence of blocks, or None."""
    at = blocks.find(_MAGIC)
    while at >= 0:
        begin = at - _MAGIC_BEGIN
        if begin % BLOCK == 0 and adds_up(blocks[begin : begin + BLOCK]):
            return begin
        at = blocks.find(_MAGIC, at + 1)
    return None


def hidden_members(end: int, offset: int) -> TarFormatError:
    """Return the error for a tar header at byte `offset`, after the end of the archive at byte `end`."""
    what = (
        f"a tar header after the end of the archive at byte {end}: readers stop there, and see no member from here on"
    )
    return TarFormatError(f"{what}; {HIDDEN_REMEDY}", offset=offset, kind="trailing")


def lost_members(idx: str, end: int, listed: int) -> TarFormatError:
    """Return the error for zeros from byte `end`, although DALI's index at `idx` lists a member at byte `listed`."""
    what = f"zeros, although {os.path.basename(idx)} lists a member at byte {listed}: readers stop there, and see no member"
    remedy = "`tensorcache verify` (tc.verify) describes the damage, `tensorcache repair` (tc.repair) saves all other samples"
    return TarFormatError(f"{what} from here on; {remedy}; delete {idx} if it is stale", offset=end, kind="lost")
