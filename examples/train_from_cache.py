"""Train a text-conditional flow model from cached latents, end to end, in under two minutes on two CPU cores.

    python examples/train_from_cache.py [--out demo_out]

1. A small autoencoder turns the 1,797 handwritten digits of scikit-learn into latents of 4x4x4.
2. Latents and text conditioning, nested as diffusion trainers nest them, are written to WebDataset shards.
3. A rectified flow model is trained from those shards alone, then sampled and decoded: `digits.png`.
4. The same samples, stored as this project's members, as `.pyd` and as `.pth`, are opened and timed.

Needs: wds_tensorcache, torch, numpy, webdataset, scikit-learn, tqdm, pillow.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import webdataset as wds
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from tqdm import tqdm

import wds_tensorcache as tc

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEXT_DIM = 64
LATENT = (4, 4, 4)


class AutoEncoder(nn.Module):
    """Images `[B, 1, 32, 32]` in [-1, 1] <-> latents `[B, 4, 4, 4]`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 8, 4, 2), nn.SiLU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(2 * width, LATENT[0], 3, 1, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(LATENT[0], 2 * width, 3, 1, 1), nn.SiLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.SiLU(),
            nn.ConvTranspose2d(width, 1, 8, 4, 2),
        )  # fmt: skip


class FlowBlock(nn.Module):
    """A residual layer that the conditioning scales, shifts and gates."""

    def __init__(self, width: int, cond_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(cond_width, 3 * width)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, hidden: Tensor, cond: Tensor) -> Tensor:
        scale, shift, gate = self.modulation(cond).chunk(3, dim=-1)
        return hidden + gate * self.layers(self.norm(hidden) * (1 + scale) + shift)


