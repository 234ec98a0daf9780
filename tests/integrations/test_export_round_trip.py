"""Exports of every kind, imported again, are the cache that was exported: keys, structure, values, dtypes, aliases, members.

The table has an import from every format.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wds_tensorcache as tc
from tests.cli.command import json_of, run
from tests.importers import (
    test_ai_toolkit,
    test_comfyui,
    test_diffusion_pipe,
    test_edm2,
    test_kohya,
    test_lightningdit,
    test_ltx,
    test_musubi,
    test_nemo,
    test_onetrainer,
    test_simpletuner,
    test_webdataset_members,
)
from tests.importers.chunked_samples import WRITTEN
from tests.same import assert_same
from tests.strategies import samples
from wds_tensorcache.codec.binding import PREAMBLE_NBYTES, build_preamble, parse_preamble
from wds_tensorcache.importers.formats import FORMATS
from wds_tensorcache.inspecting.diff import diff_caches
from wds_tensorcache.integrations.exporting.export_cache import KINDS
from wds_tensorcache.integrations.exporting.file_names import is_safe

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12) | st.sampled_from(
    ["a", "A", "dir/photo (1)", "a.b", "a/b.c", "CON", "../x", "tensorcache-export", "é", "x" * 200]
)
members = st.dictionaries(
    st.sampled_from(["txt", "json", "jpg", "v2.txt", "metadata.json"]), st.binary(max_size=5), max_size=2
)


def assert_round_trip(cache: Path, kind: str, folder: Path, trust: bool = False) -> Any:
    """Assert that `cache`, exported into `folder` and imported again, is the same cache."""
    with tc.open(cache) as opened:
        report = tc.export_cache(opened, folder / "files", kind)
        assert report.num_written == len(opened)
    found = tc.import_cache(folder / "files", folder / "again", trust=trust)
    assert (found.format, found.num_skipped, found.unused) == ("tensorcache-export", 0, [])
    with tc.open(cache) as one, tc.open(folder / "again") as two:
        assert list(one.keys()) == list(two.keys())
        difference = diff_caches(one, two)
        assert difference.is_equal, difference
    return report


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.long
def test_any_sample(kind: str, data: st.DataObject) -> None:
    made = data.draw(st.dictionaries(names, st.tuples(samples(), members), min_size=1, max_size=2))
    folder = Path(tempfile.mkdtemp())
    try:
        with tc.ShardWriter(folder / "cache", fsync=False) as sink:
            for name, (sample, other) in made.items():
                sink.write(tc.safe_key(name), sample, **other)
        refused = () if kind == "pt" else tc.InvalidKeyError if kind == "webdataset" else tc.EncodeError
        try:
            assert_round_trip(folder / "cache", kind, folder, trust=True)
        except refused as exc:  # a key that some systems refuse as the name of a file, or a sample that contains itself
            is_unsafe = kind == "webdataset" and not all(is_safe(tc.safe_key(name)) for name in made)
            if not is_unsafe and "contains itself" not in str(exc):
                raise
            return
        with tc.open(folder / "again") as again:
            for name, (sample, _) in made.items():
                assert_same(sample, again[tc.safe_key(name)])
    finally:
        shutil.rmtree(folder)


def ai_toolkit(folder: Path) -> None:
    for name in ("a", "set 2/c"):
        test_ai_toolkit.save_text(folder / f"{name}.jpg", test_ai_toolkit.text_of(), f"a photo of {name}")
        test_ai_toolkit.save_latent(folder / f"{name}.jpg", {"latent": torch.randn(16, 8, 8).bfloat16()})


def comfyui(folder: Path) -> None:
    test_comfyui.save_set(folder, *test_comfyui.make_set(5), shard_size=2)


def diffusion_pipe(folder: Path) -> None:
    test_diffusion_pipe.write_dataset(folder / "cache" / "flux", texts="cache_512x512x1")


def edm2(folder: Path) -> None:
    test_edm2.write(folder, test_edm2.files_of(test_edm2.moments_of(3), [1, 2, 3]))


def fastvideo(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    from tests.importers import test_fastvideo as made

    made.write(folder / "data_chunk_0.parquet", [made.record(i, made.arrays(i)) for i in range(3)], *made.NAMES)


def files(folder: Path) -> None:
    torch.save({"array": np.ones(2), "texts": np.array(["a", "bc"]), "n": {1, 2}}, folder / "a.pt")
    np.savez(folder / "b.npz", **{"down.0": np.ones(2), "text": np.array(["é"])})
    safetensors.torch.save_file({"x.y": torch.ones(2).bfloat16()}, folder / "c.safetensors", {"step": "3"})
    (folder / "c.txt").write_text("a cat")


def hf_datasets(folder: Path) -> None:
    pytest.importorskip("datasets")
    from tests.importers import test_hf_datasets as made

    made.make(3).save_to_disk(folder)


def kohya(folder: Path) -> None:
    test_kohya.save_latents(folder / "a_0512x0512_sdxl.npz", (4, 8, 6), end="_8x6", flipped=True, alpha=True)
    test_kohya.save_text(folder, "a", "sdxl")
    (folder / "a.txt").write_text("a cat")


def kohya_safetensors(folder: Path) -> None:
    test_kohya.save_new(folder / "a_0512x0512_sdxl.safetensors", (512, 512), torch.randn(4, 8, 6).half(), seed="1")
    test_kohya.save_new_text(folder / "a_sdxl_256_te.safetensors", "a cat", "a dog")


def lightningdit(folder: Path) -> None:
    test_lightningdit.save(folder / test_lightningdit.NAME.format(0, 0), test_lightningdit.rows_of(3))


def litdata(folder: Path) -> None:
    shutil.copytree(WRITTEN / "litdata_plain", folder, dirs_exist_ok=True)


def ltx(folder: Path) -> None:
    for i in range(2):
        test_ltx.save(test_ltx.latents(i), folder / ".precomputed" / "latents" / f"{i}.pt")
        test_ltx.save(test_ltx.conditions(i), folder / ".precomputed" / "conditions" / f"{i}.pt")


def mds(folder: Path) -> None:
    shutil.copytree(WRITTEN / "mds_plain", folder, dirs_exist_ok=True)


def musubi(folder: Path) -> None:
    for arch in ("wan", "hv"):
        test_musubi.save_image(folder, f"a {arch}", arch)
        test_musubi.save_text(folder, f"a {arch}", arch)


def nemo(folder: Path) -> None:
    test_nemo.write_cache(folder, 3)


def onetrainer(folder: Path) -> None:
    test_onetrainer.write_concept(folder, "/data/cats", 3, num_texts=2)


def simpletuner(folder: Path) -> None:
    for i in range(2):
        test_simpletuner.save(torch.randn(16, 8, 8).half(), folder / test_simpletuner.vae_name(f"{i}.png"), bool(i))


def webdataset(folder: Path) -> None:
    members = {"latent.npy": np.ones((2, 3)), "text.pth": torch.ones(2).bfloat16(), "jpg": b"\xff\xd8", "txt": "a cat"}
    test_webdataset_members.write(folder / "a.tar", {f"dir/k{i}": members for i in range(3)})


WRITERS: dict[str, Callable[[Path], None]] = {
    made.__name__.replace("_", "-"): made
    for made in (
        *(ai_toolkit, comfyui, diffusion_pipe, edm2, fastvideo, files, hf_datasets, kohya, kohya_safetensors),
        *(lightningdit, litdata, ltx, mds, musubi, nemo, onetrainer, simpletuner, webdataset),
    )
}


def test_the_table_has_every_format() -> None:
    assert {*WRITERS, "tensorcache-export"} == {each.name for each in FORMATS}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format(tmp_path: Path, name: str) -> None:
    if name in ("fastvideo", "hf-datasets"):
        pytest.importorskip("pyarrow", reason="pyarrow does not work with this numpy", exc_type=ImportError)
    (tmp_path / "in").mkdir()
    WRITERS[name](tmp_path / "in")
    found = tc.import_cache(tmp_path / "in", tmp_path / "cache")
    assert (found.format, found.ok) == (name, True)
    for kind in KINDS:
        assert_round_trip(tmp_path / "cache", kind, tmp_path / kind)


def test_on_the_command_line(tmp_path: Path) -> None:
    """`export` of an import of kohya comes back as what it is, and its list names how it was made."""
    (tmp_path / "in").mkdir()
    kohya(tmp_path / "in")
    run("import", tmp_path / "in", tmp_path / "cache")
    for kind in KINDS:
        run("export", tmp_path / "cache", tmp_path / f"{kind} files", "--as", kind)
        result = json_of("import", tmp_path / f"{kind} files", tmp_path / kind)
        assert result["format"] == "tensorcache-export"
        assert result["fingerprint"]["exported"]["fingerprint"]["format"] == "kohya"
        assert "1 sample equal" in run("diff", tmp_path / "cache", tmp_path / kind).stdout
        assert json_of("diff", tmp_path / "cache", tmp_path / kind)["is_equal"]
    assert "sdxl" in run("export", tmp_path / "cache", tmp_path / "x", "--as", "npz").stdout + str(
        tc.open(tmp_path / "cache").fingerprint
    )


def test_files_are_the_same_again(tmp_path: Path) -> None:
    """From files of each kind to shards, and back to files: the same names, dtypes, bits and metadata."""
    arrays = {"a.b": np.arange(6, dtype=np.float16).reshape(2, 3), "x": np.array([np.nan, -0.0]), "é/ü": np.ones(0)}
    tensors = {
        "down.0": torch.arange(4).bfloat16(),
        "up": torch.zeros(2, 0).to(torch.float8_e4m3fn),
        "flag": torch.ones(1) > 0,
    }
    value = {"x": torch.ones(2, 3).bfloat16(), "a": np.arange(3), "s": ("t", {1: frozenset({2})}), "n": None}
    for kind in ("npz", "safetensors", "pt"):
        (tmp_path / kind / "sub").mkdir(parents=True)
    np.savez(tmp_path / "npz" / "sub" / "one.npz", **arrays)
    safetensors.torch.save_file(tensors, tmp_path / "safetensors" / "sub" / "one.safetensors", {"step": "3", "é": "1"})
    torch.save(value, tmp_path / "pt" / "sub" / "one.pt")
    for kind in ("npz", "safetensors", "pt"):
        (tmp_path / kind / "sub" / "one.txt").write_text("a cat")
        run("import", tmp_path / kind, tmp_path / f"{kind}-cache")
        run("export", tmp_path / f"{kind}-cache", tmp_path / f"{kind}-again", "--as", kind)
        found = {
            str(path.relative_to(tmp_path / f"{kind}-again")) for path in (tmp_path / f"{kind}-again").rglob("*.*")
        }
        assert found == {f"sub/one.{kind}", "sub/one.txt", "tensorcache-export.jsonl"}
    again = dict(np.load(tmp_path / "npz-again" / "sub" / "one.npz"))
    assert_same(arrays, again)
    path = tmp_path / "safetensors-again" / "sub" / "one.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"step": "3", "é": "1"}
        assert_same(
            {name: tensors[name] for name in sorted(tensors)},
            {name: file.get_tensor(name) for name in sorted(file.keys())},
        )
    assert_same(value, torch.load(tmp_path / "pt-again" / "sub" / "one.pt", weights_only=False))


@pytest.mark.parametrize("has_list", [True, False])
def test_a_tar_packed_again(tmp_path: Path, has_list: bool) -> None:
    """`tar -c .` begins each name with `./`, which is not a part of the key, with and without the list of samples."""
    keys = [tc.safe_key(name) for name in ("a", "dir/photo (1).v2")]
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        for key in keys:
            sink.write(key, {"x": torch.ones(2)}, txt=b"a cat")
    run("export", tmp_path / "cache", tmp_path / "out", "--as", "webdataset")
    with tarfile.open(tmp_path / "out" / "samples.tar") as tar:
        members = [(each.name, tar.extractfile(each).read()) for each in tar]  # type: ignore[union-attr]
    with tarfile.open(tmp_path / "out" / "samples.tar", "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    if not has_list:
        (tmp_path / "out" / "tensorcache-export.jsonl").unlink()
    found = json_of("import", tmp_path / "out", tmp_path / "again")
    assert found["format"] == ("tensorcache-export" if has_list else "webdataset")
    with tc.open(tmp_path / "again") as cache:
        assert list(cache.keys()) == keys
        assert cache.read_members(keys, "txt") == [b"a cat"] * 2


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_what_was_lost_or_changed(tmp_path: Path, kind: str) -> None:
    """Each is named; nothing comes back as something else."""
    sample = {"x": torch.arange(4.0), "y": {"z": torch.ones(2).bfloat16()}, "text": "a cat"}
    with tc.ShardWriter(tmp_path / "cache", fsync=False) as sink:
        for key in "abcdefg":
            sink.write(key, sample, jpg=b"\xff")
    out = tmp_path / "out"
    run("export", tmp_path / "cache", out, "--as", kind)
    (out / f"a.{kind}").unlink()
    (out / "b.structure").unlink()
    (out / "c.jpg").unlink()
    (out / "d.structure").write_bytes((out / "d.structure").read_bytes()[:-1])
    (out / "e.structure").write_bytes(b"{}")
    shutil.copy(out / f"g.{kind}", out / f"f.{kind}")
    changed = {"x": torch.arange(4.0) + 1, "y.z": torch.ones(2)}
    if kind == "npz":
        np.savez(out / "f.npz", **{name: tensor.numpy() for name, tensor in changed.items()})
    else:
        safetensors.torch.save_file(changed, out / "f.safetensors")
    result = json_of("import", out, tmp_path / "again", "--on-error", "skip", status=1)
    assert {each["name"] for each in result["skipped"]} == set("abcdef")
    reasons = {each["name"]: each["what"] for each in result["skipped"]}
    assert all("is missing" in reasons[name] for name in "abc")
    assert "the tensors were changed since the export" in reasons["f"]
    assert result["num_written"] == 1
    run("import", out, tmp_path / "stop", status=1)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_small_structure_that_needs_much_memory(tmp_path: Path, kind: str) -> None:
    """Many names of one large tensor: refused before any of them is copied."""
    with tc.ShardWriter(tmp_path / "cache") as sink:
        sink.write("a", {"x": torch.zeros(1 << 20), "y": None})
    with tc.open(tmp_path / "cache") as cache:
        tc.export_cache(cache, tmp_path / "out", kind)
    count, nbytes = 4000, 4 << 20
    described = {
        f"x{i}": {"dtype": "F32", "shape": [1 << 20], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i in range(count)
    }
    text = json.dumps({"__metadata__": {"tensorcache": "1 0123456789abcdef"}, **described}, separators=(",", ":"))
    text = text.ljust(-(-(len(text) + 8) // 128) * 128 - 8)
    header = struct.pack("<Q", len(text)) + text.encode()
    structure = tmp_path / "out" / "a.structure"
    _line, _, rest = structure.read_bytes().partition(b"\n")
    skeleton = rest[8 + int.from_bytes(rest[:8], "little") :]
    _, _, digest, _ = parse_preamble(skeleton)
    assert digest is not None
    body = skeleton[PREAMBLE_NBYTES:]
    skeleton = build_preamble(len(header) + count * nbytes, digest, body) + body
    names = dict.fromkeys(described, "x")
    structure.write_bytes(json.dumps({"names": names}).encode() + b"\n" + header + skeleton)
    tracemalloc.start()
    try:
        with pytest.raises(tc.FormatError) as raised:
            tc.import_cache(tmp_path / "out", tmp_path / "again")
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert "twice" in str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        '{"format": "tensorcache-export", "version": 2}',
        '{"format": "tensorcache-export", "version": 1}',
        '{"format": "tensorcache-export", "version": 1, "kind": "exe", "values": "json", "cache": "", "fingerprint": {}}',
        '{"format": "tensorcache-export", "version": 1, "kind": "pt", "values": "json", "cache": "", "fingerprint": 3}',
        '{"format": "tensorcache-export", "version": 1, "kind": 3, "values": [], "cache": "", "fingerprint": {}}',
        "[" * 100_000,
    ],
)
def test_hostile_lists(tmp_path: Path, line: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "tensorcache-export.jsonl").write_text(line)
    assert "tensorcache-export.jsonl" in run("import", tmp_path / "in", tmp_path / "out", status=1).stderr


def test_a_list_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    torch.save({"x": torch.ones(1)}, tmp_path / "secret.pt")
    torch.save({"x": torch.ones(1)}, tmp_path / "in" / "a.pt")
    head = {
        "format": "tensorcache-export",
        "version": 1,
        "kind": "pt",
        "values": "json",
        "cache": "",
        "fingerprint": {},
    }
    samples = [
        {"key": "a", "name": "a"},
        {"key": "b", "name": "../secret"},
        {"key": "c", "name": str(tmp_path / "secret")},
        {"key": "d", "name": "a", "members": ["../../secret.pt"]},
        {"key": "../e", "name": "a"},
        {"key": "\x1b[31m", "name": "a"},
    ]
    lines = [json.dumps(each) for each in (head, *samples)]
    (tmp_path / "in" / "tensorcache-export.jsonl").write_text("\n".join(lines))
    result = run("import", tmp_path / "in", tmp_path / "out", "--on-error", "skip", status=1)
    with tc.open(tmp_path / "out") as cache:
        assert list(cache.keys()) == ["a"]
    assert "\x1b" not in result.stderr
