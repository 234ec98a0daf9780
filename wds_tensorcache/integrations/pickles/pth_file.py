"""Files of `torch.save`: a zip with a pickle, and a record for each storage that the pickle names."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

from wds_tensorcache.codec.skeleton.types import Allowed
from wds_tensorcache.errors import FormatError
from wds_tensorcache.integrations.pickles.advice import advising
from wds_tensorcache.integrations.pickles.storages import File
from wds_tensorcache.integrations.pickles.tensor_reader import TensorReader
from wds_tensorcache.integrations.pickles.translate import translate
from wds_tensorcache.integrations.pickles.zip_list import list_zipped

ZIP = b"PK\x03\x04"  # the first bytes
_IS_ENCRYPTED = 1
_TWO_LENGTHS = struct.Struct("<HH").unpack


@dataclass(frozen=True, slots=True, eq=False)
class PthFile:
    """The pickle in a file of `torch.save`, and where its other records are.

    Attributes:
        file: The open file, or its content.
        pickled: The pickle.
        records: Range of bytes of each record by its name, for example `data/0`.
    """

    file: File
    pickled: bytes
    records: dict[str, range]

    def decode(
        self, limit: int, allow: Allowed, remedy: str, limit_remedy: str, reader_class: type[TensorReader]
    ) -> Any:
        """Return the object in the file; arguments and errors are those of `load_pth`."""
        with advising(remedy):
            body = translate(self.pickled)
            reader = reader_class(self.file, self.records, len(body), limit, remedy, limit_remedy)
            result = reader.unpickle(body, allow)
            reader.check(result)
            return result


def read_pth_file(file: File, remedy: str) -> PthFile:
    """Read the pickle in a file of `torch.save`, and find its other records.

    Args:
        file: The open file, or its content.
        remedy: Advice for users that trust the file, at the end of messages.

    Raises:
        FormatError: The file is damaged, in a different format, or has tensors that are not little-endian.
    """
    nbytes = len(file) if isinstance(file, memoryview) else file.seek(0, io.SEEK_END)
    begin = _read(file, range(4))
    if begin != ZIP:
        if not begin:
            raise FormatError("the file is empty")
        # older files, and those of `pickle.dump`, begin with the number of their protocol
        advice = remedy if begin[:1] == b"\x80" else ""
        raise FormatError(f"expected a zip file, the format of torch.save since torch 1.6{advice}")
    with advising(remedy):
        records = _list_records(file, nbytes)
        pickled = _read(file, records["data.pkl"])
        if "byteorder" in records and _read(file, records["byteorder"]) != b"little":
            raise FormatError(f"the tensors are not little-endian{remedy}")
        return PthFile(file, pickled, records)


def _list_records(file: File, nbytes: int) -> dict[str, range]:
    """Return the positions of the bytes of each file in the zip, by their names in the folder that contains them all."""
    files = list_zipped(file, nbytes)
    folder = files[0].filename.partition("/")[0] + "/"
    records = {}
    for each in files:
        # checksums are not compared: torch does not compare them either, and may omit them when it writes
        head = each.header_offset + 26
        begin = head + 4 + sum(_TWO_LENGTHS(_read(file, range(head, head + 4))))  # after its name and extra fields
        is_plain = each.compress_type == zipfile.ZIP_STORED and not each.flag_bits & _IS_ENCRYPTED
        if not is_plain or begin + each.file_size > nbytes:
            raise FormatError(f"{each.filename!r:.100} is compressed, encrypted or cut short, expected a plain file")
        records[each.filename.removeprefix(folder)] = range(begin, begin + each.file_size)
    if len(records) < len(files) or sum(map(len, records.values())) > nbytes:
        raise FormatError("files in the zip overlap or have the same name")
    return records


def _read(file: File, record: range) -> bytes:
    if isinstance(file, memoryview):
        return bytes(file[record.start : record.stop])
    file.seek(record.start)
    return file.read(len(record))