class Flow(nn.Module):
    """The velocity of a latent at time `t`, given text states `[B, tokens, dim]` and a pooled state."""

    def __init__(self, width: int = 320, cond_width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(math.prod(LATENT), width)
        self.query = nn.Linear(width, cond_width)
        self.key_value = nn.Linear(TEXT_DIM, 2 * cond_width)
        self.pooled = nn.Linear(TEXT_DIM, cond_width)
        self.time = nn.Sequential(nn.Linear(64, cond_width), nn.SiLU(), nn.Linear(cond_width, cond_width))
        self.blocks = nn.ModuleList(FlowBlock(width, cond_width) for _ in range(depth))
        self.leave = nn.Linear(width, math.prod(LATENT))
        self.register_buffer("frequencies", torch.logspace(0, 2.3, 32))

    def forward(self, latent: Tensor, t: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        hidden = self.enter(latent.flatten(1))
        key, value = self.key_value(text).chunk(2, dim=-1)
        words = F.scaled_dot_product_attention(self.query(hidden)[:, None], key, value)[:, 0]
        angles = t[:, None] * self.frequencies
        cond = F.silu(words + self.pooled(pooled) + self.time(torch.cat([angles.sin(), angles.cos()], dim=-1)))
        for block in self.blocks:
            hidden = block(hidden, cond)
        return self.leave(hidden).view_as(latent)


def load_images() -> tuple[Tensor, list[int]]:
    """Return the digits, `[N, 1, 32, 32]` float32 in [-1, 1], and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    # A border of one pixel: the strokes touch the edge of the 8x8 originals.
    images = F.interpolate(F.pad(images, (1, 1, 1, 1), value=-1.0), size=(32, 32), mode="bicubic")
    return images.clamp(-1, 1), digits.target.tolist()


def train_autoencoder(images: Tensor, *, steps: int = 700, batch_size: int = 32) -> AutoEncoder:
    """Return an autoencoder whose decoder forgives small errors in a latent."""
    model = AutoEncoder()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps, pct_start=0.1)
    for _ in tqdm(range(steps), desc="autoencoder"):
        batch = images[torch.randint(len(images), (batch_size,))]
        latent = model.encoder(batch)
        # Noise on the latent: a sampled latent is never exactly an encoded one.
        decoded = model.decoder(latent + 0.1 * torch.randn_like(latent))
        loss = F.mse_loss(decoded, batch) + 1e-3 * latent.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def embed_prompt(prompt: str) -> tuple[Tensor, Tensor]:
    """Return token states `[1, words, dim]` and a pooled state `[1, dim]`: a stand-in for a frozen text encoder."""
    rows = []
    for word in prompt.split():
        generator = torch.Generator().manual_seed(int.from_bytes(word.encode(), "little") % 2**31)
        rows.append(torch.randn(TEXT_DIM, generator=generator))
    states = torch.stack(rows)[None]
    return states.bfloat16(), states.mean(dim=1)


@torch.no_grad()
def write_cache(model: AutoEncoder, images: Tensor, labels: list[int], out: Path) -> list[str]:
    """Write one sample per image and return the paths of the shards."""
    urls: list[str] = []
    options = {"maxcount": 300, "encoder": tc.encoder(), "mtime": 0, "post": urls.append, "verbose": 0}
    with wds.ShardWriter(str(out / "digits-%03d.tar"), **options) as sink:
        for i, label in enumerate(tqdm(labels, desc="write shards")):
            prompt = f"a handwritten digit {DIGITS[label]}"
            text, pooled = embed_prompt(prompt)
            nested = {
                "latent": {"samples": model.encoder(images[i : i + 1]).half()},
                "cond": [[text, {"pooled_output": pooled, "prompt": prompt, "size": (32, 32)}]],
            }
            sink.write({"__key__": f"{i:06d}", "tensorcache": nested, "json": {"label": label, "image": i}})
    return urls


def collate(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return latents, text states and pooled states; here the lazy tensors are read, straight by `torch.cat`."""
    nested = [sample["tensorcache"] for sample in samples]
    latent = torch.cat([x["latent"]["samples"] for x in nested])
    text = torch.cat([x["cond"][0][0] for x in nested])
    pooled = torch.cat([x["cond"][0][1]["pooled_output"] for x in nested])
    return latent.float(), text.float(), pooled.float()


def train_flow(urls: list[str], *, epochs: int = 18, batch_size: int = 64, draws: int = 4) -> tuple[Flow, Tensor]:
    """Train on the shards alone; return the model and the latents' `[mean, std]`."""
    # Only latents are looked at in this pass: no tensor is ever made of the text states' bytes.
    stage = wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), tc.decode())
    latents = torch.cat([sample["tensorcache"]["latent"]["samples"] for sample in stage]).float()
    mean, std = latents.mean(), latents.std()

    model = Flow()
    steps = epochs * math.ceil(len(latents) / batch_size)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    with tqdm(total=steps, desc="flow model") as progress:
        for epoch in range(epochs):
            dataset = wds.DataPipeline(
                wds.SimpleShardList(urls, seed=epoch),
                wds.tarfile_to_samples(),
                tc.decode(),
                wds.shuffle(1000, initial=1000, seed=epoch),
                wds.batched(batch_size, collation_fn=collate),
            )
            for batch in dataset:
                # Several times and noises per sample: for so small a model, reading would cost more than training.
                latent, text, pooled = (x.repeat_interleave(draws, dim=0) for x in batch)
                target = (latent - mean) / std
                noise = torch.randn_like(target)
                t = torch.sigmoid(torch.randn(len(target)))
                mix = t[:, None, None, None]
                keep = (torch.rand(len(target)) > 0.1).float()  # for guidance, a tenth learns without its prompt
                noisy = mix * target + (1 - mix) * noise
                velocity = model(noisy, t, text * keep[:, None, None], pooled * keep[:, None])
                loss = F.mse_loss(velocity, target - noise)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                progress.update()
                progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.eval(), torch.stack([mean, std])


