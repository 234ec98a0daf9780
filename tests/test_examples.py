"""The examples run as a user runs them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
needs_dali = pytest.mark.skipif(
    importlib.util.find_spec("nvidia.dali") is None if importlib.util.find_spec("nvidia") else True,
    reason="needs NVIDIA DALI: pip install nvidia-dali-cuda130",
)


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_dali
def test_photos_and_latents_are_cut_at_one_place(tmp_path: Path) -> None:
    out = run(sys.executable, "examples/dali_images_and_latents.py", "--out", str(tmp_path))
    assert "30 photos; a photo, made smaller, differs from its latent by 0.00" in out
    assert (tmp_path / "photos" / "photos.png").exists()


@needs_dali
def test_ranks_share_an_epoch(tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    out = run(torchrun, "--standalone", "--nproc-per-node", "2", "examples/dali_ranks.py", "--out", str(tmp_path))
    assert out.count("960 samples came once, 0 twice, 40 not") == 2


def test_training_that_is_killed_goes_on(tmp_path: Path) -> None:
    out = run(sys.executable, "examples/resume_training.py", "--out", str(tmp_path))
    assert "1000 samples, the same as those of the run that was not broken" in out


@pytest.mark.skipif(sys.platform != "linux", reason="needs the locks of Linux")
def test_two_terminals_share_a_slow_dataset(tmp_path: Path) -> None:
    command = [sys.executable, "examples/shared_dataset.py", "--samples", "60", "--name", f"test-{os.getpid()}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) for _ in range(2)]
    printed = [process.communicate(timeout=300)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    for epochs in printed:
        assert "60 samples" in epochs[0]
        assert "share 60" in epochs[1]
    num_loads = sum(int(epochs[-1].split("loaded ")[1].split(",")[0]) for epochs in printed)
    # If no line lists both processes, the memory may have been freed before the second one opened it.
    both_at_once = any(re.search(r"processes \(\d+, \d+\)", line) for epochs in printed for line in epochs)
    assert num_loads in ((60,) if both_at_once else (60, 120))


def test_a_whole_cache_in_bulk(tmp_path: Path) -> None:
    out = run(sys.executable, "examples/bulk_loading.py", "--out", str(tmp_path))
    assert "1000 samples; mean [-1.0, -0.87, -0.73, -0.6]…, deviation [0.5, 0.6, 0.7, 0.8]…" in out
    assert "the two ways differ by 0.000" in out


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_finetuning_that_is_killed_has_the_same_latents(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
    out = run(sys.executable, "examples/finetune_lightning.py", "--out", str(tmp_path))
    assert "2 processes were killed" in out
    assert "3 processes were killed" in out
    assert re.search(
        r"1260 samples, 1[0-4]\d without text: all latents and texts are the same as in the whole run", out
    )


@pytest.mark.skipif(sys.platform == "win32", reason="kills processes")
def test_training_on_two_nodes_that_are_killed(tmp_path: Path) -> None:
    for module in ("moto", "boto3", "obstore"):
        pytest.importorskip(module, reason="needs an S3 server: pip install 'wds-tensorcache[remote]' 'moto[server]'")
    out = run(sys.executable, "examples/train_on_nodes.py", "--out", str(tmp_path))
    assert re.search(
        r"480 samples in 2 epochs, killed on 2 nodes after \d+, resumed on 1: each once in each epoch, as in the run",
        out,
    )
