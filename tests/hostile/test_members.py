"""Members that webdataset's own decoders read: bad bytes are FormatErrors with their place, and small ones stay small."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image

import wds_tensorcache as tc
from tests.children import run_in_child
from tests.hostile.pickles import little_memory
from tests.hostile.test_pth import rich, saved
from tests.integrations.test_foreign_pickles import ARRAYS


def decoded(field: str, raw: bytes, *handlers: Any, **options: Any) -> Any:
    sample = {"__key__": "k", "__url__": "s.tar", field: raw}
    (found,) = tc.decode(*handlers, **options)([sample])
    return found[field.removesuffix(".gz")] if field.removesuffix(".gz") in found else found[field]


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array), **options)
    return stream.getvalue()


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def header(text: str, version: int = 1) -> bytes:
    body = text.encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(body)) + body


def shaped(shape: str, descr: str = "'<f4'", version: int = 1) -> bytes:
    return header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}", version)


def zipped(files: list[tuple[str, bytes]], kind: int = zipfile.ZIP_DEFLATED, padding: int = 0) -> bytes:
    stream = io.BytesIO(b"PK\x03\x04" * (padding // 4))
    stream.seek(padding)
    with zipfile.ZipFile(stream, "w", kind, compresslevel=1) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return stream.getvalue()


def png() -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (1, 2, 3)).save(stream, "PNG")
    return stream.getvalue()


def ten(*arrays: Any) -> bytes:
    from webdataset import tenbin

    return bytes(tenbin.encode_buffer(list(arrays)))


def pixels(side: int) -> bytes:
    """Return a picture that says it has `side * side` pixels."""
    raw = bytearray(png())
    raw[16:24] = struct.pack(">II", side, side)
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    return bytes(raw)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n{} loop\n"


def scans(count: int) -> bytes:
    """Return a progressive JPEG of 64 pixels; each scan but the first has no bytes, and is a walk over all of them."""
    tables = b"\xff\xdb\0\x43\0" + b"\1" * 64
    tables += b"".join(b"\xff\xc4\0\x14" + kind + b"\1" + bytes(16) for kind in (b"\x00", b"\x10"))
    frame = b"\xff\xc2\0\x0b\x08\0\x08\0\x08\1\1\x11\0"
    first, next_ = (b"\xff\xda\0\x08\1\1\0" + band + b"\0" for band in (b"\x00\x00", b"\x01\x3f"))
    return b"\xff\xd8" + tables + frame + first + next_ * (count - 1) + b"\xff\xd9"


def fits(content: bytes) -> bytes:
    """Return a FITS picture of 64 pixels, compressed; `content` is what its bytes expand to."""
    fields = {"XTENSION": "'BINTABLE'", "BITPIX": 8, "NAXIS": 2, "NAXIS1": 8, "NAXIS2": 8, "ZIMAGE": "T"}
    fields |= {"ZCMPTYPE": "'GZIP_1  '", "ZBITPIX": 8, "ZNAXIS": 2, "ZNAXIS1": 8, "ZNAXIS2": 8}
    blocks = b""
    for part in ({"SIMPLE": "T", "BITPIX": 8, "NAXIS": 0}, fields):
        cards = [f"{name:<8}= {value:>20}" for name, value in part.items()]
        block = "".join(f"{card:<80}" for card in [*cards, "END"]).encode()
        blocks += block + b" " * (-len(block) % 2880)
    return blocks + bytes(64) + gzip.compress(content, 1)


ZEROS = bytes(66 << 20)


def large_npz(padding: int = 0) -> bytes:
    return zipped([("a.npy", npy(np.frombuffer(ZEROS, np.uint8)))], padding=padding)


# bytes, or a function that takes its time to make them
BAD: dict[str, tuple[str, Any]] = {
    "npy: nothing": ("npy", b""),
    "npy: text": ("npy", b"something else"),
    "npy: cut": ("npy", npy(np.arange(100))[:-1]),
    "npy: version": ("npy", b"\x93NUMPY\x09\0" + bytes(100)),
    "npy: object": ("npy", npy(np.array([{}], object), allow_pickle=True)),
    "npy: 400 GB": ("npy", shaped("(100000000000,)") + bytes(64)),
    "npy: 400 GB, version 3": ("npy", shaped("(100000000000,)", version=3) + bytes(64)),
    "npy: overflow": ("npy", shaped("(4294967296, 4294967296)") + bytes(64)),
    "npy: negative": ("npy", shaped("(-1,)") + bytes(64)),
    "npy: large elements": ("npy", shaped("(2,)", "'<U500000000'") + bytes(64)),
    "npy: no elements of many bytes": ("npy", shaped("(1000000000000,)", "'|V0'") + bytes(64)),
    "npy: code": ("npy", header("__import__('os').system('touch OWNED')")),
    "npz: text": ("npz", b"something else"),
    "npz: 400 GB": ("npz", zipped([("a.npy", shaped("(100000000000,)") + bytes(64))])),
    "npz: bomb": ("npz", large_npz),
    "npz: many": ("npz", lambda: zipped([(f"{i}.npy", npy(np.zeros(1 << 20, np.uint8))) for i in range(80)])),
    "npz: LZMA": ("npz", zipped([("a.npy", npy(np.zeros(9)))], zipfile.ZIP_LZMA)),
    # a megabyte and more that a gzip makes small, of which 64 times is more than what the zip becomes
    "npz.gz: bomb in a bomb": ("npz.gz", lambda: gzip.compress(large_npz(2 << 20))),
    "ten: cut": ("ten", ten(np.arange(100))[:-100]),
    "ten: huge": ("ten", b"~TenBin~" + struct.pack("<q", 1 << 62) + bytes(64)),
    "ten: negative": ("tb", b"~TenBin~" + struct.pack("<q", -80) + bytes(64)),
    "json: text": ("json", b"{something else"),
    "json: deep": ("json", b"[" * 1_000_000),
    "gz: text": ("txt.gz", b"something else"),
    "gz: cut": ("txt.gz", gzip.compress(b"abc" * 99)[:-5]),
    "gz: bomb": ("txt.gz", lambda: gzip.compress(ZEROS, 1)),
    "gz: bomb in parts": ("txt.gz", gzip.compress(bytes(1 << 20)) * 80),
    "txt": ("txt", b"\xff"),
    "pkl: text": ("pkl", b"something else"),
    "pth: bomb": ("pth", lambda: zipped([("a/data.pkl", b"x"), ("a/data/0", ZEROS)])),
    "cbor: deep": ("cbor", b"\x81" * 100_000),
    "jpg: EPS": ("jpg", EPS),
    "jpg: 10,000 scans": ("jpg", scans(10_000)),
    "fits: bomb": ("fits", lambda: fits(ZEROS)),
    "png": ("png", b"something else"),
    "png: 900 million pixels": ("png", pixels(30_000)),
}


@pytest.mark.parametrize(("field", "raw"), BAD.values(), ids=BAD)
def test_bad_bytes(field: str, raw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw = raw if isinstance(raw, bytes) else raw()
    # what a gzip may become is kept until it becomes more
    with (
        little_memory((5 << 24 if field.endswith(".gz") else 1 << 25) + 64 * len(raw)),
        pytest.raises(tc.FormatError, match=f"^s.tar: sample 'k': member '{field}': ") as caught,
    ):
        decoded(field, raw, "pil")
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__).__name__ != "DecodingError"
    assert not list(tmp_path.iterdir())
    assert list(tc.decode("pil", handler=wds.ignore_and_continue)([{"__key__": "k", field: raw}])) == []


GOOD = {
    "npy": npy(np.arange(6).reshape(2, 3)),
    "npy of records": npy(np.zeros(3, [("a", "<i4"), ("b", "<f8")])),
    "npy of Python 2": shaped("(3L,)") + bytes(12),
    "npy in the order of Fortran": npy(np.asfortranarray(np.arange(6).reshape(2, 3))),
    "npy without elements": npy(np.zeros((0, 1 << 40))),
    "npy of empty texts": npy(np.array(["", ""])),
    "npz": npz(a=np.arange(3), b=np.zeros((2, 0))),
    "npz of zeros": npz(a=np.zeros(8 << 20, np.uint8)),
    "ten": ten(np.arange(3), np.zeros((2, 2), np.float32)),
    "json": json.dumps({"a": [1, None, 2.5]}).encode(),
    "txt": "né".encode(),
    "cls": b"7",
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b)) and type(a) is type(b)


@pytest.mark.filterwarnings("ignore:Reading `.npy`:UserWarning")  # of Python 2
@pytest.mark.parametrize("name", GOOD)
def test_good_bytes_are_decoded_as_webdataset_does(name: str) -> None:
    field, raw = name.split(" ")[0].strip(","), GOOD[name]
    for suffix, content in ((field, raw), (f"{field}.gz", gzip.compress(raw)), (f"x.{field}", raw)):
        sample = {"__key__": "k", suffix: content}
        (stock,) = wds.decode()([dict(sample)])
        (ours,) = tc.decode()([dict(sample)])
        assert list(ours) == list(stock)
        assert same(ours[suffix], stock[suffix])


def test_good_pickles_in_gzip() -> None:
    raw = gzip.compress(pickle.dumps(list(range(1000))))
    (sample,) = tc.decode()([{"__key__": "k", "pkl.gz": raw}])
    assert sample["pkl.gz"] == list(range(1000))


FOREIGN = rich()
BASES = [(name, GOOD[name]) for name in ("npy", "npz", "ten", "json", "cls")]
BASES += [("txt.gz", gzip.compress(b"abc")), ("png", png())]
BASES += [("pth", saved(FOREIGN)), *(("pkl", pickle.dumps([ARRAYS, FOREIGN], protocol)) for protocol in (2, 3, 4, 5))]


@given(st.data())
def test_any_change(data: st.DataObject) -> None:
    """Another value, or an error with its place."""
    field, base = data.draw(st.sampled_from(BASES))
    raw = bytearray(base)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        raw[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    place = f"s.tar: sample 'k': member '{field}': "
    try:
        decoded(field, bytes(raw), "pil")
        message = place
    except tc.FormatError as exc:
        message = str(exc)
    assert message.startswith(place)


EMPTY_GZ = b"\x1f\x8b\x08\4" + bytes(6) + b"\xd0\0" + bytes(208) + b"\3\0" + bytes(8)  # with a header of 220 bytes
COSTLY = {
    "gz of empty gzips": {"txt.gz": EMPTY_GZ * 100_000},  # the rest of the bytes, copied for each
    # webdataset looks for dots in all of it, again from each byte
    "long extensions": {"x" * 15_000 + str(i): b"" for i in range(1_000)},
}


@pytest.mark.parametrize("sample", COSTLY.values(), ids=COSTLY)
def test_costs_grow_with_the_bytes(sample: dict[str, bytes]) -> None:
    assert run_in_child(lambda: tc.decode("pil")({"__key__": "k", **sample}), kill_after_s=90) == 0  # else minutes


def test_no_program_runs_for_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow passes EPS to Ghostscript, whatever name a member has."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/OWNED\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it is looked for again
    with pytest.raises(tc.FormatError, match="EPS"):
        decoded("jpg", EPS, "pil")
    assert not (tmp_path / "OWNED").exists()


def test_the_bound_is_the_callers() -> None:
    raw = gzip.compress(bytes(100 << 20), 1)
    assert len(decoded("bin.gz", raw, max_expanded_nbytes=100 << 20)) == 100 << 20
    with pytest.raises(tc.FormatError, match="expands to more than 104,857,599.*max_expanded_nbytes=…"):
        decoded("bin.gz", raw, max_expanded_nbytes=(100 << 20) - 1)
    # 64 times its own length is never too much
    text = b"".join(b"%d," % (i * i) for i in range(20_000))
    assert decoded("bin.gz", gzip.compress(text), max_expanded_nbytes=0) == text
    for wrong, error in ((-1, ValueError), ("1", TypeError), (1.5, TypeError)):
        with pytest.raises(error):
            tc.decode(max_expanded_nbytes=wrong)


class Mine(Exception):
    pass


def fails(key: str, raw: bytes) -> Any:
    raise Mine(key)


def test_errors_of_the_callers_functions_are_theirs() -> None:
    def refuses(key: str, raw: bytes) -> Any:
        return tc.decode_sample(raw, raw)

    def fails_inside(raw: bytes) -> Any:
        raise Mine

    inside = wds.handle_extension("x", fails_inside)
    for handlers, options in (([fails], {}), ([inside], {}), ([], {"pre": [fails]}), ([], {"post": [fails]})):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - newer webdataset releases wrap it
            decoded("x", b"1", *handlers, **options)
        assert isinstance(caught.value, Mine) or isinstance(caught.value.__cause__, Mine)
        assert not isinstance(caught.value, tc.FormatError)
    with pytest.raises(tc.FormatError, match="^s.tar: sample 'k': member 'x': "):
        decoded("x", b"1", refuses)
