"""Write the committed corpus, by `python -m tests.fuzz.seeds`: real encoder output, and edge cases by hand.

Names that begin with `found-` are inputs that broke a target once; they are kept.
"""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np

import wds_tensorcache as tc
from tests.fuzz.forge import ARRAYS, KEY_RECORD, RECORD
from tests.fuzz.known import program
from tests.fuzz.targets import ALLOW, SAMPLES, Colour, Trusted, shard
from tests.hostile.colliding import CONTAINERS, KEYS
from tests.hostile.pickles import call, text
from tests.shards.tars import UNUSUAL, build, pax, raw_header, record
from wds_tensorcache.codec.binding import PREAMBLE_NBYTES
from wds_tensorcache.codec.header import parse_header
from wds_tensorcache.shards.footer import TRAILER_NBYTES, build_footer
from wds_tensorcache.shards.index_builder import scan_shard

CORPUS = Path(__file__).parent / "corpus"
PROTO = b"\x80\x04"
REFERENCES = b"".join(
    text("builtins") + text("format") + b"\x93" + text(f"{kind}:{name}") + b"\x85R"
    for kind, name in (("ndarray", "0"), ("tensor", "1"), ("tensor", "2.x?dtype=complex32"))
)


def _json_header(entries: str, nbytes: int = 0) -> bytes:
    return len(entries).to_bytes(8, "little") + entries.encode() + bytes(nbytes)


def headers() -> dict[str, bytes]:
    """Return members, and headers made by hand."""
    made = {f"sample-{number}": tc.encode_sample(sample)[1] for number, sample in enumerate(SAMPLES)}
    entry = '"shape":[0,%s],"data_offsets":[0,0]}}'
    made["empty"] = _json_header("{}")
    made["foreign"] = _json_header('{"a.b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  ', 4)
    made["bool"] = _json_header('{"\\u00e9":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}', 2)
    made["wide"] = _json_header('{"x":{"dtype":"C64",' + entry % (1 << 59))
    made["deep"] = _json_header('{"x":' + "[" * 500 + "]" * 500 + "}")
    return made


LISTED = {
    "datetime": ("datetime", "datetime", b"C\x0a\x07\xe8\x01\x01\x00\x00\x00\x00\x00\x01\x85"),
    "timedelta": ("datetime", "timedelta", b"K\x01K\x02K\x03\x87"),
    "decimal": ("decimal", "Decimal", text("1.50") + b"\x85"),
    "fraction": ("fractions", "Fraction", b"K\x01K\x03\x86"),
    "uuid": ("uuid", "UUID", text("12345678123456781234567812345678") + b"\x85"),
    "path": ("pathlib", "PurePosixPath", text("a/b") + b"\x85"),
    "size": ("torch", "Size", b"K\x01K\x02\x86\x85"),
    "device": ("torch", "device", text("cuda") + b"K\x01\x86"),
    "dtype": ("numpy", "dtype", text("M8[25s]") + b"\x85"),
    "scalar": ("numpy", "float16", b"G?\xf0" + bytes(6) + b"\x85"),
    "datetime64": ("numpy", "datetime64", b"K\x05" + text("ns") + b"\x86"),
    "deque": ("collections", "deque", b")K\x03\x86"),
    "slice": ("builtins", "slice", b"NK\x01N\x87"),
    "bytearray": ("builtins", "bytearray", b"C\x01a\x85"),
}


def skeletons() -> dict[str, bytes]:
    """Return skeletons of samples, and one of each listed type."""
    made = {f"sample-{number}": tc.encode_sample(sample)[0] for number, sample in enumerate(SAMPLES)}
    made |= {name: PROTO + call(*listed) + b"." for name, listed in LISTED.items()}
    factory = text("builtins") + text("list") + b"\x93\x85"
    made["defaultdict"] = PROTO + call("collections", "defaultdict", factory) + text("k") + b"]s."
    made["loop"] = PROTO + b"]\x94h\x00\x85a."
    made["sets"] = PROTO + b"\x8f(K\x01N\x85\x90}(\x8a\x09" + bytes(8) + b"\x01N(K\x01K\x02\x91Nu\x86."
    made["lengths"] = PROTO + b"(X\1\0\0\0aB\1\0\0\0b\x96\1\0\0\0\0\0\0\0c\x8b\2\0\0\0\xff\x7f\x95\1\0\0\0\0\0\0\0Nt."
    made["allowed"] = tc.encode_sample([Trusted(1, "a"), Colour.RED], allow=ALLOW)[0]
    made["references"] = PROTO + b"(" + REFERENCES + b"t."
    return made


