"""Files of trainers that are damaged or large: right samples, or errors that the import reports."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.importers import test_comfyui as comfyui
from tests.importers import test_diffusion_pipe as diffusion_pipe
from tests.importers import test_edm2 as edm2
from tests.importers import test_fastvideo as fastvideo
from tests.importers import test_hf_datasets as hf_datasets
from tests.importers import test_kohya as kohya
from tests.importers import test_lightningdit as lightningdit
from tests.importers import test_musubi as musubi
from tests.importers import test_nemo_hidden_states as nemo_hidden_states
from tests.importers.chunked_samples import write_litdata, write_mds
from tests.importers.folders import imported
from tests.same import assert_same


def write_kohya_safetensors(folder: Path, name: str) -> None:
    kohya.save_new(folder / f"{name}_0512x0512_sdxl.safetensors", (512, 512), torch.randn(4, 8, 8))
    kohya.save_new_text(folder / f"{name}_sdxl_225_te.safetensors", name)


def write_musubi(folder: Path, name: str) -> None:
    musubi.save_image(folder, name, "wan")
    musubi.save_text(folder, name, "wan")


def write_lightningdit(folder: Path, name: str) -> None:
    lightningdit.save(folder / name / lightningdit.NAME.format(0, 0), lightningdit.rows_of(3))


def write_diffusion_pipe(folder: Path, name: str) -> None:
    items = [diffusion_pipe.latent_item(f"/{i}.png", ["x"], 2) for i in range(3)]
    diffusion_pipe.write_cache(folder / name / "latents", items)


def write_fastvideo(folder: Path, name: str) -> None:
    records = [fastvideo.record(row, fastvideo.arrays(row), id=f"{name}{row}") for row in range(2)]
    fastvideo.write(folder / f"{name}.parquet", records, *fastvideo.NAMES)


# Functions that write files whose paths begin with a name.
WRITERS: dict[str, Callable[[Path, str], Any]] = {
    "kohya": lambda folder, name: kohya.save_latents(folder / f"{name}_0512x0512_flux.npz", (2, 3, 3), end="_3x3"),
    "kohya-safetensors": write_kohya_safetensors,
    "musubi": write_musubi,
    "lightningdit": write_lightningdit,
    "comfyui": lambda folder, name: comfyui.save_set(folder / name, *comfyui.make_set(2)),
    "edm2": lambda folder, name: edm2.write_zip(folder / f"{name}.zip", edm2.GOOD),
    "fastvideo": write_fastvideo,
    "nemo-hidden-states": lambda folder, name: nemo_hidden_states.write_cache(folder / name, 4),
    "diffusion-pipe": write_diffusion_pipe,
}
ZSTD = {"compression": "zstd"}
# by packages
LONG: dict[str, Callable[[Path, str], Any]] = {
    "hf-datasets": lambda folder, name: hf_datasets.make(3).save_to_disk(folder / name),
    "mds": lambda folder, name: write_mds(folder / name, size_limit=2500),
    "litdata": lambda folder, name: write_litdata(folder / name),
    "litdata chunk": lambda folder, name: write_litdata(folder / name, **ZSTD, compression_level="chunk"),
    "litdata batch": lambda folder, name: write_litdata(folder / name, **ZSTD, compression_level="batch"),
    "litdata sample": lambda folder, name: write_litdata(folder / name, **ZSTD, compression_level="sample"),
}
NUM_DAMAGES = {"hf-datasets": 75, "mds": 60}
MIN_FAULTS = {"hf-datasets": 21, "mds": 34, "litdata": 4}


@pytest.mark.parametrize("name", [*WRITERS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_damage(tmp_path: Path, name: str) -> None:
    """Samples of other files are imported; a file that was cut short is reported if samples are missing."""
    folder, form = tmp_path / "in", name.partition(" ")[0]
    for group in "ab":
        (WRITERS | LONG)[name](folder, group)
    expected, _ = imported(folder, tmp_path / "whole", format=form)
    others = [sample for sample in expected if sample.startswith("b")]
    assert len(others) == len(expected) // 2
    files = sorted(path for path in folder.rglob("*") if path.is_file() and str(path.relative_to(folder))[0] == "a")
    num_faults = 0
    for seed in range(NUM_DAMAGES.get(name, 12)):
        draw = random.Random(seed)
        path = draw.choice(files)
        whole = path.read_bytes()
        raw = bytearray(whole)
        # headers are at the beginning or at the end
        places = (range(8), range(min(len(raw), 2500)), range(max(0, len(raw) - 1500), len(raw)), range(len(raw)))
        for _ in range(draw.choice((1, 4))):
            raw[draw.choice(places[seed % 4])] ^= 1 << draw.randrange(8)
        is_cut = seed % 6 == 5
        if is_cut:
            del raw[draw.randrange(len(raw)) :]
        path.write_bytes(raw)
        found, report = imported(folder, tmp_path / f"{seed}", format=form, on_error="skip")
        path.write_bytes(whole)
        for sample in others:
            assert_same(expected[sample], found[sample])
        assert report.skipped or found.keys() == expected.keys() or not is_cut
        num_faults += bool(report.skipped)
    assert num_faults >= MIN_FAULTS.get(form, 1)


def num_bytes_read() -> int:
    """Return how many bytes this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("name", ["comfyui", "edm2", "nemo-hidden-states"])
def test_large_files_are_read_by_position(tmp_path: Path, name: str) -> None:
    """A file of many samples may be larger than memory."""
    folder = tmp_path / "in"
    if name == "comfyui":
        comfyui.save_set(folder, *comfyui.make_set(100))
    elif name == "edm2":
        edm2.write_zip(folder / "a.zip", edm2.files_of(edm2.moments_of(100), None))
    else:
        nemo_hidden_states.write_cache(folder, 100, shard_size=100)
    tc.import_cache(folder, tmp_path / "first", num_workers=1)  # imports modules
    begin = num_bytes_read()
    tc.import_cache(folder, tmp_path / "out", num_workers=1)
    assert num_bytes_read() - begin < 3 * sum(path.stat().st_size for path in folder.iterdir())
