"""Stock webdataset reads our shards without this package: texts in place of tensors, and the tensors' values."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.conftest import diffusion_sample
from tests.same import tensor_bytes

# None in sys.modules makes every import of the package an ImportError, also in a pickle
STOCK_READER = """
import hashlib, json, sys
sys.modules["wds_tensorcache"] = None
try:
    import wds_tensorcache
except ImportError:
    pass
else:
    sys.exit("wds_tensorcache can be imported: this proves nothing")
import safetensors.torch, torch, webdataset as wds

def digest(tensor):
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw).hexdigest()]

def read(sample):
    fields = {name: repr(value) for name, value in sample.items() if name[0] != "_" and not isinstance(value, bytes)}
    stored = {name: safetensors.torch.load(value) for name, value in sample.items() if name.endswith("safetensors")}
    digests = {name: {key: digest(tensor) for key, tensor in tensors.items()} for name, tensors in stored.items()}
    return {"key": sample["__key__"], "fields": fields, "digests": digests}

for path in sys.argv[1:]:
    print(json.dumps([read(sample) for sample in wds.WebDataset(path, shardshuffle=False).decode()]))
"""


def digest(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(tensor_bytes(tensor)).hexdigest()]


def test_stock_readers_see_structure_and_values(shard: str, write_shard: Callable[..., str], tmp_path: Path) -> None:
    array, wide = np.arange(4, dtype=">i2"), torch.tensor([1 + 2j, -3j], dtype=torch.complex128)
    image, text = torch.arange(6).view(2, 3), torch.linspace(0, 1, 5).bfloat16()
    named = {"image.tensorcache": {"x": image}, "text-2.tensorcache": [text, None], "tensorcache": image}
    paths = [
        shard,
        write_shard([{"__key__": "a/b", **named}], "named.tar"),
        write_shard([{"__key__": "a", "tensorcache": (array, wide)}], "arrays.tar"),
    ]
    command = [sys.executable, "-c", STOCK_READER, *paths]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    samples, (of_names,), (of_arrays,) = map(json.loads, done.stdout.splitlines())

    assert [sample["key"] for sample in samples] == [f"{i:03d}" for i in range(10)]
    for i, sample in enumerate(samples):
        pooled = {"pooled_output": "tensor:cond.0.1.pooled_output", "prompt": f"photo {i}", "size": (64, 48)}
        skeleton = {"latent": {"samples": "tensor:latent.samples"}, "cond": [["tensor:cond.0.0", pooled]]}
        assert sample["fields"] == {"skel.pyd": repr(skeleton), "json": repr({"label": i})}
        original = diffusion_sample(i)
        assert sample["digests"] == {
            "safetensors": {
                "latent.samples": digest(original["latent"]["samples"]),
                "cond.0.0": digest(original["cond"][0][0]),
                "cond.0.1.pooled_output": digest(original["cond"][0][1]["pooled_output"]),
            }
        }
    assert of_names == {
        "key": "a/b",
        "fields": {
            "image.skel.pyd": repr({"x": "tensor:x"}),
            "skel.pyd": repr("tensor:@0"),
            "text-2.skel.pyd": repr(["tensor:0", None]),
        },
        "digests": {
            "image.safetensors": {"x": digest(image)},
            "safetensors": {"@0": digest(image)},
            "text-2.safetensors": {"0": digest(text)},
        },
    }
    # dtypes that safetensors lacks
    assert of_arrays["fields"] == {"skel.pyd": repr(("ndarray:0", "tensor:1?dtype=complex128"))}
    assert of_arrays["digests"]["safetensors"] == {
        "0": digest(torch.arange(4, dtype=torch.int16)),
        "1": digest(torch.view_as_real(wide)),
    }
