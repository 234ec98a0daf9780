"""Files of trainers that are damaged or large: right samples, or errors that the import reports."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.importers import test_comfyui as comfyui
from tests.importers import test_diffusion_pipe as diffusion_pipe
from tests.importers import test_edm2 as edm2
from tests.importers import test_fastvideo as fastvideo
from tests.importers import test_kohya as kohya
from tests.importers import test_lightningdit as lightningdit
from tests.importers import test_musubi as musubi
from tests.importers import test_nemo_hidden_states as nemo_hidden_states
from tests.importers.folders import imported
from tests.same import assert_same


def write_kohya(folder: Path) -> None:
    for name in "ab":
        kohya.save_latents(folder / f"{name}_0512x0512_flux.npz", (2, 3, 3), end="_3x3")


def write_new_kohya(folder: Path) -> None:
    for name in "ab":
        kohya.save_new(folder / f"{name}_0512x0512_sdxl.safetensors", (512, 512), torch.randn(4, 8, 8))
        kohya.save_new_text(folder / f"{name}_sdxl_225_te.safetensors", name)


def write_musubi(folder: Path) -> None:
    for name in "ab":
        musubi.save_image(folder, name, "wan")
        musubi.save_text(folder, name, "wan")


def write_comfyui(folder: Path) -> None:
    comfyui.save_set(folder, *comfyui.make_set(4), shard_size=2)
    (folder / "metadata.json").unlink()


def write_edm2(folder: Path) -> None:
    for name in "ab":
        edm2.write_zip(folder / f"{name}.zip", edm2.GOOD)


def write_lightningdit(folder: Path) -> None:
    for shard in range(2):
        lightningdit.save(folder / lightningdit.NAME.format(0, shard), lightningdit.rows_of(3))


def write_nemo_hidden_states(folder: Path) -> None:
    for name in "ab":
        nemo_hidden_states.write_cache(folder / name, 4)


def write_diffusion_pipe(folder: Path) -> None:
    for name in "ab":
        items = [diffusion_pipe.latent_item(f"/{i}.png", ["x"], 2) for i in range(3)]
        diffusion_pipe.write_cache(folder / name / "latents", items)


def write_fastvideo(folder: Path) -> None:
    for name in "ab":
        records = [fastvideo.record(row, fastvideo.arrays(row), id=f"{name}{row}") for row in range(2)]
        fastvideo.write(folder / f"{name}.parquet", records, *fastvideo.NAMES)


WRITERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "kohya": (write_kohya, "a*"),
    "kohya-safetensors": (write_new_kohya, "a*"),
    "musubi": (write_musubi, "a*"),
    "comfyui": (write_comfyui, "shard_0000*"),
    "edm2": (write_edm2, "a*"),
    "fastvideo": (write_fastvideo, "a*"),
    "lightningdit": (write_lightningdit, "*shard000*"),
    "nemo-hidden-states": (write_nemo_hidden_states, "a/*"),
    "diffusion-pipe": (write_diffusion_pipe, "a/latents/*"),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", WRITERS)
def test_damage(tmp_path: Path, name: str, seed: int) -> None:
    writer, pattern = WRITERS[name]
    writer(tmp_path / "whole")
    expected, report = imported(tmp_path / "whole", tmp_path / "all", format=name)
    draw = random.Random(seed)
    shutil.copytree(tmp_path / "whole", tmp_path / "in")
    path = draw.choice(sorted((tmp_path / "in").glob(pattern)))
    raw = bytearray(path.read_bytes())
    # headers are at the beginning or at the end
    places = (range(8), range(min(len(raw), 2500)), range(max(0, len(raw) - 1500), len(raw)))[seed % 3]
    for _ in range(draw.choice((1, 4))):
        raw[draw.choice(places)] ^= 1 << draw.randrange(8)
    if seed > 9:
        del raw[draw.randrange(len(raw)) :]
    path.write_bytes(raw)
    found, report = imported(tmp_path / "in", tmp_path / "out", format=name, on_error="skip")
    others = [sample for sample in expected if not sample.startswith(("a", "shard_0000", "latents_rank00_shard000"))]
    assert len(others) >= len(expected) // 2
    for sample in others:
        assert_same(expected[sample], found[sample])
    assert report.skipped or found.keys() == expected.keys() or seed < 10


def num_bytes_read() -> int:
    """Return how many bytes this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("name", ["comfyui", "edm2", "lightningdit", "nemo-hidden-states"])
def test_large_files_are_read_by_position(tmp_path: Path, name: str) -> None:
    """A file of many samples may be larger than memory."""
    folder = tmp_path / "in"
    if name == "comfyui":
        comfyui.save_set(folder, *comfyui.make_set(300))
    elif name == "edm2":
        edm2.write_zip(folder / "a.zip", edm2.files_of(edm2.moments_of(300), None))
    elif name == "nemo-hidden-states":
        nemo_hidden_states.write_cache(folder, 300, shard_size=300)
    else:
        lightningdit.save(folder / lightningdit.NAME.format(0, 0), lightningdit.rows_of(300))
    tc.import_cache(folder, tmp_path / "first", num_workers=1)  # imports modules
    begin = num_bytes_read()
    tc.import_cache(folder, tmp_path / "out", num_workers=1)
    assert num_bytes_read() - begin < 3 * sum(path.stat().st_size for path in folder.iterdir())