def samples() -> dict[str, bytes]:
    """Return both members after `how, length of the skeleton`, with their own digests, and marked to get right ones."""
    made = {}
    for number, sample in enumerate(SAMPLES):
        skeleton, tensors = tc.encode_sample(sample)
        body = skeleton[PREAMBLE_NBYTES:]
        made[f"signed-{number}"] = b"\0" + len(skeleton).to_bytes(2, "little") + skeleton + tensors
        made[f"bound-{number}"] = b"\1" + len(body).to_bytes(2, "little") + body + tensors
    listed = PROTO + b"](" + b"".join(call(*row) for row in LISTED.values()) + b"e."
    member = _json_header("{}")
    made["listed"] = b"\0" + len(listed).to_bytes(2, "little") + listed + member
    return made


def templates() -> dict[str, bytes]:
    """Return pairs of bodies with the same structure, after the length of the first."""
    values = (
        (b"K\x01", b"M\1\1"),
        (text("a"), text("bcd")),
        (b"N", b"\x88"),
        (b"X\1\0\0\0a", b"C\1b"),
        (b"G" + bytes(8), b"J\1\0\0\0"),
        (b"\x8a\1\1", b"B\1\0\0\0x"),
    )
    made = {}
    for number, pair in enumerate(values):
        first, second = (b"}(" + text("r") + b"(" + REFERENCES + b"t" + text("v") + value + b"u." for value in pair)
        made[f"pair-{number}"] = bytes([len(first), 0]) + first + second
    return made


def _records(footer: bytes) -> bytes:
    """Return the arrays of an index as records."""
    layout, _ = parse_header(footer[:-TRAILER_NBYTES])
    return b"".join(
        RECORD.pack(ARRAYS.index(t.name), "U8 U16 U32 U64".split().index(t.dtype), t.shape[0]) + footer[t.begin : t.end]
        for t in layout.tensors.values()
    )


def indexes() -> dict[str, bytes]:
    """Return the index of the targets' shard, as bytes and as records, and some records made by hand."""
    archive, _ = shard()
    footer = build_footer(scan_shard(lambda begin, end: archive[begin:end], len(archive)), len(archive))
    made = {"raw": b"\0" + footer, "unsigned": b"\1" + footer[:-TRAILER_NBYTES], "records": b"\2" + _records(footer)}
    names = {"caches": ["", "b"], "members": ["json"], "forms": [[], [["x", "U8", 2]]], "references": [None, None]}
    raw = json.dumps(names).encode()
    arrays: dict[str, list[int]] = {
        "keys.text": list(b"abc"), "keys.ends": [1, 3], "layouts.form": [0, 1], "layouts.data_begin": [8, 64],
        "layouts.dims": [2, 3], "cache.1.rows": [1], "member.0.begin": [512, 1024], "member.0.nbytes": [1, 0],
    }  # fmt: skip
    for number, count in ((0, 2), (1, 1)):
        for column in ("skeleton_begin", "skeleton_nbytes", "tensors_begin", "layout", "digest"):
            arrays[f"cache.{number}.{column}"] = [{"layout": number, "digest": 0}.get(column, 600)] * count
    by_hand = RECORD.pack(0, 0, len(raw)) + raw
    for name, values in arrays.items():
        by_hand += RECORD.pack(ARRAYS.index(name), 1, len(values)) + np.array(values, "<u2").tobytes()
    made["by-hand"] = b"\2" + by_hand
    return made