@torch.no_grad()
def sample_flow(model: Flow, text: Tensor, pooled: Tensor, *, steps: int = 40, guidance: float = 1.5) -> Tensor:
    """Return normalised latents, one per row of `text`: Euler steps with classifier-free guidance."""
    latent = torch.randn(len(text), *LATENT)
    for step in range(steps):
        t = torch.full((len(text),), step / steps)
        free = model(latent, t, torch.zeros_like(text), torch.zeros_like(pooled))
        latent = latent + (free + guidance * (model(latent, t, text, pooled) - free)) / steps
    return latent


@torch.no_grad()
def draw_samples(flow: Flow, scale: Tensor, decoder: nn.Module, urls: list[str], out: Path) -> None:
    """Draw ten classes: a real image, its reconstruction from the cached latent, and eight samples."""
    images, labels = load_images()
    shown: dict[int, dict[str, Any]] = {}
    for sample in wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), tc.decode()):
        shown.setdefault(sample["json"]["label"], sample)
    rows = [shown[label] for label in range(10)]
    latent, *condition = collate(rows)
    repeats = 40
    sampled = sample_flow(flow, *(states.repeat_interleave(repeats, dim=0) for states in condition))
    sampled = decoder(sampled * scale[1] + scale[0]).clamp(-1, 1)

    reader = KNeighborsClassifier(1).fit(images.flatten(1), labels)
    wanted = torch.arange(10).repeat_interleave(repeats).numpy()
    agreement = (reader.predict(sampled.flatten(1)) == wanted).mean()
    print(f"{agreement:.0%} of {len(wanted)} samples have a real digit of their prompt's class as nearest neighbour")

    cell, gap, left, top = 64, 6, 220, 40
    real = images[[row["json"]["image"] for row in rows]]
    columns = [real, decoder(latent), *sampled.view(10, repeats, 1, 32, 32)[:, :8].unbind(1)]
    page = Image.new("L", (left + len(columns) * (cell + gap) + 2 * gap, top + 10 * (cell + gap)), 255)
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(15)
    lefts = [left + i * (cell + gap) + (2 * gap if i >= 2 else 0) for i in range(len(columns))]
    for i, title in ((0, "real"), (1, "decoded"), (2, "sampled from the prompt on the left")):
        pen.text((lefts[i], 12), title, fill=0, font=font)
    for row, sample in enumerate(rows):
        y = top + row * (cell + gap)
        pen.text((gap, y + 22), sample["tensorcache"]["cond"][0][1]["prompt"], fill=0, font=font)
        for x, column in zip(lefts, columns, strict=True):
            pixels = ((column[row, 0].clamp(-1, 1) + 1) * 127.5).byte().numpy()
            page.paste(Image.fromarray(pixels).resize((cell, cell), Image.Resampling.BICUBIC), (x, y))
    page.save(out / "digits.png")


def load_pth(key: str, payload: bytes) -> object:
    """Handler for `wds.decode`: `.pth` without running pickles."""
    return torch.load(io.BytesIO(payload), weights_only=True) if key.endswith(".pth") else None


def iter_tensors(nested: Any) -> Iterator[Tensor]:
    """Yield the tensors of dicts and lists in order, lazy ones as they are."""
    if isinstance(nested, Tensor | tc.LazyTensor):
        yield nested
    elif isinstance(nested, dict | list):
        for child in nested.values() if isinstance(nested, dict) else nested:
            yield from iter_tensors(child)


