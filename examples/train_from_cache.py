"""Train a text-conditional flow model from cached latents, end to end, in a few minutes on two CPU cores.

    python examples/train_from_cache.py [--out demo_out] [--quick]

1. A small autoencoder turns the 1,797 handwritten digits of scikit-learn into latents of 4x6x6.
2. Latents and text conditioning, nested as diffusion trainers nest them, are written to WebDataset shards.
3. A rectified flow model is trained from those shards alone, through a DALI pipeline that mirrors and crops the latents at
   random, then sampled and decoded: `digits.png`.
4. The same samples, stored as this project's members, as `.pyd` and as `.pth`, are opened and timed.

Needs: wds_tensorcache, torch, numpy, webdataset, scikit-learn, tqdm, pillow; DALI if it is installed.
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
from flow import LATENT, TEXT_DIM, AutoEncoder, Flow
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from tqdm import tqdm

import wds_tensorcache as tc

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MARGIN = 8  # pixels around an image for random crops: latents of 6x6 are cached, 4x4 used
CACHED = (LATENT[0], 6, 6)
CENTER = (0.0, 0.5, 0.5)  # not mirrored, from the center


def load_images() -> tuple[Tensor, list[int]]:
    """Return the digits, `[N, 1, 32, 32]` float32 in [-1, 1], and their labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    # A border of one pixel: the strokes touch the edge of the 8x8 originals.
    images = F.interpolate(F.pad(images, (1, 1, 1, 1), value=-1.0), size=(32, 32), mode="bicubic")
    return images.clamp(-1, 1), digits.target.tolist()


def train_autoencoder(images: Tensor, *, steps: int, batch_size: int = 32) -> AutoEncoder:
    """Return an autoencoder whose decoder forgives small errors in a latent."""
    model, padded = AutoEncoder(), F.pad(images, [MARGIN] * 4, value=-1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps, pct_start=0.1)
    for _ in tqdm(range(steps), desc="autoencoder"):
        batch = padded[torch.randint(len(images), (batch_size,))]
        y, x = torch.randint(3, (2,)).tolist()  # as latents will be cropped
        latent = model.encoder(batch)[..., y : y + 4, x : x + 4]
        batch = batch[..., 8 * y : 8 * y + 32, 8 * x : 8 * x + 32]
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
    padded = F.pad(images, [MARGIN] * 4, value=-1.0)
    options = {"maxcount": 300, "encoder": tc.encoder(), "mtime": 0, "post": urls.append, "verbose": 0}
    with wds.ShardWriter(str(out / "digits-%03d.tar"), **options) as sink:
        for i, label in enumerate(tqdm(labels, desc="write shards")):
            prompt = f"a handwritten digit {DIGITS[label]}"
            text, pooled = embed_prompt(prompt)
            nested = {
                "latent": {"samples": model.encoder(padded[i : i + 1]).half()},
                "cond": [[text, {"pooled_output": pooled, "prompt": prompt, "size": (32, 32)}]],
            }
            sink.write({"__key__": f"{i:06d}", "tensorcache": nested, "json": {"label": label, "image": i}})
    return urls


