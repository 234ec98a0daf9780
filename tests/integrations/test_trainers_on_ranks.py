"""Lightning, accelerate and Hugging Face's Trainer, killed and started again: every sample once in each epoch, on all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.reading.batches import write

pytestmark = pytest.mark.long

TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
NUM_SAMPLES = 41
KILLED_AFTER = {1: 16, 2: 8}  # steps of 4 samples on each rank; checkpoints are after every third

COMMON = """
import json, os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch
import wds_tensorcache as tc

torch.set_num_threads(1)
folder, kind, killed_after, num_workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[5])
cache = tc.open(folder + "/data.tar")

def log(rank, step, epoch, batch):  # the kernel has the line when the process is killed
    rows = [i for i, pad in zip(batch["i"], batch["is_padding"].tolist()) if not pad]
    with open(f"{folder}/log-{rank}", "a") as file:
        file.write(f"{step} {epoch} {' '.join(map(str, rows))}\\n")
    if step + 1 == killed_after:
        os.kill(os.getpid(), signal.SIGKILL)

def note(batch, info):
    return batch | {"is_padding": info.is_padding, "i": [int(key) for key in info.keys], "epoch": info.epoch}

options = {"num_workers": num_workers} if num_workers else {}
loader = getattr(tc, kind)(cache, 4, shuffle=True, transform=note, **options)
"""

LIGHTNING = """
import lightning.pytorch as pl
from wds_tensorcache.integrations.lightning import ResumeLoaders

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        self.batch = batch
        return self.layer(batch["x"]).square().mean()

    def on_train_batch_end(self, *_):
        step = self.trainer.global_step - 1
        if step + 1 == killed_after and self.trainer.world_size > 1:
            self.trainer.strategy.barrier()
        log(self.trainer.global_rank, step, self.batch["epoch"], self.batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1e-5)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-4, total_steps=total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

saving = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=3, save_last=True, enable_version_counter=False)
trainer = pl.Trainer(
    max_epochs=2, accelerator="cpu", devices=int(sys.argv[4]), logger=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[saving, ResumeLoaders()],
)
trainer.fit(Model(), loader, ckpt_path="last")
assert trainer.global_step == 2 * len(loader)
"""

ACCELERATE = """
import accelerate

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
saved = folder + "/saved"
resumes = os.path.exists(saved)
accelerator.wait_for_everyone()  # before the other process saves its first checkpoint
layer = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(layer.parameters(), 1e-5)
total = 2 * len(loader) * accelerator.num_processes
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-4, total_steps=total)
layer, optimizer, made, schedule = accelerator.prepare(layer, optimizer, loader, schedule)
accelerator.register_for_checkpointing(made)  # with the state of the loader
step = 0
if resumes:
    accelerator.load_state(saved)
    step = json.load(open(saved + "/step"))
while made.epoch < 2:
    for batch in made:
        with accelerator.accumulate(layer):
            accelerator.backward(layer(batch["x"]).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        log(accelerator.process_index, step, batch["epoch"], batch)
        step += 1
        if step % 3 == 0:
            assert made.state_dict()["position"]["step"] == step
            accelerator.save_state(saved)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                open(saved + "/step", "w").write(str(step))
            accelerator.wait_for_everyone()
    assert accelerator.sync_gradients  # the last step of an epoch uses all gradients
os._exit(0)  # at the end of the interpreter, threads of gloo sometimes abort the process
"""

TRANSFORMERS = """
from transformers import Trainer, TrainingArguments
from wds_tensorcache.integrations.accelerate import SkippableLoader

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, **batch):
        log(os.environ.get("RANK", 0), trainer.state.global_step, batch["epoch"], batch)
        return {"loss": self.layer(batch["x"]).square().mean()}

class Ours(Trainer):
    def get_train_dataloader(self):
        return SkippableLoader(loader) if kind == "Loader" else loader

options = TrainingArguments(
    folder, num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_steps=3,
    disable_tqdm=True, remove_unused_columns=False, lr_scheduler_type="cosine", warmup_steps=2,
)
trainer = Ours(Model(), options, train_dataset=cache)
trainer.train(resume_from_checkpoint=any(name.startswith("checkpoint") for name in os.listdir(folder)))
"""


@pytest.mark.parametrize(
    ("trainer", "kind", "num_ranks", "num_workers"),
    [
        ("lightning", "Loader", 2, 0),
        ("lightning", "torch_loader", 1, 2),
        ("accelerate", "torch_loader", 1, 0),
        ("accelerate", "torch_loader", 2, 1),
        ("transformers", "Loader", 2, 0),
        ("transformers", "torch_loader", 1, 0),
    ],
)
def test_killed_and_resumed(tmp_path: Path, trainer: str, kind: str, num_ranks: int, num_workers: int) -> None:
    """One script, with a schedule, on one process and on two."""
    pytest.importorskip(trainer, reason=f"needs {trainer}: pip install {trainer}")
    write(tmp_path / "data.tar", {f"{i:03d}": {"x": torch.full((4,), float(i))} for i in range(NUM_SAMPLES)})
    script = tmp_path / "script.py"
    script.write_text(
        COMMON + {"lightning": LIGHTNING, "accelerate": ACCELERATE, "transformers": TRANSFORMERS}[trainer]
    )
    # without what other tests set, and without Slurm, which Lightning would look for
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))}
    # Lightning starts the second process itself
    launcher = TORCHRUN if trainer != "lightning" and num_ranks > 1 else [sys.executable]

    def run(killed_after: int) -> subprocess.CompletedProcess[str]:
        command = [*launcher, script, tmp_path, kind, killed_after, num_ranks, num_workers]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240, env=environment)

    stop = KILLED_AFTER[num_ranks]
    killed = run(stop)
    assert killed.returncode == -signal.SIGKILL or "SIGKILL" in killed.stderr, killed.stderr
    before = take_log(tmp_path)
    assert {step for step, *_ in before} == set(range(stop))
    resumed = run(0)
    assert resumed.returncode == 0, resumed.stderr
    after = take_log(tmp_path)
    first = stop - stop % 3  # after the last checkpoint
    assert min(after)[0] == first
    used = [row for row in before if row[0] < first] + after
    assert Counter(row[1:] for row in used) == {(epoch, i): 1 for epoch in range(2) for i in range(NUM_SAMPLES)}


def take_log(folder: Path) -> list[tuple[int, int, int]]:
    """Return step, epoch and sample index of all logged rows that are not padding, and remove the logs."""
    found = []
    for path in folder.glob("log-*"):
        for line in path.read_text().splitlines():
            step, epoch, *indices = map(int, line.split())
            found += [(step, epoch, i) for i in indices]
        path.unlink()
    return found
