"""`NAME.idx`, DALI's index of a shard."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from wds_tensorcache.errors import FormatError, InvalidKeyError
from wds_tensorcache.shards.index import ShardIndex
from wds_tensorcache.shards.names import dali_index_path
from wds_tensorcache.shards.tar import BLOCK, is_header
from wds_tensorcache.storage.files import ShardFile
from wds_tensorcache.storage.folder import Folder

# a member: its extension, the offset and length of its content in bytes, and its name
ListedMember = tuple[str, int, int, str]
_WIDTHS = {"v1.1": 3, "v1.2": 4}  # fields per member
# the fields of a line: other white space of Unicode and other control characters may be part of a name
_fields_of = re.compile(r"[^ \t\n\r\v\f]+").findall


def list_members(index: ShardIndex) -> list[list[ListedMember]]:
    """Return the members of each sample, in the order of the shard."""
    samples: list[list[ListedMember]] = [[] for _ in range(len(index.keys))]
    keys, table = list(index.keys), index.members_in_order()
    columns = (table.rows, table.kinds, table.begins, table.sizes)
    for row, kind, begin, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        suffix = table.suffixes[kind]
        samples[row].append((suffix, begin, nbytes, f"{keys[row]}.{suffix}"))
    return samples


def build_dali_index(samples: Iterable[Sequence[ListedMember]]) -> bytes:
    """Build a DALI index (v1.2) with the same bytes as DALI's `wds2idx`.

    Raises:
        InvalidKeyError: A sample has no members, a name contains white space, or an extension is empty.
    """
    lines: list[bytes] = []
    for sample in samples:
        line = " ".join([f"{suffix} {begin} {nbytes} {name}" for suffix, begin, nbytes, name in sample])
        encoded = line.encode("utf-8", "surrogateescape")
        if not sample or len(encoded.split()) != 4 * len(sample):
            raise InvalidKeyError(
                f"sample {len(lines)} has the members {[name for *_, name in sample]!r:.200}, which DALI's index cannot "
                f"represent; expected at least one member, and names without white space or empty extensions"
            )
        lines.append(encoded)
    return b"".join([b"v1.2 %d\n" % len(lines), *[line + b"\n" for line in lines]])


def write_dali_index(folder: Folder, shard: str, index: ShardIndex) -> None:
    """Write DALI's index of a shard. Raise errors as `build_dali_index` and, in a local folder, `check_replaceable` do."""
    name = dali_index_path(shard)
    if not folder.is_remote:
        check_replaceable(folder.locate(name))
    folder.write(name, build_dali_index(list_members(index)))


def split_lines(content: bytes) -> tuple[int, list[str]]:
    """Return the number of fields per member, and each sample's line. Raise FormatError if the first line is wrong."""
    first, *lines = [line.decode("utf-8", "surrogateescape") for line in content.splitlines()] or [""]
    head = _fields_of(first)
    width = _WIDTHS.get("".join(head[:1]), 0)
    if not width or head[1:] != [str(len(lines))]:
        problem = f"the first line is {first[:40]!r}, expected 'v1.1' or 'v1.2' and the number of samples, {len(lines)}"
        raise FormatError(problem, kind="index")
    return width, lines


def split_line(line: str, width: int) -> list[list[str]]:
    """Return the fields of each member in a line. A damaged line may end with fewer than `width` fields."""
    fields = _fields_of(line)
    return [fields[at : at + width] for at in range(0, len(fields), width)]


def check_replaceable(*paths: str) -> None:
    """Raise FileExistsError if a path is a tar, folder or device."""
    # Hazard: an index could replace a shard.
    for path in filter(os.path.exists, paths):
        if not os.path.isfile(path):
            raise FileExistsError(f"{path} is not a file, but the index of a shard needs this name; move it away")
        file = ShardFile(path)
        if is_header(file.read(0, min(BLOCK, file.nbytes))):
            problem = f"{path} is a tar, but the index of another shard needs this name"
            raise FileExistsError(f"{problem}; rename the tar so that its name ends in .tar")