def batches(urls: list[str], epochs: int, batch_size: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield latents `[B, 4, 4, 4]`, text states, pooled states, and how the latents were cut: `[B, 3]`, as in `CENTER`.

    A DALI pipeline mirrors and cuts them at random, on a GPU if there is one.
    """
    try:
        from nvidia.dali import fn, pipeline_def, types

        import dali_plugin
    except ImportError as exc:
        print(f"no DALI ({exc}): training on latents that are all cropped at the center")
        yield from plain_batches(urls, epochs, batch_size)
        return
    names = ["latent.samples", "cond.0.0", "cond.0.1.pooled_output"]
    on_gpu = torch.cuda.is_available()

    @pipeline_def(batch_size=batch_size, num_threads=1, device_id=0 if on_gpu else None, seed=0)
    def augmented() -> tuple[Any, ...]:
        latent, text, pooled, number = dali_plugin.fn.tensorcache(
            urls, names, shuffle=True, device="gpu" if on_gpu else "cpu"
        )
        mirrored = fn.random.coin_flip(probability=0.1)
        y, x = (fn.random.uniform(values=[0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0]) for _ in range(2))
        latent = fn.reshape(fn.cast(latent, dtype=types.FLOAT), shape=CACHED, layout="CHW")
        latent = fn.crop(fn.flip(latent, horizontal=mirrored), crop=LATENT[1:], crop_pos_y=y, crop_pos_x=x)
        crop = fn.stack(fn.cast(mirrored, dtype=types.FLOAT), y, x)
        return latent, text, pooled, crop, number

    iterator = dali_plugin.TensorCacheIterator(augmented(), outputs=[*names, "crop", "number"])
    for _ in range(epochs):
        for batch, beside in iterator:  # nested as it was written, the latents mirrored and cut, the text in bf16
            yield *tensors_of(batch), beside["crop"].float()


def plain_batches(urls: list[str], epochs: int, batch_size: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same values without augmentation."""
    with tc.open(urls) as cache:
        for epoch in range(epochs):
            numbers = tc.EpochOrder(len(cache), shuffle=True)(epoch, range(len(cache)))
            for begin in range(0, len(cache), batch_size):
                tensors = tensors_of(cache.read_batch(numbers[begin : begin + batch_size]))
                yield *tensors, torch.tensor(CENTER).expand(len(tensors[0]), -1)


def tensors_of(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return latents, text states and pooled states of a nested batch."""
    text, attributes = batch["cond"][0]
    latent = batch["latent"]["samples"].flatten(0, -4).float()
    if latent.shape[1:] == CACHED:
        latent = latent[..., 1:-1, 1:-1]
    return latent, text.flatten(0, 1).float(), attributes["pooled_output"].flatten(0, 1).float()


def train_flow(urls: list[str], *, epochs: int, batch_size: int = 64, draws: int = 4) -> tuple[Flow, Tensor]:
    """Train on the shards alone; return the model and the latents' `[mean, std]`."""
    with tc.open(urls) as cache:
        count = len(cache)
        latents = cache.read_tensors(range(count))["latent.samples"].float()
        scale = torch.stack([latents.mean(), latents.std()])

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Flow().to(device)
    mean, std = scale.to(device)
    steps = epochs * math.ceil(count / batch_size)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    progress = tqdm(batches(urls, epochs, batch_size), total=steps, desc="flow model")
    for batch in progress:
        # Several times and noises per sample: for so small a model, reading would cost more than training.
        latent, text, pooled, crop = (x.to(device).repeat_interleave(draws, dim=0) for x in batch)
        target = (latent - mean) / std
        noise = torch.randn_like(target)
        t = torch.sigmoid(torch.randn(len(target), device=device))
        mix = t[:, None, None, None]
        keep = (torch.rand(len(target), device=device) > 0.1).float()  # for guidance, a tenth learns without its prompt
        noisy = mix * target + (1 - mix) * noise
        velocity = model(noisy, t, text * keep[:, None, None], pooled * keep[:, None], crop)
        loss = F.mse_loss(velocity, target - noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.eval().cpu(), scale


@torch.no_grad()
def sample_flow(model: Flow, text: Tensor, pooled: Tensor, *, steps: int = 40, guidance: float = 1.5) -> Tensor:
    """Return normalized latents, one per row of `text`: Euler steps with classifier-free guidance."""
    latent, crop = torch.randn(len(text), *LATENT), torch.tensor(CENTER).expand(len(text), -1)
    for step in range(steps):
        t = torch.full((len(text),), step / steps)
        free = model(latent, t, torch.zeros_like(text), torch.zeros_like(pooled), crop)
        latent = latent + (free + guidance * (model(latent, t, text, pooled, crop) - free)) / steps
    return latent


@torch.no_grad()
def draw_samples(flow: Flow, scale: Tensor, decoder: nn.Module, urls: list[str], out: Path) -> None:
    """Draw ten classes: a real image, its reconstruction from the cached latent, and eight samples."""
    images, labels = load_images()
    shown: dict[int, dict[str, Any]] = {}
    for sample in wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), tc.decode()):
        shown.setdefault(sample["json"]["label"], sample)
    rows = [shown[label] for label in range(10)]
    with tc.open(urls) as cache:
        latent, *condition = tensors_of(cache.read_batch([row["__key__"] for row in rows]))
    repeats = 40
    sampled = sample_flow(flow, *(states.repeat_interleave(repeats, dim=0) for states in condition))
    sampled = decoder(sampled * scale[1] + scale[0]).clamp(-1, 1)

    reader = KNeighborsClassifier(1).fit(images.flatten(1), labels)
    wanted = torch.arange(10).repeat_interleave(repeats).numpy()
    agreement = (reader.predict(sampled.flatten(1)) == wanted).mean()
    print(f"{agreement:.0%} of {len(wanted)} samples have a real digit of their prompt's class as nearest neighbor")

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


def time_formats(title: str, samples: list[Any], *, rounds: int) -> list[str]:
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
        # Interleaved, so that other load on the machine affects all formats equally.
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
    parser.add_argument("--quick", action="store_true", help="a twelfth of the training, and one round: does it run")
    options = parser.parse_args()
    out, part = options.out, 12 if options.quick else 1
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    # Physical cores only: with more threads, OpenMP spins and becomes ten times slower next to a busy process.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))

    images, labels = load_images()
    autoencoder = train_autoencoder(images, steps=900 // part)
    torch.save(autoencoder.decoder.state_dict(), out / "decoder.pth")
    urls = write_cache(autoencoder, images, labels, out)

    flow, scale = train_flow(urls, epochs=24 // part)
    decoder = AutoEncoder().decoder
    decoder.load_state_dict(torch.load(out / "decoder.pth", weights_only=True))
    draw_samples(flow, scale, decoder, urls, out)
    print(f"picture: {out / 'digits.png'}\n")

    stage = wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), tc.decode())
    digits = [tc.realize(sample["tensorcache"]) for sample in stage][:300]
    rounds = 1 if options.quick else 5
    lines = time_formats("digits", digits, rounds=rounds)
    lines += time_formats("realistic", make_realistic_samples(200), rounds=rounds)
    print(
        "\nMicroseconds per sample, from the page cache, to read the members of the tar, to open the sample as well, and to"
    )
    print("touch every page of its tensors as well. Only tensorcache opens a sample without loading its tensors.\n")
    print(f"{'samples':<24}{'format':<13}{'shard MB':>9}{'members':>10}{'open':>10}{'touch':>10}", *lines, sep="\n")


if __name__ == "__main__":
    main()
