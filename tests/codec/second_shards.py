"""Shards, indexes, `.idx` files and manifests, written and read from FORMAT.md alone, as `second_implementation`."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import OrderedDict, defaultdict, deque
from itertools import pairwise
from typing import Any

import numpy as np

from tests.codec.second_implementation import (
    WIDTH,
    Refused,
    build_safetensors,
    check,
    constant,
    digest_of,
    encode,
    escape,
    parse_preamble,
    parse_safetensors,
    resolve,
    run,
    size,
    unique,
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


def check_names(key: str, suffixes: list[str], seen: set[str]) -> None:
    """Refuse what a writer must not write (1.2)."""
    parts = key.split("/")
    check(not {"", ".", ".."} & set(parts) and not key.startswith("__") and "." not in parts[-1], "1.2: key")
    check(key not in seen and len({suffix.lower() for suffix in suffixes}) == len(suffixes), "1.2: twice")
    for suffix in suffixes:
        check(suffix and "/" not in suffix and suffix[0] != "_", "1.2: suffix")
        check(re.fullmatch("[!-~]{1,100}", f"{key}.{suffix}"), "1.2: member")
    seen.add(key)


def write_shard(samples: Shard, fingerprint: dict[str, Any] | None = None) -> bytes:
    """Return a shard with its footer."""
    out, seen = b"", set[str]()
    for key, caches, others in samples:
        members: list[tuple[str, bytes]] = []
        for name, sample in caches:
            check(name == "" or _NAME.fullmatch(name), "1.2: cache")
            suffixes = [f"{name}.{kind}".lstrip(".") for kind in ("skel.pyd", "safetensors")]
            members += zip(suffixes, encode(sample), strict=True)
        members += others
        check_names(key, [suffix for suffix, _ in members], seen)
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
        folder, _, last = name.rpartition("/")
        part, dot, suffix = last.partition(".")
        first = name.split("/")[0]
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


def index_arrays(
    shard: bytes, fingerprint: dict[str, Any] | None = None
) -> tuple[dict[str, list[int]], dict[str, Any], int]:
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
    arrays |= {
        "layouts.form": [layout[0] for layout in layouts],
        "layouts.data_begin": [layout[1] for layout in layouts],
    }
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


def build_trailer(
    arrays: dict[str, list[int]], names: dict[str, Any] | bytes, end: int, shard_nbytes: int | None = None
) -> bytes:
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


def read_index(shard: bytes, beside: bytes | None = None) -> tuple[dict[str, Any], dict[str, Any], int] | None:
    """Return arrays, names and end from a footer, or from the file beside a shard; None if there is none."""
    content = shard if beside is None else beside
    if len(content) < 40 or content[-8:] != b"tcindex1":
        return None
    nbytes, end, shard_nbytes, digest = struct.unpack("<QQQQ", content[-40:-8])
    begin = len(content) - 40 - nbytes
    if shard_nbytes != len(shard) or begin < 0 or end + 512 > len(shard) or (beside is not None and begin):
        return None
    if beside is None and (begin < end + 1024 or shard[end : end + 1024] != bytes(1024)):
        return None
    index = content[begin:-40]
    if digest_of(content[-40:-16], digest_of(index)) != digest:
        return None
    try:
        return (*_parse_index(index, end), end)
    except Refused:
        raise
    except Exception as exc:
        raise Refused(repr(exc)) from exc


def _parse_index(index: bytes, end: int) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = {}
    for name, (dtype, shape, first, last) in parse_safetensors(index)[0].items():
        check(dtype in ("U8", "U16", "U32", "U64") and len(shape) == 1, "4.3: dtype")
        arrays[name] = np.frombuffer(index[first:last], f"<u{WIDTH[dtype]}").tolist()
        check(dtype == "U8" or name not in ("keys.text", "originals.text", "names"), "4.3: bytes")
        check(dtype == "U64" or name != "items.digest", "4.3: digests of items")
    text = bytes(arrays["names"]).decode()
    names = json.loads(text, parse_int=size, object_pairs_hook=unique, parse_constant=constant)
    ends, layouts = arrays["keys.ends"], list(zip(arrays["layouts.form"], arrays["layouts.data_begin"], strict=True))
    check(all(a < b for a, b in pairwise([0, *ends])), "4.3: keys")
    check([0, *ends][-1] == len(arrays["keys.text"]), "4.3: keys")
    check(len(arrays.get("items.digest", ends)) == len(ends), "4.3: digests of items")
    if any(f"originals.{column}" in arrays for column in ("rows", "text", "ends")):
        rows, text_ends = arrays["originals.rows"], arrays["originals.ends"]
        check(len(rows) == len(text_ends), "4.3: original names")
        check(all(a < b for a, b in pairwise(rows)) and all(r < len(ends) for r in rows), "4.3: original names")
        check(all(a <= b for a, b in pairwise([0, *text_ends])), "4.3: original names")
        check([0, *text_ends][-1] == len(arrays["originals.text"]), "4.3: original names")
    lists = [names["caches"], names["members"], names["forms"], names["references"], *names["forms"]]
    lists += [texts for texts in names["references"] if texts is not None]
    check(all(type(each) is list for each in lists), "4.2: lists")
    check(len(set(names["members"])) == len(names["members"]), "4.2: twice")
    check(len(set(names["caches"])) == len(names["caches"]), "4.2: twice")
    check(all(type(name) is str and name == name.lower() for name in names["members"]), "4.3: members")
    "".join(names["members"]).encode("utf-8", "surrogateescape")
    check(all(name == "" or _NAME.fullmatch(name) for name in names["caches"]), "4.3: caches")
    check(type(names.get("fingerprint", {})) is dict, "4.3: fingerprint")
    for form, texts in zip(names["forms"], names["references"], strict=True):
        check(len({name for name, _, _ in form}) == len(form), "4.3: form")
        for name, dtype, ndim in form:
            check(type(name) is str and dtype in WIDTH and type(ndim) is int and 0 <= ndim <= 64, "4.3: form")
        named = None if texts is None else [text.partition(":")[2].partition("?")[0] for text in texts]
        check(named is None or named == [name for name, _, _ in form], "4.3: references")
    check(len(names.get("further", names["forms"])) == len(names["forms"]), "4.3: further names")
    for form, further in zip(names["forms"], names.get("further", ()), strict=False):
        tensors = [name for name, _, _ in form]
        check(type(further) is list and all(type(name) is str for name, _ in further), "4.3: further names")
        check(all(tensor in tensors for _, tensor in further), "4.3: further names")
        check(len({*tensors, *(name for name, _ in further)}) == len(tensors) + len(further), "4.3: further names")
    sizes, at, dims = [], 0, arrays["layouts.dims"]
    for form_number, data_begin in layouts:
        check(form_number < len(names["forms"]), "4.3: form")
        nbytes = bounded = data_begin
        for _, dtype, ndim in names["forms"][form_number]:
            shape, at = dims[at : at + ndim], at + ndim
            check(at <= len(dims) and all(dim < 1 << 62 for dim in shape), "4.3: size")
            nbytes += math.prod(shape) * WIDTH[dtype]
            bounded += math.prod(filter(None, shape)) * WIDTH[dtype]
        check(bounded < 1 << 62, "4.3: size")
        sizes.append(nbytes)
    check(at == len(dims), "4.3: dims")
    total = 0
    for what, many in (("cache", names["caches"]), ("member", names["members"])):
        for number, _ in enumerate(many):
            get = {k.rpartition(".")[2]: v for k, v in arrays.items() if k.startswith(f"{what}.{number}.")}
            rows = get.get("rows", range(len(ends)))
            check(all(a < b for a, b in pairwise(rows)) and all(r < len(ends) for r in rows), "4.3")
            if what == "cache":
                check(all(len(get[column]) == len(rows) for column in _COLUMNS), "4.3: columns")
                check(all(layout < len(sizes) for layout in get["layout"]), "4.3: layout")
                extents = list(zip(get["skeleton_begin"], get["skeleton_nbytes"], strict=True))
                extents += zip(get["tensors_begin"], (sizes[layout] for layout in get["layout"]), strict=True)
            else:
                check(len(rows) == len(get["begin"]), "4.3: columns")
                extents = list(zip(get["begin"], get["nbytes"], strict=True))
            check(all(begin >= 512 and begin + nbytes <= end for begin, nbytes in extents), "4.3: outside")
            total += sum(nbytes for _, nbytes in extents)
    check(total <= end, "4.3: overlap")
    return arrays, names


# --- 4.5, 4.6 -------------------------------------------------------------------------------------------------------


def build_idx(shard: bytes) -> bytes:
    samples, _ = members_of(shard)
    lines = [f"v1.2 {len(samples)}"]
    for key, members in samples:
        lines.append(" ".join(f"{suffix} {begin} {n} {key}.{suffix}" for suffix, (begin, n) in members.items()))
    return ("\n".join(lines) + "\n").encode()


def build_manifest(shards: dict[str, bytes]) -> bytes:
    lines, ours = [], {"version": 1, "caches": {}, "fingerprints": {}}  # type: ignore[var-annotated]
    for url, shard in sorted(shards.items()):
        arrays, names, _ = index_arrays(shard)
        found = read_index(shard)
        count = len(arrays["keys.ends"])
        entry = {"url": url, "nsamples": count, "filesize": len(shard)}
        if found:
            entry["index"] = f"{int.from_bytes(shard[-16:-8], 'little'):016x}"
        lines.append(json.dumps(entry))
        counts = {name: len(arrays[f"cache.{n}.layout"]) for n, name in enumerate(names["caches"])}
        ours["caches"][url] = counts  # type: ignore[index]
        if found and "fingerprint" in found[1]:
            ours["fingerprints"][url] = found[1]["fingerprint"]  # type: ignore[index]
    if not ours["fingerprints"]:
        del ours["fingerprints"]
    head = '{\n"__kind__": "wids-shard-index-v1",\n"wids_version": 1,\n"shardlist": [\n'
    return (head + ",\n".join(lines) + f'\n],\n"tensorcache": {json.dumps(ours)}\n}}\n').encode("ascii")


def read_manifest(content: bytes) -> list[tuple[str, int, int, str | None]]:
    """Return url, number of samples and length of each shard, and the digest of its index."""
    try:
        document = json.loads(content.decode(), parse_int=size, object_pairs_hook=unique, parse_constant=constant)
        check(
            type(document) is dict and document.get("__kind__", "wids-shard-index-v1") == "wids-shard-index-v1", "4.6"
        )
        check(type(document["wids_version"]) is int and document["wids_version"] == 1, "4.6: version")
        check(not document.get("base") and not document.get("datasets"), "4.6: base")
        ours = document.get("tensorcache", {})
        check(type(ours) is dict and type(document["shardlist"]) is list, "4.6")
        check(type(ours.get("version", 1)) is int and ours.get("version", 1) == 1, "4.6: version")
        found = []
        for shard in document["shardlist"]:
            numbers = shard["nsamples"], shard["filesize"]
            url, digest = shard["url"], shard.get("index")
            check(type(url) is str and url, "4.6: url")
            check(url[0] != "/" and ".." not in re.split(r"[/\\]", url), "4.6: a file outside the folder")
            check(digest is None or re.fullmatch("[0-9a-f]{16}", digest), "4.6: index")
            check(all(type(n) is int and 0 <= n < 1 << 63 for n in numbers), "4.6: numbers")
            found.append((url, *numbers, digest))
        unique([(url, None) for url, *_ in found])
        for name in ("caches", "fingerprints"):
            table = ours.get(name)
            listed = [table.get(url) for url, *_ in found] if type(table) is dict else []
            check(all(value is None or type(value) is dict for value in listed), "4.6: object or null")
            counts = [n for value in listed if name == "caches" and value for n in value.values()]
            check(all(type(n) is int and 1 <= n < 1 << 63 for n in counts), "4.6: counts")
        return found  # type: ignore[return-value]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise Refused(repr(exc)) from exc
