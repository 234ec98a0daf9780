"""The README's example runs where system calls are missing, as docs/systems.md says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Third parties are imported first: they are built for the system that runs the test. Each system is then a fork.
_SYSTEMS = """
import os, runpy, sys
import torch, torch._dynamo, webdataset, braceexpand, safetensors.torch, xxhash
for folder in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT), 2)
        runpy.run_path("example.py", run_name="__main__")
        break
    with open(os.path.join(folder, "status"), "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
_PRELUDE = """
import os, sys
sys.platform = {platform!r}
os.name = "nt" if {platform!r} == "win32" else "posix"
for name in {modules!r}:
    sys.modules[name] = None  # importing it raises ImportError
for name in {calls!r}:
    delattr(os, name)
"""
_CHECK = """
import importlib
files = importlib.import_module("wds_tensorcache.storage.files")
assert not hasattr(files.os, "posix_fadvise")
again = tc.Loader(cache, batch_size=5, shuffle=True, seed=0)
again.load_state_dict(checkpoint["loader"])
with tc.ShardWriter("cache/train-%06d.tar", max_samples=40, resume=True) as sink:
    assert "000017" in sink
    sink.write("000100", sample)
assert len(tc.open("cache")) == 101 and tc.verify("cache").ok
built = tc.build([{"x": torch.ones(3)}] * 5, list, "built", fingerprint={})
assert len(built) == 5 and built[4]["x"].sum() == 3
assert not os.listdir("cache") == [] and not [name for name in os.listdir("cache") if name.startswith(".")]
with open("cache/train-000000.tar", "r+b") as shard:
    shard.truncate(1000)
assert not tc.repair("cache", "mended").ok and tc.verify("mended").ok
try:
    cache.read_batch([0, 1])
    raise SystemExit("a shard that was cut short was read")
except tc.FormatError:
    pass
"""
_MACOS = ["posix_fadvise", "RWF_NOWAIT", "sched_getaffinity", "preadv"]
_WINDOWS = [
    *_MACOS,
    "pread",
    "writev",
    "register_at_fork",
    "sysconf",
    "O_CLOEXEC",
    "O_NONBLOCK",
    "O_NOFOLLOW",
    "O_NOCTTY",
]


SYSTEMS: dict[str, tuple[str, list[str], list[str]]] = {
    "macOS": ("darwin", [], _MACOS),
    "Windows": ("win32", ["fcntl", "resource"], _WINDOWS),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the example was run on each system."""
    folder = tmp_path_factory.mktemp("systems")
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    for name, (platform, modules, calls) in SYSTEMS.items():
        (folder / name).mkdir()
        prelude = _PRELUDE.format(platform=platform, modules=modules, calls=calls)
        (folder / name / "example.py").write_text("\n".join([prelude, *blocks, _CHECK]))
    subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", _SYSTEMS, *SYSTEMS],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=True,
    )
    return folder


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_readme_runs_on_fallbacks(ran: Path, name: str) -> None:
    assert (ran / name / "status").read_text() == "0", (ran / name / "errors").read_text()
