"""`ls`, `show`, `schema`, `stats` and `cat` show what is in a cache."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

from tests.cli.commands import Result
from tests.cli.conftest import make_sample
from tests.reading.batches import write

Run = Callable[..., Result]
KEY = "photos/003%20a"
NBYTES = 2 * 16 * 16 * 2 + 4 * 40 * 4 + 6 + 32 + 400


def test_ls(run: Run, cache: Path) -> None:
    lines = run("ls", cache).out.splitlines()
    assert len(lines) == 10
    assert lines[3].split() == [f"{NBYTES:,}", KEY]
    assert run("ls", cache, "--limit", "2").out.splitlines() == lines[:2]
    assert run("ls", cache, "--limit", "0").out == ""
    for pattern in ("photos/003*", "photos/003 a", "*3%20a"):  # keys, and names
        assert run("ls", cache, "--glob", pattern).out.splitlines() == [lines[3]]
    assert run("ls", cache, "--glob", "nothing") == Result(0, b"", b"")
    long = run("ls", cache, "--long", "--glob", KEY).out
    assert "(photos/003 a)" in long
    assert all(part in long for part in ("latents [2, 16, 16]", "text.states [4, 40]", ".jpg", ".json"))
    found = run("ls", cache, "--json").json
    assert found[3] == {"key": KEY, "nbytes": NBYTES}
    assert len(found) == 10
    (record,) = run("ls", cache, "--json", "--long", "--glob", KEY).json
    assert record["name"] == "photos/003 a"
    assert record["shapes"]["text.mask"] == [6]
    assert sorted(record["members"]) == ["jpg", "json"]
    assert run("ls", cache, "--json", "--glob", "nothing").json == []


def test_every_source(run: Run, cache: Path) -> None:
    counts = {"cache": 10, "cache/0.tar": 4, "cache/*.tar": 10, "cache/manifest.json": 10, "cache/{0..0}.tar": 4}
    for source, count in counts.items():
        assert len(run("ls", source, "--json").json) == count


def test_show(run: Run, cache: Path) -> None:
    found = run("show", cache, KEY)
    assert (found.status, found.err) == (0, "")
    lines = found.out.splitlines()
    assert lines[0] == f"sample '{KEY}' (photos/003 a)  {NBYTES:,} bytes of tensors"
    shown = {line.strip("│├└─ "): line for line in lines[1:]}
    assert "latents  bf16[2, 16, 16]  min -4  mean 0  max 4  0 NaN" in shown
    assert "states  f32[4, 40]  min 3.5  mean 3.5  max 3.5  0 NaN" in shown
    assert "mask  bool[6]  min 0  mean 0.6667  max 1  0 NaN" in shown
    assert "crop  i64[4] (numpy)  min 0  mean 1.5  max 3  0 NaN" in shown
    assert "size  (64, 48)" in shown
    assert "prompt  'photo 3'" in shown
    assert shown["states  f32[4, 40]  min 3.5  mean 3.5  max 3.5  0 NaN"].startswith("│")
    assert 'member .json: 12 bytes: {"label": 3}' in lines
    assert "member .jpg: 23 bytes" in lines
    assert run("show", cache, "photos/003 a").out == found.out  # the name in place of the key
    as_json = run("show", cache, KEY, "--json").json
    assert as_json["members"]["jpg"] == {"nbytes": 23}
    by_name = {each["name"]: each for each in as_json["tensors"]}
    assert by_name["latents"]["values"]["max"] == 4
    assert by_name["text.mask"]["values"]["num_zero"] == 2
    assert [child["name"] for child in as_json["structure"]["children"]] == list(make_sample(0))


def test_show_a_tensor(run: Run, cache: Path) -> None:
    found = run("show", cache, KEY, "--tensor", "latents")
    assert found.status == 0
    assert "latents  bf16[2, 16, 16]  1,024 bytes" in found.out
    assert "[[-4." in found.out
    assert "█" in found.out
    as_json = run("show", cache, KEY, "--tensor", "latents", "--json").json
    assert (as_json["dtype"], as_json["shape"], as_json["values"]["min"]) == ("bfloat16", [2, 16, 16], -4)
    assert sum(as_json["values"]["histogram"]["counts"]) == 512


def test_schema(run: Run, cache: Path) -> None:
    found = run("schema", cache).out
    rows = {line.split()[0]: line for line in found.splitlines() if line}
    assert rows["text.states"].split()[1:] == ["f32", "[3..4,", "40]", "10", "5,600"]
    assert rows["crop"].split()[1:3] == ["i64", "(numpy)"]
    assert rows["prompt"].split()[1:] == ["str,", "for", "example", "'photo", "0'", "10"]
    assert rows[".jpg"].split() == [".jpg", "10"]
    assert "fingerprint model = 'vae'" in found
    as_json = run("schema", cache, "--json").json
    by_name = {each["name"]: each for each in as_json["tensors"]}
    assert by_name["text.states"]["shape"] == [[3, 4], 40]
    assert by_name["text.states"]["dtypes"] == ["float32"]
    assert {"shape": [3, 40], "num_samples": 5} in by_name["text.states"]["shapes"]
    assert (as_json["num_samples"], as_json["members"]) == (10, {"json": 10, "jpg": 10})


def test_stats(run: Run, cache: Path, hostile: Path) -> None:
    """The numbers themselves are tested in tests/inspecting/test_statistics.py."""
    found = run("stats", cache)
    assert (found.status, found.err) == (0, "")
    rows = {line.split()[0]: line.split() for line in found.out.splitlines() if line}
    assert rows["latents"][1:9] == ["bf16", "[2,", "16,", "16]", "10,240", "-10", "0", "10"]
    assert "text.states: 2 shapes: [3, 40] in 5, [4, 40] in 5" in found.out
    # nine copies each of the mask, the crop and the zeros
    assert f"27 tensors; storing each once would save {9 * (6 + 32 + 400):,} bytes" in found.out
    assert "9 times" not in found.out
    assert "10 times 400 bytes: zeros, first in sample 'photos/000%20a'" in found.out
    assert run("stats", cache, "--json", "--samples", "all").json["num_examined"] == 10
    assert "NaN or Inf in 2 samples: 'a', 'b'" in run("stats", hostile).out


def test_json_has_each_list_of_numbers_on_one_line(run: Run, tmp_path: Path) -> None:
    numbers = [float("nan"), 1.5, float("-inf"), float("inf")]
    write(tmp_path, {"a": {"x": torch.tensor([numbers, numbers[::-1]]), "list": numbers, "texts": ["NaN", "nan"]}})
    line = b'["NaN", 1.5, "-Infinity", "Infinity"]'
    for name in ("x", "list"):
        assert line in run("cat", tmp_path, "a", name, "--json").stdout
    assert run("cat", tmp_path, "a", "texts", "--json").json["value"] == ["NaN", "nan"]


def test_cat(run: Run, cache: Path) -> None:
    sample = make_sample(3)
    states = sample["text"]["states"]
    assert np.array_equal(np.load(io.BytesIO(run("cat", cache, KEY, "text.states").stdout)), states.numpy())
    crop = np.load(io.BytesIO(run("cat", cache, KEY, "crop").stdout))
    assert (crop.dtype, crop.tolist()) == (np.int64, [0, 1, 2, 3])
    saved = safetensors.torch.load(run("cat", cache, KEY, "latents", "--as", "safetensors").stdout)
    assert list(saved) == ["latents"]
    assert torch.equal(saved["latents"], sample["latents"])
    saved = safetensors.numpy.load(run("cat", cache, KEY, "crop", "--as", "safetensors").stdout)
    assert saved["crop"].tolist() == [0, 1, 2, 3]
    raw = run("cat", cache, KEY, "latents", "--as", "raw").stdout
    assert raw == sample["latents"].view(torch.uint8).numpy().tobytes()
    assert run("cat", cache, KEY, "--member", "jpg").stdout == b"\xff\xd8\xff" + bytes(20)
    assert json.loads(run("cat", cache, KEY, "--member", ".JSON").stdout) == {"label": 3}
    assert run("cat", cache, KEY, "prompt").out == "photo 3"
    assert run("cat", cache, KEY, "size").json == [64, 48]
    assert run("cat", cache, KEY, "size", "--json").json == {"key": KEY, "name": "size", "value": [64, 48]}
    printed = run("cat", cache, KEY, "latents", "--json")
    as_json = printed.json
    assert printed.stdout.count(b"\n") < 100  # each row of numbers is one line
    assert torch.equal(torch.tensor(as_json["values"]).bfloat16(), sample["latents"])
    assert base64.b64decode(run("cat", cache, KEY, "--member", "jpg", "--json").json["base64"])[:2] == b"\xff\xd8"


def test_cat_every_dtype(run: Run, tmp_path: Path) -> None:
    """Each dtype becomes a file with the same bytes, or the error says which format can have it."""
    values = {
        "f8": torch.arange(4).to(torch.float8_e4m3fn),
        "c": torch.tensor([1 + 2j]),
        "text": np.array(["ab", "c"]),
        "date": np.array(["2020-01-01"], "M8[D]"),
        "u64": torch.tensor([2**64 - 1], dtype=torch.uint64),
        "zero": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5),
        "nan": torch.tensor([float("nan"), -float("inf")]),
    }
    write(tmp_path / "c.tar", {"a": values})
    for name, value in values.items():
        tensor = value.view(torch.uint8) if name == "f8" else value
        plain = value if isinstance(value, np.ndarray) else tensor.numpy()
        npy = run("cat", "c.tar", "a", name)
        if name == "f8":
            assert (npy.status, npy.stdout) == (2, b"")
            assert "use --as safetensors" in npy.err
        else:
            loaded = np.load(io.BytesIO(npy.stdout))
            assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (plain.dtype, plain.shape, plain.tobytes())
        if name in ("text", "f8", "zero"):
            assert run("cat", "c.tar", "a", name, "--as", "raw").stdout == plain.tobytes()
            stored = run("cat", "c.tar", "a", name, "--as", "safetensors")
            if name == "text":
                assert (stored.status, stored.stdout) == (2, b"")
                assert "--as raw" in stored.err
            else:
                found = safetensors.torch.load(stored.stdout)[name]
                assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert run("cat", "c.tar", "a", "nan", "--json").json["values"] == ["NaN", "-Infinity"]
    assert run("cat", "c.tar", "a", "text", "--json").json["values"] == ["ab", "c"]
    assert run("cat", "c.tar", "a", "scalar", "--json").json["values"] == 1.5


def test_show_single_values_and_texts(run: Run, tmp_path: Path) -> None:
    values = {
        "score": torch.tensor(1.5),
        "nan": torch.tensor(float("nan")),
        "prompt": np.array("a \x1b cat"),
        "date": np.array(["2020-01-01"], "M8[D]"),
    }
    write(tmp_path / "c.tar", {"a": values | {"meta": {"size": 3}}})
    shown = run("show", "c.tar", "a").out
    for line in ("score  f32[]  1.5\n", "1 NaN\n", "(numpy)  'a \\x1b cat'\n", "['2020-01-01']"):
        assert line in shown
    refused = run("cat", "c.tar", "a", "meta")
    assert refused.status == 2
    assert "unknown tensor or small value 'meta'" in refused.err
    assert "'meta.size'" in refused.err


def test_several_caches_in_a_shard(run: Run, tmp_path: Path) -> None:
    members = {"text.tensorcache": {"y": torch.ones(3)}}
    write(tmp_path / "0.tar", {"a": {"x": torch.zeros(2)}}, lambda i: members)
    refused = run("ls", "0.tar")
    assert refused.status == 2
    assert "'text'" in refused.err
    assert run("ls", "0.tar", "--cache", "text", "--json").json == [{"key": "a", "nbytes": 12}]
    assert run("ls", "0.tar", "--cache", "", "--json").json == [{"key": "a", "nbytes": 8}]


def test_a_sample_without_a_container(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "0.tar", {"a": torch.zeros(20, 20)})
    found = run("show", "0.tar", "a")
    assert found.status == 0
    assert "f32[20, 20]" in found.out


def test_a_tensor_with_several_names_counts_once(run: Run, tmp_path: Path) -> None:
    shared = torch.arange(1000.0)
    write(tmp_path / "0.tar", {"a": {"x": shared, "y": shared, "list": [shared]}, "b": {"x": shared + 1}})
    assert run("show", "0.tar", "a").out.startswith("sample 'a'  4,000 bytes of tensors\n")
    stats = run("stats", "0.tar", "--json").json
    assert (stats["sample_nbytes"]["min"], stats["sample_nbytes"]["max"], stats["nbytes"]) == (4000, 4000, 8000)
    assert stats["repeats"]["num_tensors"] == 0


def test_dates_are_texts(run: Run, tmp_path: Path) -> None:
    times = np.array(["2020-01-01", "NaT"], "M8[ns]")
    write(tmp_path / "0.tar", {"a": {"x": torch.ones(1), "times": times, "time": times[0]}})
    assert "['2020-01-01T00:00:00.000000000', 'NaT']" in run("show", "0.tar", "a").out
    assert run("cat", "0.tar", "a", "time").json == "2020-01-01T00:00:00.000000000"


def test_cat_finds_each_value_that_schema_lists(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "0.tar", {"a": {"x": torch.ones(1), ("a key of more than forty characters", "and two parts"): 7}})
    (name,) = (value["name"] for value in run("schema", "0.tar", "--json").json["values"])
    assert run("cat", "0.tar", "a", name).out == "7"


def test_cat_refuses_what_json_cannot_hold(run: Run, tmp_path: Path) -> None:
    endless: list[object] = [1]
    endless.append(endless)
    huge: list[object] = [0]
    for _ in range(40):
        huge = [huge, huge]
    long = ["x" * 1_000_000] * 1000
    values = {"endless": endless, "huge": huge, "long": long, "pairs": [[1, 2]] * 3, "labels": ["cat"] * 400_000}
    write(tmp_path / "0.tar", {"a": {"x": torch.ones(1), **values}})
    for name in ("endless", "huge", "long"):
        refused = run("cat", "0.tar", "a", name)
        assert (refused.status, refused.out) == (2, "")
        assert f"'{name}' contains itself, or one object too often for JSON" in refused.err
    for name in ("pairs", "labels"):
        assert run("cat", "0.tar", "a", name).json == values[name]
