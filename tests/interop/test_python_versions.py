"""Every Python 3.10+ on this machine: stock pickle opens our skeletons, and this package makes the same bytes.

Interpreters are searched on PATH and in pyenv. WDS_TENSORCACHE_PYTHONS, a list like PATH, adds more, for example virtual
environments with the package's dependencies.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wds_tensorcache as tc
from tests.interop import other_python
from tests.interop.other_python import describe, plain_sample, tensor_samples

pytestmark = pytest.mark.long

CHECKOUT = Path(__file__).parents[2]
NEEDED = ("torch", "numpy", "safetensors", "webdataset", "xxhash")
LOOK = f"""
import json, sys
from importlib.util import find_spec
print(json.dumps([sys.version_info[:2], sys.prefix, all(find_spec(name) for name in {NEEDED})]))
"""
every_version = pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])


@functools.cache
def interpreters() -> list[tuple[str, str, bool]]:
    """Return (path, version, whether it has the package's dependencies) for each interpreter, including this one."""
    named = [sys.executable, *filter(None, os.environ.get("WDS_TENSORCACHE_PYTHONS", "").split(os.pathsep))]
    on_path = [shutil.which(f"python3.{minor}") for minor in range(10, 20)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = {}
    for path in [*named, *filter(None, on_path), *map(str, sorted(pyenv.glob("versions/*/bin/python3")))]:
        look = subprocess.run([path, "-c", LOOK], capture_output=True, text=True, check=False)
        if look.returncode == 0:
            (major, minor), prefix, complete = json.loads(look.stdout)
            found.setdefault(prefix, (path, f"{major}.{minor}", complete))
        else:  # a shim of a version that pyenv does not select, or a Python 2
            assert path not in named, f"{path} does not run: {look.stderr}"
    return list(found.values())


def run_elsewhere(path: str, what: str, folder: Path) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "17"}
    if what == "stock":
        del environment["PYTHONPATH"]
    command = [path, other_python.__file__, what, str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{path}: {done.stderr}"
    return json.loads(done.stdout)


def write_members(samples: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    """Write each sample's members, and return them in hexadecimal."""
    members = {name: tc.encode_sample(sample) for name, sample in samples.items()}
    for name, (skeleton, tensors) in members.items():
        (folder / f"{name}.skel.pyd").write_bytes(skeleton)
        (folder / f"{name}.safetensors").write_bytes(tensors)
    return {name: [member.hex() for member in pair] for name, pair in members.items()}


@every_version
def test_stock_pickle_opens_skeletons(version: str, tmp_path: Path) -> None:
    paths = [path for path, found, _ in interpreters() if found == version]
    if not paths:
        pytest.skip(f"no Python {version}: pyenv install {version}, or name one in WDS_TENSORCACHE_PYTHONS")
    write_members({"plain": plain_sample()}, tmp_path)
    for path in paths:
        assert run_elsewhere(path, "stock", tmp_path) == {"plain": [describe(plain_sample())] * 2}, path


@every_version
def test_package_makes_and_reads_the_same_bytes(version: str, tmp_path: Path) -> None:
    paths = [path for path, found, complete in interpreters() if found == version and complete]
    if not paths:
        packages = " ".join(NEEDED)
        pytest.skip(f"no Python {version} with {packages}: pip install them, name it in WDS_TENSORCACHE_PYTHONS")
    members = write_members(tensor_samples(), tmp_path)
    for path in paths:
        result = run_elsewhere(path, "package", tmp_path)
        assert result["made"] == members, path
        assert result["read"] == {name: describe(sample) for name, sample in tensor_samples().items()}, path
