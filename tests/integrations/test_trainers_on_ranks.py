"""Lightning, accelerate and Hugging Face's Trainer in real processes, also killed and started again: every sample once in each
epoch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc

pytestmark = pytest.mark.long

COUNT = 11
KINDS = ["Loader", "torch_loader", "torch_loader, workers", "read_batch"]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node"]

COMMON = """
import collections, json, os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import wds_tensorcache as tc

torch.set_num_threads(1)
folder = sys.argv[1]
cache = tc.open(folder + "/data.tar")

def end():  # at the end of the interpreter, threads of gloo sometimes abort the process
    dist.barrier()
    os._exit(0)
"""


def start(folder: Path, script: str, *arguments: object, launcher: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a script with a cache of `COUNT` samples or more in its folder."""
    path = folder / "script.py"
    path.write_text(COMMON + script)
    # without what other tests set, and without Slurm, which Lightning would look for
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))}
    command = [*launcher, str(path), str(folder), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def write(folder: Path, count: int) -> None:
    with tc.ShardWriter(folder / "data.tar", fsync=False) as sink:
        for i in range(count):
            sink.write(f"{i:03d}", {"x": torch.full((4,), float(i)), "name": f"n{i}"})


# --- on two ranks ---

RANKS = """
kind, count = "", 11

def loader():
    if kind == "Loader":
        return tc.Loader(cache, 2, shuffle=True)
    if kind.startswith("torch_loader"):
        return tc.torch_loader(cache, 2, shuffle=True, num_workers=2 * kind.endswith("workers"))
    return torch.utils.data.DataLoader(range(count), batch_size=2, shuffle=True, collate_fn=cache.read_batch)

def check(seen, epoch):  # the names of one epoch on this rank
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    assert [len(each) for each in everyone] == [6, 6], everyone
    counts = collections.Counter(sum(everyone, []))
    # 12 rows for 11 samples: one is repeated
    assert len(counts) == count and max(counts.values()) <= 2, everyone
    if kind != "read_batch":
        plan = tc.Loader(cache, 2, shuffle=True, rank=dist.get_rank(), world_size=2)
        plan.set_epoch(epoch)
        assert seen == [name for batch in plan for name in batch["name"]], seen
    print(f"epoch {epoch} is right", flush=True)
"""

LIGHTNING = """
import lightning.pytorch as pl

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 1), []

    def training_step(self, batch, number):
        self.seen += list(batch["name"])
        return self.layer(batch["x"]).square().mean()

    def on_train_epoch_end(self):
        check(self.seen, self.trainer.current_epoch)
        self.seen = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return loader()

kinds = sys.argv[2:]
made = {}
for kind in kinds:  # before Lightning initializes torch.distributed
    made[kind] = loader()
quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
for number, kind in enumerate([*kinds, *kinds]):
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", **quiet)
    trainer.fit(Model(), **({"train_dataloaders": made[kind]} if number < len(kinds) else {"datamodule": Data()}))
end()
"""

ACCELERATE = """
import accelerate

accelerator = accelerate.Accelerator(cpu=True)
for kind in sys.argv[2:]:
    layer = torch.nn.Linear(4, 1)
    model, optimizer, made = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.01), loader())
    for epoch in range(2):
        seen = []
        for batch in made:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"]).mean())
                optimizer.step()
                optimizer.zero_grad()
            seen += list(batch["name"])
        check(seen, epoch)
end()
"""

TRANSFORMERS = """
from transformers import Trainer, TrainingArguments
from wds_tensorcache.integrations.accelerate import SkippableLoader

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 1), []

    def forward(self, x, name):
        self.seen += list(name)
        return {"loss": self.layer(x).square().mean()}

class Ours(Trainer):
    def get_train_dataloader(self):
        if kind == "Loader":
            return SkippableLoader(loader())
        return super().get_train_dataloader() if kind == "read_batch" else loader()

for kind in sys.argv[2:]:
    options = TrainingArguments(
        f"{folder}/{kind}", num_train_epochs=2, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], save_steps=1, disable_tqdm=True, remove_unused_columns=False,
    )
    model = Model()
    data = range(count) if kind == "read_batch" else cache
    collator = cache.read_batch if kind == "read_batch" else None
    Ours(model, options, train_dataset=data, data_collator=collator).train()
    check(model.seen[:6], 0)
    check(model.seen[6:], 1)
    for step in (2, 3, 4):  # in the middle of each epoch, which has 3 steps, and between them
        resumed = Model()
        trainer = Ours(resumed, options, train_dataset=data, data_collator=collator)
        trainer.train(resume_from_checkpoint=os.path.join(options.output_dir, f"checkpoint-{step}"))
        assert resumed.seen == model.seen[2 * step:], (kind, step, resumed.seen, model.seen)
end()
"""


def num_right(folder: Path, script: str, launcher: list[str]) -> list[int]:
    """Return how many checks of each epoch passed; the processes may write into one line."""
    write(folder, COUNT)
    done = start(folder, RANKS + script, *KINDS, launcher=launcher)
    assert done.returncode == 0, done.stderr
    return [done.stdout.replace("\n", "").count(f"epoch {epoch} is right") for epoch in range(2)]


def test_lightning(tmp_path: Path) -> None:
    """Lightning starts the second process itself, and initializes torch.distributed in the first `fit`."""
    pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
    assert num_right(tmp_path, LIGHTNING, [sys.executable]) == [16, 16]


@pytest.mark.parametrize("script", ["accelerate", "transformers"])
def test_torchrun(tmp_path: Path, script: str) -> None:
    pytest.importorskip(script, reason=f"needs {script}: pip install {script}")
    text = {"accelerate": ACCELERATE, "transformers": TRANSFORMERS}[script]
    assert num_right(tmp_path, text, [*TORCHRUN, "2"]) == [8, 8]


# --- killed after a fixed step, and started again ---

NUM_KILLED = 41  # samples
KILLED_AFTER = {1: 16, 2: 8}  # steps of 4 samples on each rank; checkpoints are after every third

KILLED = """
kind, killed_after = sys.argv[2], int(sys.argv[3])

def log(rank, step, epoch, batch):  # the kernel has the line when the process is killed
    rows = [i for i, pad in zip(batch["i"], batch["is_padding"].tolist()) if not pad]
    with open(f"{folder}/log-{rank}", "a") as file:
        file.write(f"{step} {epoch} {' '.join(map(str, rows))}\\n")
    if step + 1 == killed_after:
        os.kill(os.getpid(), signal.SIGKILL)

def note(batch, info):
    return batch | {"is_padding": info.is_padding, "i": [int(key) for key in info.keys], "epoch": info.epoch}

loader = getattr(tc, kind)(cache, 4, shuffle=True, transform=note)
"""

KILLED_LIGHTNING = """
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

KILLED_ACCELERATE = """
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
os._exit(0)  # as in `end`
"""

KILLED_TRANSFORMERS = """
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, **batch):
        log(0, trainer.state.global_step, batch["epoch"], batch)
        return {"loss": self.layer(batch["x"]).square().mean()}

