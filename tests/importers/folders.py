"""Import a folder in a test, and compare what the cache has with what was written."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import wds_tensorcache as tc
from tests.same import assert_same, tensor_bytes
from tests.shards.tars import build_with_tarfile


class Gadget:
    """An object whose pickle makes the file `hacked` in the current folder."""

    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


def write_files(folder: Path, count: int, bad: tuple[int, ...] = (), width: int = 300) -> Path:
    """Write files of four kinds, of 16 bytes times `width`; those of `bad` are cut short."""
    folder.mkdir()
    for i in range(count):
        arrays = {"latent": torch.full((4, width + i % 7), float(i)), "size": torch.tensor([i, 7])}
        path = folder / f"photo {i:04d}.{('npz', 'pt', 'safetensors', 'npy')[i % 4]}"
        if path.suffix == ".npz":
            np.savez(path, **{key: value.numpy() for key, value in arrays.items()})
        elif path.suffix == ".npy":
            np.save(path, arrays["latent"].numpy())
        elif path.suffix == ".safetensors":
            safetensors.torch.save_file(arrays, path)
        else:
            torch.save({**arrays, "text": f"é {i}", "many": [torch.ones(2)] * (i % 5)}, path)
        if i % 9 == 0:
            path.with_suffix(".txt").write_text(f"a caption {i}")
        if i in bad:
            path.write_bytes(path.read_bytes()[:700])
    return folder


def saved(value: Any, numpy: bool = False) -> bytes:
    """Return the file that `torch.save` or `numpy.save` writes."""
    out = io.BytesIO()
    np.save(out, value) if numpy else torch.save(value, out)
    return out.getvalue()


def save(value: Any, path: Path, metadata: dict[str, str] | None = None) -> Any:
    """Write a file of torch or, by its suffix, of safetensors; return the value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(value, path, metadata)
    else:
        torch.save(value, path)
    return value


def write_tar(path: Path, members: dict[str, Any]) -> None:
    """Write a tar of members, which are bytes, or arrays for `numpy.save`."""
    path.parent.mkdir(exist_ok=True)
    contents = [(name, raw if isinstance(raw, bytes) else saved(raw, numpy=True)) for name, raw in members.items()]
    path.write_bytes(build_with_tarfile(contents))


def imported(source: Path, out: Path, **options: Any) -> tuple[dict[str, Any], Any]:
    """Return the imported samples by their original names, and the report; the cache is intact."""
    report = tc.import_cache(source, out, **options)
    assert tc.verify(out).ok
    assert report.num_read == report.num_written + report.num_present + report.num_skipped
    with tc.open(out) as cache:
        return {tc.original_name(key): tc.realize(cache[key]) for key in list(cache.keys())}, report


def format_of(source: Path) -> str:
    """Return the format that an import chooses."""
    return tc.import_cache(source, f"{source} {len(list(source.parent.iterdir()))}", on_error="skip").format


def assert_samples(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Assert that samples are equal, but for the order of their entries: safetensors orders tensors by their dtypes."""
    assert found.keys() == expected.keys()
    for name, sample in expected.items():
        assert_same(_ordered(sample), _ordered(found[name]))


def assert_left_out(source: Path, bad: str, message: str, good: Iterable[str], **options: Any) -> None:
    """Assert that a file or sample stops the import, which names it, and can be left out."""
    out = f"{source} {len(list(source.parent.iterdir()))}"
    with pytest.raises(tc.FormatError, match=message) as caught:
        tc.import_cache(source, f"{out} stopped", **options)
    assert bad in str(caught.value)
    assert len(str(caught.value)) < 2000
    found, report = imported(source, Path(f"{out} skipped"), on_error="skip", **options)
    assert sorted(found) == sorted(good)
    assert not report.ok
    assert any(bad in (skipped.name, *skipped.files) for skipped in report.skipped)


def assert_complete(arrays: Iterable[Any], samples: Iterable[Any], copies: bool = False) -> None:
    """Assert that the samples have exactly these arrays, bit for bit, and no other; `copies`: some more than once."""
    expected = Counter(map(_identity, arrays))
    found = Counter(map(_identity, leaves(list(samples))))
    assert expected.keys() == found.keys()
    if not copies:
        assert expected == found


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value)}
    return list(map(_ordered, value)) if isinstance(value, list) else value


def _identity(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return str(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor)


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
