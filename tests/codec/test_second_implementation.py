"""FORMAT.md is complete: an implementation from its text alone writes the same bytes, and reads the same values."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from tests.codec import second_implementation as second
from tests.codec import second_shards
from tests.hostile.pickles import fetch as name
from tests.hostile.pickles import reference, text
from tests.interop.other_python import read_folder
from tests.same import assert_same


def outcomes(ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what both give; `Refused` where one refuses, and fail unless both do."""
    found: list[Any] = []
    for call, error in ((ours, tc.TensorCacheError), (theirs, second.Refused)):
        try:
            found.append(call())
        except error as exc:
            found.append(second.Refused(str(exc)))
    assert isinstance(found[0], second.Refused) == isinstance(found[1], second.Refused), found
    return found[0], found[1]


def opened(path: Path) -> list[str]:
    """Return the keys of a cache."""
    return list(tc.open(path, cache="").keys())


def decode_both(skeleton: bytes, tensors: bytes) -> Any:
    """Return what the package reads, which must be what the second implementation reads; None if the package refuses."""
    try:
        sample = tc.decode_sample(skeleton, tensors, lazy=False)
    except tc.TensorCacheError:
        return None
    assert_same(sample, second.decode(skeleton, tensors))
    return sample


ELEMENT, OTHER = (torch.tensor([5]),), (torch.tensor([1]),)
ZEROS = [torch.zeros(shape, dtype=dtype) for dtype in (torch.int32, torch.float32) for shape in (2, (2, 1), (1, 2))]
WRITTEN: dict[str, Any] = {
    "an element of two sets": {"a": {ELEMENT}, "b": {ELEMENT, OTHER}},
    "an element of two sets, in another order": {"b": {ELEMENT, OTHER}, "a": {ELEMENT}},
    "an element of an inner set": {"a": {(1, frozenset({ELEMENT}))}, "b": {ELEMENT, OTHER}},
    "an element of a key's set": {"b": {(frozenset({ELEMENT}), 1): 0}, "a": {ELEMENT, OTHER}},
    "tensors that differ in dtype and shape alone": set(ZEROS),
    "a tensor of an inner set": {"a": {(frozenset({torch.tensor([i])}), torch.tensor([1])) for i in range(9)}},
    "a tensor of an inner set alone": {"a": {(i, frozenset({torch.tensor([i])})) for i in range(9)}},
    "a defaultdict without a factory": defaultdict(None, a=1),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_written_alike(case: str) -> None:
    assert second.encode(WRITTEN[case]) == tc.encode_sample(WRITTEN[case])


@pytest.mark.parametrize("name", MEMBERS := read_folder(Path(__file__).parent.parent / "golden" / "v1"))
def test_members_of_version_1(name: str) -> None:
    assert decode_both(*MEMBERS[name]) is not None


ONE = safetensors.torch.save({"a": torch.arange(3)})
NONE = safetensors.torch.save({})
HALF = safetensors.torch.save({"a": torch.ones(2, dtype=torch.bfloat16)})
# (body without a preamble, whether it is accepted, tensors)
BODIES: dict[str, tuple[bytes, bool, bytes]] = {
    "defaultdict() has no factory": (name("collections", "defaultdict") + b")R.", True, NONE),
    "bytearray(bytes)": (name("builtins", "bytearray") + b"C\x01a\x85R.", True, NONE),
    "bytearray(bytes, bytes)": (name("builtins", "bytearray") + b"C\x01aC\x01a\x86R.", False, NONE),
    "a Size of 2^63 - 1": (name("torch", "Size") + b"\x8a\x08" + b"\xff" * 7 + b"\x7f\x85\x85R.", True, NONE),
    "a Size of 2^63": (name("torch", "Size") + b"\x8a\x09" + bytes(7) + b"\x80\0\x85\x85R.", False, NONE),
    "a path of parts": (name("pathlib", "PurePosixPath") + text("a") + text("b") + b"\x86R.", True, NONE),
    "a path of no parts": (name("pathlib", "PureWindowsPath") + b")R.", True, NONE),
    "a path of 255 parts": (name("pathlib", "PurePosixPath") + b"(" + text("a") * 255 + b"tR.", True, NONE),
    "a path of 256 parts": (name("pathlib", "PurePosixPath") + b"(" + text("a") * 256 + b"tR.", False, NONE),
    "pathlib._local": (name("pathlib._local", "PurePosixPath") + text("a") + b"\x85R.", True, NONE),
    "deque((), None)": (name("collections", "deque") + b")N\x86R.", False, NONE),
    "deque(())": (name("collections", "deque") + b")\x85R.", False, NONE),
    "a timedelta of 86,400 seconds": (name("datetime", "timedelta") + b"K\0J\x80\x51\x01\0K\0\x87R.", False, NONE),
    "numpy.bool_": (name("numpy", "bool_") + b"\x88\x85R.", True, NONE),
    "numpy.bool": (name("numpy", "bool") + b"\x88\x85R.", False, NONE),
    "0.1 in a float16": (name("numpy", "float16") + b"G" + struct.pack(">d", 0.1) + b"\x85R.", True, NONE),
    "an int in a float32": (name("numpy", "float32") + b"K\1\x85R.", False, NONE),
    "numpy.dtype('f4')": (name("numpy", "dtype") + text("f4") + b"\x85R.", True, NONE),
    "a device with its index in the text": (name("torch", "device") + text("cuda:1") + b"\x85R.", False, NONE),
    "a device of index 128": (name("torch", "device") + text("cpu") + b"K\x80\x86R.", False, NONE),
    "torch.half": (name("torch", "half") + b".", True, NONE),
    "FRAME anywhere": (b"]\x95" + bytes(8) + b".", True, NONE),
    "a surrogate": (b"\x8c\x03\xed\xa0\x80.", True, NONE),
    "a key that occurs twice": (b"}(K\1K\2K\1K\3u.", True, NONE),
    "a long int of no bytes": (b"\x8a\0.", True, NONE),
    "another spelling of a Decimal": (name("decimal", "Decimal") + text("1_0e5") + b"\x85R.", True, NONE),
    "a Fraction that is not reduced": (name("fractions", "Fraction") + b"K\2J\xfe\xff\xff\xff\x86R.", True, NONE),
    "one text twice is one object": (b"](" + reference("tensor:a") * 2 + b"e.", True, ONE),
    "a text that only looks like a reference": (text("tensor:a") + b".", False, ONE),
    "no bfloat16 in numpy": (reference("ndarray:a") + b".", False, HALF),
    "200 lists": (b"]" * 200 + b"a" * 199 + b".", True, NONE),
    "a Size in 200 lists": (b"]" * 200 + name("torch", "Size") + b"K\1\x85\x85R" + b"a" * 200 + b".", False, NONE),
    "a bytearray in 200 lists": (b"]" * 200 + b"\x96" + bytes(8) + b"a" * 200 + b".", True, NONE),
}


@pytest.mark.parametrize("case", BODIES)
def test_hand_made_bodies(case: str) -> None:
    body, is_accepted, tensors = BODIES[case]
    assert (decode_both(b"\x80\x05" + body, tensors) is not None or body == b"N.") == is_accepted


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_preambles() -> None:
    """What else is refused, tests/hostile/test_headers.py tries."""
    skeleton, tensors = tc.encode_sample({"a": torch.arange(3)})
    without_own_digest = skeleton[:33] + bytes(8) + skeleton[41:]  # which is not compared
    for read in (skeleton, without_own_digest, b"\x80\x05" + skeleton[42:], b"\x80\x04" + skeleton[42:]):
        assert decode_both(read, tensors) is not None
    for refused in (b"\x81" + skeleton[1:], skeleton[:41] + b"1" + skeleton[42:], skeleton[:42]):
        assert decode_both(refused, tensors) is None


def empty(*names: str) -> dict[str, bytes]:
    return dict.fromkeys(names, b"")


BOUND = tc.encode_sample({"x": torch.arange(2)})
MEMBERS_OF_SHARDS: dict[str, tuple[bool, dict[str, bytes]]] = {
    "no samples": (True, {}),
    "names of missing samples": (True, empty(*"x .a.b d/.a.b __m__/a.b __m__ __m__.txt __ ___ d.d/x".split())),
    "names that writers avoid": (True, empty("a.", "__a.b", "d/__m__/a.b", "x y.z", "d.d/a.b", "../a.b")),
    "a tar of `tar -c .`": (True, empty("./a.x", "./a.y", "././b.x", "./d/c.x", "./.d.x", "./__m__/e.x")),
    "a key with and without ./": (False, {"./a.x": b"", "a.x": b""}),
    "suffixes in capitals": (True, dict(zip(["k.SKEL.pyd", "k.SafeTensors", "k.TXT"], (*BOUND, b""), strict=True))),
    "suffixes beyond ASCII": (True, dict.fromkeys(["k.Ä.TXT", "k.\u0130", "k.t\udcffXT", "k.\udcc3", "j.Σ"], b"")),
    "a key apart": (False, {"a.x": b"", "b.x": b"", "a.y": b""}),
    "no skeleton, of another origin": (True, {"k.safetensors": ONE, "k.a.safetensors": ONE}),
    "tensors first": (True, {"k.a.safetensors": BOUND[1], "k.txt": b"", "k.a.skel.pyd": BOUND[0]}),
    "names that no cache has": (True, {"k.a.b.skel.pyd": BOUND[0], "k._a.skel.pyd": BOUND[0], "k.pyd.skel.pyd": b""}),
    "a damaged body": (True, {"k.skel.pyd": BOUND[0][:-1] + b"0", "k.safetensors": BOUND[1]}),
    "by hand": (True, {"k.skel.pyd": b"\x80\x04" + reference("tensor:a") + b".", "k.safetensors": ONE}),
    "by hand, without its tensors": (True, {"k.skel.pyd": b"\x80\x04N.", "k.safetensors": ONE}),
}


@pytest.mark.parametrize("case", MEMBERS_OF_SHARDS)
def test_scans_are_equal(case: str, tmp_path: Path) -> None:
    is_accepted, members = MEMBERS_OF_SHARDS[case]
    parts = [second_shards.tar_header(name, len(raw)) + raw + bytes(-len(raw) % 512) for name, raw in members.items()]
    shard = b"".join(parts) + bytes(1024)
    (tmp_path / "a.tar").write_bytes(shard)
    ours, theirs = outcomes(
        lambda: tc.write_index(tmp_path / "a.tar", dali_index=False),
        lambda: second_shards.build_trailer(*second_shards.index_arrays(shard), len(shard)),
    )
    assert isinstance(ours, second.Refused) != is_accepted
    assert not is_accepted or (tmp_path / "a.tar.index").read_bytes() == theirs


def shard_samples(count: int) -> second_shards.Shard:
    """Return samples with several caches, forms and layouts, of which some are missing in some samples."""
    found: second_shards.Shard = []
    for i in range(count):
        caches: list[tuple[str, Any]] = [("", {"x": torch.full((i % 3, 2), i), "é": np.float32([i]), "t": "a"})]
        if i % 2:
            caches.append(("vae-b_1", [torch.zeros(3, dtype=torch.complex64), ("text", i)]))
        if i == 3:
            caches[0] = ("", {"other": "form"})
        others = [("txt", b"text %d" % i), ("JPG", bytes(i))] if i % 3 else [("seg.png", b"p" * (300 * i))]
        found.append((f"folder/k{i}", caches, others))
    return found


def write_ours(folder: Path, shards: dict[str, second_shards.Shard], **options: Any) -> None:
    for url, rows in shards.items():
        with tc.ShardWriter(folder / url, fsync=False, **options) as sink:
            for key, caches, others in rows:
                named = {f"{name}.tensorcache".lstrip("."): value for name, value in caches}
                sink.write(key, **named, **dict(others))


@pytest.mark.parametrize(
    "fingerprint", [None, {"model": "m", "crop": {"y": [2, 1], "é": None}, "Scale": [1e16, 1.5e-7, -0.0, 2.0]}]
)
def test_shards_indexes_and_manifests_are_equal(fingerprint: Any, tmp_path: Path) -> None:
    rows = shard_samples(12)
    shards = {"b.tar": rows[:7], "a.tar": rows[7:]}
    write_ours(tmp_path, shards, fingerprint=fingerprint)
    theirs = {url: second_shards.write_shard(part, fingerprint) for url, part in shards.items()}
    for url, shard in theirs.items():
        assert (tmp_path / url).read_bytes() == shard
        assert (tmp_path / url).with_suffix(".idx").read_bytes() == second_shards.build_idx(shard)
    assert (tmp_path / "manifest.json").read_bytes() == second_shards.build_manifest(theirs, fingerprint)
    assert opened(tmp_path) == [key for url in ("a.tar", "b.tar") for key, *_ in shards[url]]


# (what is replaced, by what)
READ_MANIFESTS = [
    ("", ""),
    ('"version": 1', '"version": 1, "new": 1'),
    ('"version": 1, ', ""),
    ('"index": "', '"index": null, "x": "'),
    ('{"": 1}', "null"),
    ('{"a.tar": {"": 1}}', "{}"),
    ('{"a.tar"', '{"b.tar": {"": 0}, "a.tar"'),
    ('{"a.tar"', '{"./a.tar": {"": 0}, "a.tar"'),
    ('"caches"', '"fingerprints": {"b.tar": "m"}, "caches"'),
]
REFUSED_MANIFESTS = [
    ('"version": 1,', '"version": 2,'),
    ('"version": 1', '"version": 1, "version": 1'),
    ('"version": 1', '"version": 1, "new": NaN'),
    ('"nsamples": 1', '"nsamples": -0'),
    ('"wids_version": 1', '"wids_version": 1.0'),
    ('{"": 1}', '{"": 1.0}'),
    ('"caches"', '"fingerprints": {"a.tar": "m"}, "caches"'),
]


@pytest.mark.parametrize(("before", "after"), [*READ_MANIFESTS, *REFUSED_MANIFESTS])
def test_manifests(before: str, after: str, tmp_path: Path) -> None:
    shard = second_shards.write_shard(shard_samples(1))
    whole = second_shards.build_manifest({"a.tar": shard}).decode()
    assert before in whole
    (tmp_path / "a.tar").write_bytes(shard)
    (tmp_path / "manifest.json").write_text(whole.replace(before, after, 1))
    if (before, after) in READ_MANIFESTS:
        assert opened(tmp_path) == ["folder/k0"]
    else:
        with pytest.raises(tc.FormatError):
            opened(tmp_path)


def test_a_manifest_that_is_changed(tmp_path: Path) -> None:
    """Keys under `tensorcache` stay where they were, except `caches` and `fingerprints`; other unknown keys are dropped."""
    rows = shard_samples(12)
    write_ours(tmp_path, {"b.tar": rows[:7]}, fingerprint={"model": "m"})
    path = tmp_path / "manifest.json"
    document = json.loads(path.read_text())
    ours = document["tensorcache"]
    ours["caches"]["gone.tar"] = {"": 3}
    changed = {"new": 1, "caches": ours["caches"], "version": 1, "fingerprints": ours["fingerprints"], "other": [2.0]}
    document |= {"name": "x", "tensorcache": changed}
    document["shardlist"][0]["md5sum"] = "0"
    path.write_text(json.dumps(document))
    write_ours(tmp_path, {"a.tar": [(key, [], others) for key, _, others in rows[7:]]})
    shards = {name: (tmp_path / name).read_bytes() for name in ("a.tar", "b.tar")}
    lines = second_shards.build_manifest(shards).decode().splitlines()
    caches = {"a.tar": {}, "b.tar": ours["caches"]["b.tar"], "gone.tar": {"": 3}}
    last = {"new": 1, "version": 1, "other": [2.0], "caches": caches, "fingerprints": ours["fingerprints"]}
    lines[-2] = f'"tensorcache": {json.dumps(last)}'
    assert path.read_text().splitlines() == lines


def test_samples_of_allowed_classes_have_no_references(tmp_path: Path) -> None:
    with tc.ShardWriter(tmp_path / "a.tar", allow=[Opaque]) as sink:
        sink.write("k", Opaque(torch.arange(2)))
    shard = (tmp_path / "a.tar").read_bytes()
    arrays, names, end = second_shards.index_arrays(shard)
    assert names["references"] == [None]
    assert shard.endswith(second_shards.build_trailer(arrays, names, end))


ORIGINALS = {"originals.rows": [1, 2], "originals.text": [65, 66, 67], "originals.ends": [0, 3]}
# changes of an index's arrays, or of the JSON of its names; tests/shards/test_forged_index.py has more that are refused
READ_INDEXES: list[Callable[[dict[str, Any], dict[str, Any]], Any]] = [
    lambda arrays, names: (arrays.update(new=[1]), names.update(new=1)),
    lambda arrays, names: arrays.update({"items.digest": [7] * len(arrays["keys.ends"]), **ORIGINALS}),
    lambda arrays, names: names["references"].__setitem__(0, None),
    lambda arrays, names: names["members"].__setitem__(0, "\udcff.png"),
    lambda arrays, names: json.dumps(names | {"new": "é"}, ensure_ascii=False, indent=1).encode(),
]
REFUSED_INDEXES: list[Callable[[dict[str, Any], dict[str, Any]], Any]] = [
    lambda arrays, names: names["references"].__setitem__(0, dict.fromkeys(names["references"][0], 1)),
    lambda arrays, names: (names["forms"].append({}), names["references"].append(None)),
    lambda arrays, names: names.update(caches={"": 1, "vae-b_1": 2}),
    lambda arrays, names: names["references"][0].reverse(),
    lambda arrays, names: names.update(fingerprint={"1": 1, 1: 2}),
    lambda arrays, names: names.update(further=[["yx"], *[[]] * (len(names["forms"]) - 1)]),  # a text is no pair
    lambda arrays, names: names.update(new=float("nan")),
    lambda arrays, names: json.dumps(names | {"new": 7}).replace("7", "-0").encode(),
]


@pytest.mark.parametrize("change", [*READ_INDEXES, *REFUSED_INDEXES])
def test_indexes(change: Callable[[Any, Any], Any], tmp_path: Path) -> None:
    shard = second_shards.write_shard(shard_samples(7))
    arrays, names, end = second_shards.index_arrays(shard)
    text = change(arrays, names)
    footer = second_shards.build_trailer(arrays, text if isinstance(text, bytes) else names, end)
    (tmp_path / "a.tar").write_bytes(shard[: end + 1024] + footer)
    if change in READ_INDEXES:
        assert opened(tmp_path / "a.tar") == [key for key, *_ in shard_samples(7)]
    else:
        with pytest.raises(tc.FormatError):
            opened(tmp_path / "a.tar")