class Ours(Trainer):
    def get_train_dataloader(self):
        return loader

options = TrainingArguments(
    folder, num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_steps=3,
    disable_tqdm=True, remove_unused_columns=False, lr_scheduler_type="cosine", warmup_steps=2,
)
trainer = Ours(Model(), options, train_dataset=cache)
trainer.train(resume_from_checkpoint=any(name.startswith("checkpoint") for name in os.listdir(folder)))
"""


@pytest.mark.parametrize(
    ("trainer", "kind", "num_ranks"),
    [
        ("lightning", "Loader", 1),
        ("lightning", "torch_loader", 2),
        ("accelerate", "torch_loader", 1),
        ("accelerate", "torch_loader", 2),
        ("transformers", "torch_loader", 1),
    ],
)
def test_killed_and_resumed(tmp_path: Path, trainer: str, kind: str, num_ranks: int) -> None:
    """One script, with a schedule, on one process and on two."""
    pytest.importorskip(trainer, reason=f"needs {trainer}: pip install {trainer}")
    write(tmp_path, NUM_KILLED)
    scripts = {"lightning": KILLED_LIGHTNING, "accelerate": KILLED_ACCELERATE, "transformers": KILLED_TRANSFORMERS}
    launcher = [*TORCHRUN, str(num_ranks)] if trainer == "accelerate" and num_ranks > 1 else [sys.executable]

    def run(killed_after: int) -> subprocess.CompletedProcess[str]:
        return start(tmp_path, KILLED + scripts[trainer], kind, killed_after, num_ranks, launcher=launcher)

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
    assert Counter(row[1:] for row in used) == {(epoch, i): 1 for epoch in range(2) for i in range(NUM_KILLED)}


def take_log(folder: Path) -> list[tuple[int, int, int]]:
    """Return step, epoch and sample index of all logged rows that are not padding, and remove the logs."""
    found = []
    for path in folder.glob("log-*"):
        for line in path.read_text().splitlines():
            step, epoch, *indices = map(int, line.split())
            found += [(step, epoch, i) for i in indices]
        path.unlink()
    return found