def touch(nested: Any) -> int:
    """Read one element of every 4 KiB page of every tensor; return how many."""
    return sum(len(torch.flatten(x)[:: 4096 // x.dtype.itemsize].clone()) for x in iter_tensors(nested))


def make_realistic_samples(count: int) -> list[Any]:
    """Return samples of the size that image trainers cache: 450 KB each."""
    samples = []
    for i in range(count):
        latent, text = torch.randn(1, 4, 128, 128).half(), torch.randn(1, 77, 2048).bfloat16()
        attributes = {"pooled_output": torch.randn(1, 1280).half(), "prompt": f"photo {i}", "size": (1024, 1024)}
        samples.append({"latent": {"samples": latent}, "cond": [[text, attributes]]})
    return samples


def time_formats(title: str, samples: list[Any], *, rounds: int = 5) -> list[str]:
    """Return one line of the table per format."""
    formats: dict[str, tuple[Any, Any]] = {
        "tensorcache": (tc.encoder(), tc.decode()),
        "pyd": (True, wds.decode()),
        "pth": (True, wds.decode(load_pth)),
    }
    with tempfile.TemporaryDirectory() as folder:
        nbytes: dict[str, int] = {}
        pipelines: dict[tuple[str, str], Iterable[Any]] = {}
        for name, (encoder, decode) in formats.items():
            url = f"{folder}/{name}.tar"
            with wds.TarWriter(url, encoder=encoder, mtime=0) as sink:
                for i, nested in enumerate(samples):
                    sink.write({"__key__": f"{i:06d}", name: nested})
            nbytes[name] = Path(url).stat().st_size
            members = [wds.SimpleShardList([url]), wds.tarfile_to_samples()]
            pipelines[name, "members"] = wds.DataPipeline(*members)
            pipelines[name, "open"] = wds.DataPipeline(*members, decode)
            touch_sample = wds.map(lambda sample, name=name: touch(sample[name]))
            pipelines[name, "touch"] = wds.DataPipeline(*members, decode, touch_sample)
            for nested, sample in zip(samples, pipelines[name, "open"], strict=True):
                pairs = zip(iter_tensors(nested), iter_tensors(tc.realize(sample[name])), strict=True)
                if not all(torch.equal(a, b) for a, b in pairs):
                    raise RuntimeError(f"{url}: sample {sample['__key__']!r} was not read as it was written")

        timings: dict[tuple[str, str], list[float]] = {task: [] for task in pipelines}
        # Interleaved, so that whatever else the machine does falls on every format alike.
        for _ in tqdm(range(rounds), desc=f"time {title}"):
            for task, pipeline in pipelines.items():
                begin = time.perf_counter()
                deque(pipeline, maxlen=0)
                timings[task].append((time.perf_counter() - begin) / len(samples) * 1e6)
    tensor_nbytes = statistics.mean(sum(x.nbytes for x in iter_tensors(nested)) for nested in samples)
    lines = []
    for name in formats:
        members, opened, touched = (statistics.median(timings[name, task]) for task in ("members", "open", "touch"))
        line = f"{title}, {tensor_nbytes / 1e3:.1f} KB".ljust(24) + f"{name:<13}{nbytes[name] / 1e6:>9.2f}"
        lines.append(line + f"{members:>10.0f}{opened:>10.0f}{touched:>10.0f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for shards, weights and picture")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    # Physical cores only: beyond them OpenMP's threads spin, and lose tenfold to any other busy process.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))

    images, labels = load_images()
    autoencoder = train_autoencoder(images)
    torch.save(autoencoder.decoder.state_dict(), out / "decoder.pth")
    urls = write_cache(autoencoder, images, labels, out)

    flow, scale = train_flow(urls)
    decoder = AutoEncoder().decoder
    decoder.load_state_dict(torch.load(out / "decoder.pth", weights_only=True))
    draw_samples(flow, scale, decoder, urls, out)
    print(f"drew {out / 'digits.png'}\n")

    stage = wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), tc.decode())
    digits = [tc.realize(sample["tensorcache"]) for sample in stage][:300]
    lines = time_formats("digits", digits) + time_formats("realistic", make_realistic_samples(200))
    print("\nMicroseconds per sample, warm page cache. members: the tar alone, each format's floor; open: decoded;")
    print("touch: every page of every tensor read, too. Only tensorcache opens a sample without making its tensors.\n")
    print(f"{'samples':<24}{'format':<13}{'shard MB':>9}{'members':>10}{'open':>10}{'touch':>10}", *lines, sep="\n")


if __name__ == "__main__":
    main()
