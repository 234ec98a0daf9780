"""Shards, indexes, `.idx` files and manifests, written and read from FORMAT.md alone, as `second_implementation`."""

from __future__ import annotations

import json
import re
import struct
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np

from tests.codec.second_implementation import (
    build_safetensors,
    check,
    digest_of,
    encode,
    escape,
    parse_preamble,
    parse_safetensors,
    resolve,
    run,
)

Shard = list[tuple[str, list[tuple[str, Any]], list[tuple[str, bytes]]]]  # key, caches by name, other members by suffix
_NAME = re.compile(r"(?!(skel|pyd|safetensors)$)[a-z0-9-][a-z0-9_-]*")
_COLUMNS = ("skeleton_begin", "skeleton_nbytes", "tensors_begin", "layout", "digest")


def tar_header(name: str, nbytes: int) -> bytes:
    """Return what precedes a member (1.1)."""
    if nbytes < 8 << 30:
        return ustar_header(name, nbytes)
    record = next(line for n in range(99) if len(line := b"%d size=%d\n" % (n, nbytes)) == n)
    return ustar_header("././@PaxHeader", len(record), b"x") + record.ljust(512, b"\0") + ustar_header(name, 0)


def ustar_header(name: str, nbytes: int, kind: bytes = b"0") -> bytes:
    header = bytearray(512)
    raw = name.encode("utf-8", "surrogateescape")
    header[: len(raw)] = raw
    header[100:124] = (b"0000444\0" if kind == b"0" else b"0000000\0") + 2 * b"0000000\0"
    header[124:148] = b"%011o\0" % nbytes + b"0" * 11 + b"\0"
    header[148:157] = b" " * 8 + kind
    header[257:265] = b"ustar\0" + b"00"
    if kind == b"0":
        header[265:272] = header[297:304] = b"bigdata"
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def write_shard(samples: Shard, fingerprint: dict[str, Any] | None = None) -> bytes:
    """Return a shard with its footer."""
    out = b""
    for key, caches, others in samples:
        members: list[tuple[str, bytes]] = []
        for name, sample in caches:
            suffixes = [f"{name}.{kind}".lstrip(".") for kind in ("skel.pyd", "safetensors")]
            members += zip(suffixes, encode(sample), strict=True)
        members += others
        for suffix, raw in members:
            out += tar_header(f"{key}.{suffix}", len(raw)) + raw + bytes(-len(raw) % 512)
    archive = out + bytes(1024)
    return archive + build_trailer(*index_arrays(archive, fingerprint))


# --- 4: index -------------------------------------------------------------------------------------------------------


def members_of(shard: bytes) -> tuple[list[tuple[str, dict[str, tuple[int, int]]]], int]:
    """Return key and members (offset and length by suffix) of each sample, and where the archive ends."""
    at, samples, seen = 0, [], set()  # type: ignore[var-annotated]
    while True:
        header = shard[at : at + 512]
        check(len(header) == 512, "1.1: end")
        if header == bytes(512):
            return samples, at
        name, nbytes = header[:100].rstrip(b"\0").decode("utf-8", "surrogateescape"), int(header[124:135], 8)
        begin, at = at + 512, at + 512 + nbytes + -nbytes % 512
        check(begin + nbytes <= len(shard), "1.1: cut short")
        first = name.split("/")[0]
        while name.startswith("./"):
            name = name[2:]
        folder, _, last = name.rpartition("/")
        part, dot, suffix = last.partition(".")
        if not part or not dot or header[156:157] != b"0" or re.fullmatch("__.*__", first) or name in ("__", "___"):
            continue
        key = f"{folder}/{part}" if "/" in name else part
        if not samples or samples[-1][0] != key:
            check(key not in seen, "1.2: key twice")
            samples.append((key, {}))
            seen.add(key)
        check(suffix.lower() not in samples[-1][1], "1.2: suffix twice")
        samples[-1][1][suffix.lower()] = begin, nbytes


