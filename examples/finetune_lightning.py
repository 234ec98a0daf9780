"""Finetune with Lightning on two processes that are killed, then on three, then on one: the same latents, bit for bit.

    python examples/finetune_lightning.py [--out demo_out] [--seed 0]

1. A cache has 420 samples: moments of latents in three aspects, their mirror images, and one to four captions each.
2. One process trains for three epochs. Each batch has one aspect. Latents are drawn from the moments, mirrored or not, with
   one of the captions, and a tenth of the texts is dropped.
3. Two processes do the same, each with batches of the same size, and are killed (SIGKILL) at a random moment. Three continue
   from Lightning's last checkpoint, and are killed too. One process trains to the end.
4. All samples of 2 and 3 are compared.

Needs: wds_tensorcache, torch, lightning.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import wds_tensorcache as tc
from wds_tensorcache.integrations.lightning import ResumeLoaders

ASPECTS = (8, 8, 8), (8, 6, 10), (8, 10, 6)  # means in 4 channels, standard deviations in 4 more
COUNT, EPOCHS, BATCH, TEXT_DIM, MAX_TOKENS = 420, 3, 4, 16, 12
EMPTY = torch.zeros(1, TEXT_DIM)  # the text encoder's states of an empty prompt
Row = tuple[int, str, str, str, bool, str, str]  # epoch, key, chosen latent and text, is it dropped, digests of both


def write_cache(folder: Path) -> None:
    """Write moments and captions as a VAE and a text encoder would return them; captions tell something about the latent."""
    generator = torch.Generator().manual_seed(0)
    with tc.ShardWriter(folder / "train-%03d.tar", max_samples=100) as sink:
        for i in range(COUNT):
            moments = torch.rand(ASPECTS[i % 3], generator=generator)
            captions = [
                moments.mean() + torch.randn(tokens, TEXT_DIM, generator=generator) / 10
                for tokens in torch.randint(3, MAX_TOKENS, (1 + i % 4,), generator=generator).tolist()
            ]
            latents = {"latent": moments.half(), "latent_flipped": moments.flip(-1).half()}
            sink.write(f"{i:04d}", latents | {"captions": [caption.half() for caption in captions]})


def make_loader(cache: tc.TensorCache) -> tc.Loader:
    return tc.Loader(
        cache,
        BATCH,  # on each process; BATCH // world_size would keep the size of a step
        shuffle=True,
        seed=0,
        bucket_by="latent",
        choose={"latent": ["latent", "latent_flipped"], "text": "captions.*"},
        collate={"text": tc.pad(to=MAX_TOKENS)},
        transform=[tc.sample_moments("latent"), tc.drop_text(0.1, {"text": EMPTY}, mark="is_dropped"), add_rows],
    )


def add_rows(batch: Any, info: tc.BatchInfo) -> Any:
    """Add the mask of padding to a batch, and what this example compares: a row for each sample that is not padding."""
    latents, texts = info.choices.chosen("latent"), info.choices.chosen("text")
    digests = [
        [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in batch[name]] for name in ("latent", "text")
    ]
    rows = zip(
        [info.epoch] * len(latents), info.keys, latents, texts, batch["is_dropped"].tolist(), *digests, strict=True
    )
    kept = [row for row, is_padding in zip(rows, info.is_padding.tolist(), strict=True) if not is_padding]
    return batch | {"is_padding": info.is_padding, "rows": kept}


class Finetuning(pl.LightningModule):
    """A small flow model for latents of any aspect; its checkpoints also have the rows of all batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(TEXT_DIM + 1, 32)
        self.enter = nn.Conv2d(4, 32, 3, padding=1)
        self.leave = nn.Conv2d(32, 4, 3, padding=1)
        self.rows: list[Row] = []  # of all processes
        self.new_rows: list[Row] = []  # of this process, since the last checkpoint

    def forward(self, noisy: Tensor, t: Tensor, text: Tensor) -> Tensor:
        condition = self.text(torch.cat([text.mean(1), t[:, None]], dim=1))
        velocity: Tensor = self.leave(F.silu(self.enter(noisy) + condition[:, :, None, None]))
        return velocity

    def training_step(self, batch: Any, number: int) -> Tensor:
        latent = batch["latent"].float()
        noise, t = torch.randn_like(latent), torch.rand(len(latent))
        noisy = torch.lerp(noise, latent, t[:, None, None, None])
        errors = (self(noisy, t, batch["text"].float()) - (latent - noise)).square().mean((1, 2, 3))
        loss: Tensor = (errors * ~batch["is_padding"]).mean()
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(latent), sync_dist=True)
        self.new_rows += batch["rows"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def gather_rows(self) -> list[Row]:
        parts: list[Any] = [self.new_rows] * self.trainer.world_size
        if dist.is_initialized():
            dist.all_gather_object(parts, self.new_rows)
        self.rows += [row for part in parts for row in part]
        self.new_rows = []
        return self.rows

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rows"] = self.gather_rows()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.rows = checkpoint["rows"]


class Kill(pl.Callback):
    """Kill all processes of the session soon after they have seen a number of samples."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def on_train_batch_start(self, trainer: pl.Trainer, model: Any, batch: Any, number: int) -> None:
        if len(model.rows) + len(model.new_rows) * trainer.world_size >= self.num_samples and trainer.is_global_zero:
            # a thread, because the kill may then come at any moment, also while a checkpoint is written
            threading.Timer(random.random() / 50, os.killpg, (0, signal.SIGKILL)).start()


def train(out: Path, devices: int = 1, callbacks: tuple[pl.Callback, ...] = ()) -> list[Row]:
    """Train from the last checkpoint in `out`, or from the beginning; return the rows of all processes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # Lightning writes a checkpoint to the folder for temporary files, and then moves it: within one file system, by one rename
    tempfile.tempdir = str(out)
    model = Finetuning()
    saving = ModelCheckpoint(out, every_n_train_steps=5, save_top_k=0, save_last=True, enable_version_counter=False)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=devices,
        strategy="ddp_fork" if devices > 1 else "auto",  # like "ddp", without importing everything again
        callbacks=[saving, ResumeLoaders(), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with tc.open(out.parent / "data") as cache, make_loader(cache) as loader:
        trainer.fit(model, loader, ckpt_path="last")
    print(f"trained to the end: loss {trainer.callback_metrics['loss']:.3f}")
    return model.gather_rows()


def train_and_kill(out: Path, devices: int, num_samples: int) -> None:
    """Train in a new session, where Lightning starts the other processes, until `Kill` ends them all."""
    command = [sys.executable, __file__, "--worker", str(out), str(devices), str(num_samples)]
    returned = subprocess.run(command, start_new_session=True, check=False).returncode
    if returned != -signal.SIGKILL:
        raise SystemExit(f"{devices} processes ended with {returned} before they were killed")
    num_saved = len(torch.load(out / "last.ckpt", weights_only=True)["rows"])
    print(f"{devices} processes were killed; their last checkpoint is after {num_saved} of {COUNT * EPOCHS} samples")


def main(out: Path, seed: int | None) -> None:
    shutil.rmtree(out, ignore_errors=True)
    for name in ("whole", "broken"):
        (out / name).mkdir(parents=True)
    write_cache(out / "data")
    whole = train(out / "whole")
    generator = random.Random(seed)
    total = COUNT * EPOCHS
    train_and_kill(out / "broken", 2, generator.randrange(total // 10, total * 4 // 10))
    train_and_kill(out / "broken", 3, generator.randrange(total * 5 // 10, total * 7 // 10))
    broken = train(out / "broken")
    # The size of a step determines when a bucket ends, so the order differs, and samples are compared by epoch and key.
    is_same = sorted(broken) == sorted(whole)
    is_new = len({row[:2] for row in whole}) == len({row[5] for row in whole}) == total
    result = "the same as in" if is_same and is_new else "DIFFERENT from"
    print(
        f"{len(broken)} samples, {sum(row[4] for row in broken)} without text: all latents and texts are {result} the whole run"
    )
    if not is_same or not is_new:
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for shards and checkpoints")
    parser.add_argument(
        "--seed", type=int, help="random seed of the numbers of samples after which processes are killed"
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.worker:
        folder, devices, num_samples = options.worker
        train(Path(folder), int(devices), (Kill(int(num_samples)),))
    else:
        main(options.out / "finetune", options.seed)
