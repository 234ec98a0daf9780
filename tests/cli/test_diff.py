"""Two caches are equal, or each difference is listed."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import wds_tensorcache as tc
from tests.cli.command import json_of, run
from tests.cli.conftest import HOSTILE
from tests.reading.batches import write as write_samples
from tests.shards.tars import build_with_tarfile


def sample(i: int) -> dict[str, Any]:
    return {
        "x": torch.arange(6.0) + i,
        "nested": [torch.full((2, 3), i).bfloat16(), {"text": f"photo {i}", "size": (1, i), "nan": float("nan")}],
        "array": np.array(["a", f"b{i}"]),
        "empty": torch.zeros(0, 3),
        "recent": deque([1], 3),
        "counts": defaultdict(int),
        "weird": torch.tensor([1.0, float("nan"), float("inf"), -0.0]),
    }


def write(folder: Path, samples: dict[str, Any], **members: Any) -> Path:
    write_samples(folder / "%06d.tar", samples, lambda i: members, max_samples=2)
    return folder


def test_equal_caches(tmp_path: Path) -> None:
    samples = {f"k{i}": sample(i) for i in range(5)}
    first, second = write(tmp_path / "a", samples), write(tmp_path / "b", dict(reversed(samples.items())))
    found = json_of("diff", first, second)
    assert (found["is_equal"], found["num_equal"], found["changes"]) == (True, 5, [])
    assert run("diff", first, second).stdout.startswith("5 samples equal, 0 changed")


def test_keys(tmp_path: Path) -> None:
    samples = {f"k{i}": sample(i) for i in range(4)}
    first = write(tmp_path / "a", {key: samples[key] for key in ("k0", "k1", "k2")})
    second = write(tmp_path / "b", {key: samples[key] for key in ("k3", "k2")})
    found = json_of("diff", first, second, status=1)
    assert (found["only_first"], found["only_second"], found["num_equal"]) == (["k0", "k1"], ["k3"], 1)
    lines = run("diff", first, second, "--limit", 2, status=1).stdout.splitlines()
    assert lines[:3] == [f"only in {first}: k0", f"only in {first}: k1", "… and 1 more; --limit lists them"]


CHANGES: dict[str, tuple[Any, str, str]] = {
    "number": (lambda it: it["x"].__setitem__(2, 2.5), "x", "1 of 6 elements differ, by up to 0.5"),
    "sign_of_zero": (lambda it: it["weird"].__setitem__(3, 0.0), "weird", "1 of 4 elements differ, by up to 0"),
    "NaN": (lambda it: it["weird"].__setitem__(0, float("nan")), "weird", "1 of 4 elements differ, by up to inf"),
    "bfloat16": (lambda it: it["nested"][0].add_(1), "nested.0", "6 of 6 elements differ, by up to 1"),
    "dtype": (lambda it: it.update(x=it["x"].double()), "x", "is f32[6], and f64[6] in the second cache"),
    "shape": (lambda it: it.update(x=it["x"][:5]), "x", "is f32[6], and f32[5] in the second cache"),
    "kind": (lambda it: it.update(x=it["x"].numpy()), "x", "is f32[6] (LazyTensor), and f32[6] (LazyArray)"),
    "gone": (lambda it: it.pop("x"), "x", "is a tensor only in the first cache"),
    "new": (lambda it: it.update(new=torch.ones(1)), "new", "is a tensor only in the second cache"),
    "texts": (lambda it: it["array"].__setitem__(0, "c"), "array", "has other elements"),
    "value": (lambda it: it["nested"][1].update(text="x"), "nested.1.text", "is 'photo 1', and 'x' in the second"),
    "type": (lambda it: it["nested"][1].update(size=[1, 1]), "nested.1.size", "is a tuple, and a list"),
    "length": (lambda it: it.update(recent=deque([1], 4)), "recent", "has maxlen=3, and maxlen=4 in the second"),
    "default": (lambda it: it.update(counts=defaultdict(float)), "counts", "has default_factory=<class 'int'>, and"),
    "value_gone": (lambda it: it["nested"][1].pop("text"), "nested.1.text", "is only in the first cache"),
}


def test_changes(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {key: sample(1) for key in ("same", *CHANGES)})
    changed = {key: sample(1) for key in ("same", *CHANGES)}
    for key, (change, _, _) in CHANGES.items():
        change(changed[key])
    found = json_of("diff", first, write(tmp_path / "b", changed), status=1)
    assert (found["num_equal"], found["num_changed"]) == (1, len(CHANGES))
    for change, (key, (_, name, what)) in zip(found["changes"], CHANGES.items(), strict=True):
        assert (change["key"], change["name"]) == (key, name)
        assert what in change["what"]


def test_hostile_names(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {"k": {HOSTILE: HOSTILE, "x": torch.ones(1)}})
    second = write(tmp_path / "b", {"k": {HOSTILE: HOSTILE + "!", "x": torch.ones(1)}})
    out = run("diff", first, second, status=1).stdout
    assert out.count("\n") == 2
    assert "\x1b" not in out


def test_other_members(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {"k": {}}, jpg=b"1" * 5_000_000, txt="same", json=[1], cls=1)
    second = write(tmp_path / "b", {"k": {}}, jpg=b"1" * 4_999_999 + b"2", txt="same", json=[12], wav=b"")
    found = json_of("diff", first, second, status=1)
    assert {each["name"]: each["what"] for each in found["changes"]} == {
        ".jpg": "has other bytes",
        ".json": "has 3 bytes, and 4 bytes in the second cache",
        ".cls": "is only in the first cache",
        ".wav": "is only in the second cache",
    }
    assert (found["num_changed"], found["is_equal"]) == (1, False)
    assert json_of("diff", first, first)["is_equal"]


def test_samples_without_the_cache_are_counted(tmp_path: Path) -> None:
    members = list(zip(("k.skel.pyd", "k.safetensors"), tc.encode_sample({"x": torch.ones(2)}), strict=True))
    for name, others in (("a", [("l.json", b"1"), ("m.json", b"2")]), ("b", [("n.json", b"3")])):
        (tmp_path / f"{name}.tar").write_bytes(build_with_tarfile([*members, *others]))
    report = json_of("diff", tmp_path / "a.tar", tmp_path / "b.tar")
    assert (report["is_equal"], report["num_equal"], report["num_without"]) == (True, 1, 3)
    assert "not compared: 3 samples" in run("diff", tmp_path / "a.tar", tmp_path / "b.tar").stderr


def test_tensors_with_equal_digests_are_not_read(tmp_path: Path) -> None:
    """A damaged byte of a tensor is found only where the digests make a look at the tensors necessary."""
    samples = {"k": {"x": torch.full((1000,), 7.0), "text": "a"}}
    first, second = write(tmp_path / "a", samples), write(tmp_path / "b", samples)
    shard = second / "000000.tar"
    raw = bytearray(shard.read_bytes())
    raw[raw.index(samples["k"]["x"].numpy().tobytes()) + 400] ^= 1
    shard.write_bytes(raw)
    assert json_of("diff", first, second)["is_equal"]
    samples["k"]["text"] = "b"  # same tensors, so the same digest
    third = write(tmp_path / "c", samples)
    assert [each["name"] for each in json_of("diff", first, third, status=1)["changes"]] == ["text"]
    found = json_of("diff", second, third, status=1)
    assert [each["name"] for each in found["changes"]] == ["x", "text"]


def test_numbers_of_other_dtypes(tmp_path: Path) -> None:
    """As after `import --narrow`."""
    x = torch.tensor([1.0, -2.5, 0.0, float("nan"), float("inf")])
    first = write(tmp_path / "a", {key: {"x": x} for key in "kl"})
    second = write(tmp_path / "b", {"k": {"x": x.bfloat16()}, "l": {"x": x.double() + 0.25}})
    equal, other = json_of("diff", first, second, status=1)["changes"]
    assert equal["what"] == "is f32[5], and bf16[5] in the second cache; the numbers are equal"
    assert equal["max_difference"] == 0
    assert other["what"].endswith("; the numbers differ by up to 0.25")


def test_values_of_any_depth(tmp_path: Path) -> None:
    """Deep, cyclic and shared containers: no error, and no endless comparison."""

    def samples(last: object) -> dict[str, Any]:
        deep, shared, cyclic = [last], [last], [last]
        for _ in range(90):
            deep = [deep]
        for _ in range(60):  # 2^60 paths
            shared = [shared, shared]
        cyclic.append(cyclic)
        return {"deep": {"x": deep}, "shared": {"x": shared}, "cyclic": {"x": cyclic}}

    first, second = write(tmp_path / "1", samples(1)), write(tmp_path / "2", samples(2))
    changes = json_of("diff", first, second, status=1)["changes"]
    assert [change["what"] for change in changes] == ["is 1, and 2 in the second cache"] * 3
    first = write(tmp_path / "a", {"list": [1], "set": {1, -0.0, 0.5}})
    second = write(tmp_path / "b", {"list": {1, -0.0, 0.5}, "set": {1, 0.0, 0.5}})
    of_list, of_set = json_of("diff", first, second, status=1)["changes"]
    assert (of_list["name"], of_list["what"]) == ("the sample", "is a list, and a set in the second cache")
    assert of_set["key"] == "set"


def test_keys_of_dicts(tmp_path: Path) -> None:
    """Keys of other types whose tensors have equal names, and a second name of one tensor."""
    x = torch.ones(2)
    samples = {"int": {1: x}, "bool": {1: "a"}, "tuple": {(1, 2): x}, "shared": {"a": x, "b": x}}
    changed = {"int": {"1": x}, "bool": {True: "a"}, "tuple": {(5,): x}, "shared": {"a": x}}
    same = {"same": {1: x, (1, 2): x, "b": x}}
    first, second = write(tmp_path / "a", samples | same), write(tmp_path / "b", changed | same)
    report = json_of("diff", first, second, status=1)
    assert (report["num_equal"], report["num_changed"]) == (1, 4)
    listed = [(change["name"], change["what"]) for change in report["changes"] if change["key"] in ("int", "shared")]
    of_int, of_text = "is only in the first cache, with a key of type int", "is only in the second cache"
    assert listed == [("1", of_int), ("1", of_text), ("b", "is a tensor only in the first cache")]


def test_a_key_that_occurs_twice(tmp_path: Path) -> None:
    for name, numbers in (("a", (1, 2)), ("b", (1, 3)), ("c", (1,))):
        for i in numbers:
            write_samples(tmp_path / name / f"{i}.tar", {"k": {"x": torch.tensor(i)}})
    found = json_of("diff", tmp_path / "a", tmp_path / "b", status=1)
    assert (found["num_equal"], found["num_changed"]) == (1, 1)
    found = json_of("diff", tmp_path / "a", tmp_path / "c", status=1)
    assert (found["num_equal"], found["only_first"], found["only_second"]) == (1, ["k"], [])
    found = json_of("diff", tmp_path / "c", tmp_path / "a", status=1)
    assert (found["num_equal"], found["only_first"], found["only_second"]) == (1, [], ["k"])


def test_tensors_of_other_programs(tmp_path: Path) -> None:
    """Without digests, all bytes are compared."""
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        tensors = safetensors.torch.save({"x": torch.full((5,), value)})
        skeleton, _ = tc.encode_sample({"x": torch.full((5,), value)})
        members = [("k.skel.pyd", b"\x80\x05" + skeleton[5 + skeleton[3] :]), ("k.safetensors", tensors)]
        (tmp_path / f"{name}.tar").write_bytes(build_with_tarfile(members))
    assert json_of("diff", tmp_path / "a.tar", tmp_path / "b.tar")["is_equal"]
    (only,) = json_of("diff", tmp_path / "a.tar", tmp_path / "c.tar", status=1)["changes"]
    assert (only["num_different"], only["max_difference"]) == (5, 1)


def test_a_damaged_shard(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {f"k{i}": sample(i) for i in range(4)})
    second = write(tmp_path / "b", {f"k{i}": sample(i + 1) for i in range(4)})
    shard = second / "000001.tar"
    shard.write_bytes(shard.read_bytes()[:-1000])
    said = run("diff", first, second, status=1)
    assert said.stdout == ""
    assert "000001.tar" in said.stderr


def test_differences_of_numbers(tmp_path: Path) -> None:
    cases = [
        (torch.tensor([2**53]), torch.tensor([2**53 + 1]), 1),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), 2.0**64),
        (torch.tensor([1.0]), torch.tensor([1 + 5j]), 5),
        (torch.tensor([1 + 5j]), torch.tensor([1.0]), 5),
        (torch.tensor([True]), torch.tensor([False]), 1),
        (torch.tensor([1.0]), torch.tensor([float("inf")]), float("inf")),
        (torch.tensor([float("-inf")]), torch.tensor([float("inf")]), float("inf")),
        (torch.tensor([1.0]), torch.tensor([float("nan")]), float("inf")),
        (torch.tensor([1.5]).to(torch.float8_e4m3fn), torch.tensor([2.0]).to(torch.float8_e4m3fn), 0.5),
        (torch.zeros(1 << 21), torch.zeros(1 << 21).index_fill(0, torch.tensor([2**21 - 1]), 3), 3),
    ]
    first = write(tmp_path / "a", {f"{i}": {"x": one} for i, (one, _, _) in enumerate(cases)})
    second = write(tmp_path / "b", {f"{i}": {"x": two} for i, (_, two, _) in enumerate(cases)})
    changes = json_of("diff", first, second, status=1)["changes"]
    assert [float(change["max_difference"]) for change in changes] == [difference for _, _, difference in cases]
    assert run("diff", first, second, status=1).stderr == ""