def cache_of(suffix: str) -> tuple[str, str] | None:
    """Return cache and kind of a suffix."""
    for kind in ("skel.pyd", "safetensors"):
        name = suffix.removesuffix(kind)
        if suffix.endswith(kind) and (not name or (name[-1] == "." and _NAME.fullmatch(name[:-1]))):
            return name[:-1], kind
    return None


class Placed:
    """A tensor in a sample of which only the names matter."""

    def __init__(self, name: str) -> None:
        self.name = name


def references_of(body: bytes, tensors: dict[str, Any]) -> tuple[list[str] | None, list[list[str]]]:
    """Return the texts that refer to the tensors, and the further names; None and none if the body cannot be read."""
    met: dict[str, Placed] = {}

    def reference(text: str) -> object:
        resolve(text, tensors)
        return met.setdefault(text, Placed(text.partition(":")[2].partition("?")[0]))

    try:
        sample = run(body, reference)
        by_name = {text.partition(":")[2].partition("?")[0]: text for text in met}
        check(by_name.keys() == tensors.keys() and len(met) == len(tensors), "2.2")
        return [by_name[name] for name in tensors], further_of(sample, set(tensors))
    except Exception:  # also what Python's own constructors refuse
        return None, []


def further_of(sample: Any, names: set[str]) -> list[list[str]]:
    """Return each further name of a tensor, with its name (2.3)."""
    found: list[list[str]] = []
    used, met, placed = names | {"__metadata__"}, {id(sample)}, set()

    def visit(value: Any, path: str) -> None:
        is_dict = type(value) in (dict, OrderedDict, defaultdict)
        for number, (key, item) in enumerate(value.items() if is_dict else enumerate(value)):
            part = escape(key) if type(key) is str else str(key)
            if is_dict and type(key) is not str and not (type(key) is int and abs(key) < 1 << 64):
                part = f"@{number}"
            where = f"{path}.{part}" if path else part
            if type(item) is Placed:
                if item.name in placed and where not in used and len(where) <= 1000 and len(found) < 1000:
                    used.add(where)
                    found.append([where, item.name])
                placed.add(item.name)
            elif type(item) in WALKED and id(item) not in met:
                met.add(id(item))
                visit(item, where)

    if type(sample) in WALKED:
        visit(sample, "")
    return found


WALKED = (dict, OrderedDict, defaultdict, list, tuple, deque)


def index_arrays(shard: bytes, fingerprint: Any = None) -> tuple[dict[str, list[int]], dict[str, Any], int]:
    """Return the arrays of a shard's index, the JSON of `names`, and where the archive ends."""
    samples, end = members_of(shard)
    text, ends, forms, layouts = b"", [], [], []  # type: ignore[var-annotated]
    caches: dict[str, list[list[int]]] = {}
    others: dict[str, list[list[int]]] = {}
    for row, (key, members) in enumerate(samples):
        text += key.encode("utf-8", "surrogateescape")
        ends.append(len(text))
        for suffix, (begin, nbytes) in members.items():
            cache = cache_of(suffix)
            raw = shard[begin : begin + nbytes]
            if cache is None:
                others.setdefault(suffix, []).append([row, begin, nbytes])
                continue
            name, kind = cache
            pair = [members.get(f"{name}.{kind}".lstrip(".")) for kind in ("skel.pyd", "safetensors")]
            if kind == "safetensors":
                if pair[0] is None:
                    check(raw[8:40] != b'{"__metadata__":{"tensorcache":"', "1.2: half a cache")
                    others.setdefault(suffix, []).append([row, begin, nbytes])
                continue
            check(pair[1], "1.2: half a cache")
            at, length = pair[1]  # type: ignore[misc]
            member = shard[at : at + length]
            tensors, data_begin, digest = parse_safetensors(member)
            body = raw[parse_preamble(raw, length, digest)[0] :]
            form = [[tensor, dtype, len(shape)] for tensor, (dtype, shape, _, _) in tensors.items()]
            entry = (form, *references_of(body, tensors))
            forms += [] if entry in forms else [entry]
            layout = forms.index(entry), data_begin, [dim for row in tensors.values() for dim in row[1]]
            layouts += [] if layout in layouts else [layout]
            caches.setdefault(name, []).append([row, begin, nbytes, at, layouts.index(layout), digest or 0])
    arrays = {"keys.text": list(text), "keys.ends": ends}
    arrays["layouts.form"] = [layout[0] for layout in layouts]
    arrays["layouts.data_begin"] = [layout[1] for layout in layouts]
    arrays["layouts.dims"] = [dim for layout in layouts for dim in layout[2]]
    for what, tables, columns in (("cache", caches, _COLUMNS), ("member", others, ("begin", "nbytes"))):
        for number, table in enumerate(tables.values()):
            if len(table) < len(samples):
                arrays[f"{what}.{number}.rows"] = [row[0] for row in table]
            for place, column in enumerate(columns, 1):
                arrays[f"{what}.{number}.{column}"] = [row[place] for row in table]
    names: dict[str, Any] = {"caches": list(caches), "members": list(others)}
    names |= {"forms": [form for form, *_ in forms], "references": [texts for _, texts, _ in forms]}
    if any(further for *_, further in forms):
        names["further"] = [further for *_, further in forms]
    if fingerprint is not None:
        names["fingerprint"] = json.loads(json.dumps(fingerprint, sort_keys=True))
    return arrays, names, end