def archives() -> dict[str, bytes]:
    """Return tars without an end; their first byte requests one."""
    skeleton, tensors = tc.encode_sample({"x": np.arange(2)})
    members = [("k.skel.pyd", skeleton), ("k.safetensors", tensors)]
    tars = {"cache": build(members)[:-512], "named": build([(n.replace(".", ".a.", 1), c) for n, c in members])[:-512]}
    tars |= {name.replace(" ", "-").replace(",", ""): UNUSUAL[name] for name in UNUSUAL if len(UNUSUAL[name]) <= 2048}
    tars["two"] = build([("a.json", b"1"), ("b.json", b"")])[:-1024]
    tars["path-and-size"] = (
        pax(record(b"path", b"d/e.f.g"), record(b"size", b"3")) + raw_header(b"a", b"0", b"0") + b"123"
    )
    # shorter: the target pads, and content of zeros is that of the next block
    made = {name: b"\3" + (tar[:-512] + b"x" if tar.endswith(bytes(512)) else tar) for name, tar in tars.items()}
    made["as-it-is"] = b"\0" + build([("a.b", b"")])
    made["truncated"] = b"\1" + build([("a.b", b"xyz")])[:600]
    return {name: tar for name, tar in made.items() if len(tar) <= 2049}


def streams() -> dict[str, bytes]:
    """Return tars, one of them compressed."""
    packed = gzip.compress(build([("a.json", b"1"), ("a.txt", bytes(3000))]), mtime=0)
    some = dict(sorted(archives().items())[::2])
    return some | {"gzip": b"\x10" + packed, "gzip-cut": b"\x10" + packed[:-9], "pair": struct.pack("<B", 255)}


def keys() -> dict[str, bytes]:
    """Return a few keys of each type, in each kind of container."""
    return {
        f"keys-{number:02}": KEY_RECORD.pack(number % len(CONTAINERS), number, 40, 0, 1, number % 3, number % 2)
        for number in range(len(KEYS))
    }


def verified() -> dict[str, bytes]:
    """Return shards without an end: an intact one, a half sample, a key twice, and a lost header."""
    skeleton, tensors = tc.encode_sample({"x": np.arange(2)})
    empty = [("a.json", b""), ("b.json", b""), ("a.txt", b"1")]
    few = build(empty)[: 3 * 512 + 1]
    return {
        "whole": b"\3" + build([("k.skel.pyd", skeleton), ("k.safetensors", tensors)])[: 3 * 512 + len(tensors)],
        "a-half": b"\3" + build([("k.safetensors", tensors)])[: 512 + len(tensors)],
        "a-key-twice": b"\3" + few,
        "lost-header": b"\3" + few[:512] + bytes(512) + few[1024:],
        **{f"known-{name}": data for name, data in programs().items()},
    }


def programs() -> dict[str, bytes]:
    """Return shards of known content. Odd numbers are samples; even ones are members, as 16 * type + 2 * name."""
    zeros, flip, cut = 1, 0, 3
    return {
        "sparse": program([1, 1, 16 * 4, 1, 1]),
        "foreign": program([1, *(16 * kind + 2 * kind for kind in range(6)), 1]),
        "inner": program([1, 16 * 8, 1, 16 * 8 + 6], [(flip, 2)], index=1),
        "long": program([16 * 6, 1, 16 * 7 + 4, 1], [(flip, 0)]),
        "pax": program([1, 1, 16 * 2], [(zeros, 4)], is_pax=True),
        "every-header": program([1, 1], [(zeros, at) for at in range(4)], index=2),
        "footer": program([1, 1, 1], [(zeros, 2), (flip + 4, 3)], index=1),
        "zeros": program([1, 1, 1], [(zeros, 2)]),
        "cut": program([1, 1, 1], [(cut, 4000)], index=2),
        "sparse-header": program([0xE2, 1, 1], [(0x98, 0xFE30)], index=1),
        "two": program([1, 1], [], more=1),
        "two-indexed": program([1, 1], [(flip, 1)], index=2, more=1),
    }


def seeds() -> dict[str, dict[str, bytes]]:
    """Return the seeds of each target."""
    tables = (headers(), skeletons(), samples(), templates(), indexes(), indexes(), archives(), streams(), keys())
    tables += (verified(),)
    names = ("header", "skeleton", "sample", "template", "index", "footer", "tar", "stream", "keys", "verify")
    return dict(zip(names, tables, strict=True))


def write(folder: Path = CORPUS) -> None:
    """Write each seed to its own file."""
    for target, made in seeds().items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, data in made.items():
            (folder / target / name).write_bytes(data)


if __name__ == "__main__":
    write()
