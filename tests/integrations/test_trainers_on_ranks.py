"""Lightning, accelerate and Hugging Face's Trainer on two real processes: every sample once in each epoch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc

COUNT = 11
KINDS = ["Loader", "torch_loader", "torch_loader, workers", "read_batch"]

COMMON = """
import collections, os, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import wds_tensorcache as tc

torch.set_num_threads(1)
cache, kind, count = tc.open(sys.argv[1]), "", 11

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

def end():  # at the end of the interpreter, threads of gloo sometimes abort the process
    dist.barrier()
    os._exit(0)
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
        os.path.join(os.path.dirname(sys.argv[1]), kind), num_train_epochs=2, per_device_train_batch_size=2, use_cpu=True,
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


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    with tc.ShardWriter(tmp_path / "data.tar", fsync=False) as sink:
        for i in range(COUNT):
            sink.write(f"{i:03d}", {"x": torch.full((4,), float(i)), "name": f"n{i}"})
    return tmp_path / "data.tar"


def run(cache: Path, script: str, *arguments: str, launcher: list[str]) -> list[str]:
    """Run a script, and return the lines that it prints."""
    path = cache.with_name("script.py")
    path.write_text(COMMON + script)
    # without what other tests set, and without Slurm, which Lightning would look for
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))}
    done = subprocess.run(
        [*launcher, str(path), str(cache), *arguments], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]


def num_right(lines: list[str]) -> list[int]:
    """Return how many checks of each epoch passed; the processes may write into one line."""
    return ["".join(lines).count(f"epoch {epoch} is right") for epoch in range(2)]


def test_lightning(cache: Path) -> None:
    """Lightning starts the second process itself, and initializes torch.distributed in the first `fit`."""
    pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
    assert num_right(run(cache, LIGHTNING, *KINDS, launcher=[sys.executable])) == [16, 16]


@pytest.mark.parametrize("script", ["accelerate", "transformers"])
def test_torchrun(cache: Path, script: str) -> None:
    pytest.importorskip(script, reason=f"needs {script}: pip install {script}")
    text = {"accelerate": ACCELERATE, "transformers": TRANSFORMERS}[script]
    assert num_right(run(cache, text, *KINDS, launcher=TORCHRUN)) == [8, 8]
