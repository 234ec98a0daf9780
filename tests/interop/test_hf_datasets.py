"""Hugging Face `datasets` reads a shard offline: members arrive as undecoded bytes and become samples."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wds_tensorcache as tc
from tests.conftest import diffusion_sample
from tests.same import assert_same

pytestmark = pytest.mark.long

# In its own process: `datasets` reads the variables that keep it offline only once, when it is imported.
READER = """
import pickle, sys
from datasets import load_dataset
import wds_tensorcache as tc

shard, cache_dir, result = sys.argv[1:]

def decode(row):
    return {"cache": tc.decode_sample(row["skel.pyd"], row["safetensors"], lazy=False)}

def decode_batch(rows):
    return {"cache": [tc.decode_sample(*pair, lazy=False) for pair in zip(rows["skel.pyd"], rows["safetensors"])]}

def load(streaming):
    return load_dataset("webdataset", data_files=shard, split="train", streaming=streaming, cache_dir=cache_dir)

def read(dataset, decoded):
    dtypes = {name: feature.dtype for name, feature in dataset.features.items() if name != "json"}
    return {"rows": list(dataset), "dtypes": dtypes, "caches": [row["cache"] for row in decoded]}

stream, table = load(True), load(False)
kinds = {"stream": read(stream, stream.map(decode)), "table": read(table, table.with_transform(decode_batch))}
with open(result, "wb") as file:
    pickle.dump(kinds, file)
"""


def read_with_datasets(shard: str, folder: Path) -> dict[str, Any]:
    """Return rows, their declared dtypes and their decoded caches, by kind of dataset."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    environment = {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = folder / "result.pickle"
    command = [sys.executable, "-c", READER, shard, str(folder / "cache"), str(result)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return pickle.loads(result.read_bytes())  # type: ignore[no-any-return]


@pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="needs Hugging Face datasets: pip install datasets"
)
def test_rows_hold_the_members(write_shard: Callable[..., str], tmp_path: Path) -> None:
    text = [torch.arange(5), "é"]
    caches = [{"tensorcache": diffusion_sample(i), "text.tensorcache": text} for i in range(8)]
    shard = write_shard([{"__key__": f"{i:03d}", **cache, "json": {"label": i}} for i, cache in enumerate(caches)])
    for kind, result in read_with_datasets(shard, tmp_path).items():
        assert len(result["rows"]) == len(result["caches"]) == 8, kind
        for i, row in enumerate(result["rows"]):
            # json is decoded by `datasets`; pickles never are
            members: dict[str, Any] = {"__key__": f"{i:03d}", "__url__": shard, "json": {"label": i}}
            members["skel.pyd"], members["safetensors"] = tc.encode_sample(diffusion_sample(i))
            members["text.skel.pyd"], members["text.safetensors"] = tc.encode_sample(text)
            assert row == members, kind
            assert_same(diffusion_sample(i), result["caches"][i])
        assert {result["dtypes"][name] for name in row if "." in name or name == "safetensors"} == {"binary"}, kind