def build_trailer(arrays: dict[str, list[int]], names: Any, end: int, shard_nbytes: int | None = None) -> bytes:
    """Return a footer with its zeros; with the length of a shard, the separate file."""
    text = names if type(names) is bytes else json.dumps(names, separators=(",", ":")).encode()
    arrays = {**arrays, "names": list(text)}
    tensors = []
    for name, values in arrays.items():
        bits = next(bits for bits in (8, 16, 32, 64) if max(values, default=0) < 1 << bits)
        bits = 64 if name.endswith(".digest") else bits
        tensors.append((name, f"U{bits}", (len(values),), np.array(values, f"<u{bits // 8}").tobytes()))
    index = build_safetensors(tensors)
    zeros = b"" if shard_nbytes else bytes(-(len(index) + 40) % 512)
    numbers = struct.pack("<QQQ", len(index), end, shard_nbytes or end + 1024 + len(zeros) + len(index) + 40)
    return zeros + index + numbers + struct.pack("<Q", digest_of(numbers, digest_of(index))) + b"tcindex1"


# --- 4.5, 4.6 -------------------------------------------------------------------------------------------------------


def build_idx(shard: bytes) -> bytes:
    samples, _ = members_of(shard)
    lines = [f"v1.2 {len(samples)}"]
    for key, members in samples:
        lines.append(" ".join(f"{suffix} {begin} {n} {key}.{suffix}" for suffix, (begin, n) in members.items()))
    return ("\n".join(lines) + "\n").encode()


def build_manifest(shards: dict[str, bytes], fingerprint: dict[str, Any] | None = None) -> bytes:
    lines, ours = [], {"version": 1, "caches": {}, "fingerprints": {}}  # type: ignore[var-annotated]
    for url, shard in sorted(shards.items()):
        arrays, names, _ = index_arrays(shard)
        count = len(arrays["keys.ends"])
        entry = {"url": url, "nsamples": count, "filesize": len(shard)}
        entry["index"] = f"{int.from_bytes(shard[-16:-8], 'little'):016x}"
        lines.append(json.dumps(entry))
        counts = {name: len(arrays[f"cache.{n}.layout"]) for n, name in enumerate(names["caches"])}
        ours["caches"][url] = counts  # type: ignore[index]
        if fingerprint is not None:
            ours["fingerprints"][url] = json.loads(json.dumps(fingerprint, sort_keys=True))  # type: ignore[index]
    if fingerprint is None:
        del ours["fingerprints"]
    head = '{\n"__kind__": "wids-shard-index-v1",\n"wids_version": 1,\n"shardlist": [\n'
    return (head + ",\n".join(lines) + f'\n],\n"tensorcache": {json.dumps(ours)}\n}}\n').encode("ascii")
