"""`mypy --strict` on a user's script: every call has its type, and no `Any` but for what a sample has."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).with_name("script.py")

# what each gives is part of a sample, or made of samples
OF_SAMPLES = ["cache[0]", "cache.read_batch([0])", "cache.read_tensors([0])", "next(iter(loader))", "joined[0]"]
TYPED = [
    "cache",
    "cache[1:]",
    "cache.keys()",
    "cache.keys()[0]",
    "cache.schema['x']",
    "cache.schema['x'].shape",
    "cache.schema['x'].nbytes",
    "cache.members",
    "cache.fingerprint",
    "cache.num_shards",
    "cache.read_members([0], 'jpg')",
    "cache.read_batch_with_info([0])[1]",
    "info.indices",
    "info.keys",
    "info.shapes",
    "info.is_padding",
    "info.source",
    "info.step",
    "joined",
    "joined.schema",
    "joined.fingerprint",
    "loader",
    "len(loader)",
    "loader.epoch",
    "tc.pad(to=4)",
    "tc.torch_loader(cache, 4)",
    "tc.build([1], list, 'x', fingerprint={})",
    "tc.drop('a', 'b', ['k'])",
    "tc.verify('a')",
    "tc.verify('a').faults",
    "tc.verify('a').faults[0].kind",
    "tc.repair('a', 'b')",
    "tc.decode()",
    "tc.tarfile_to_samples()",
    "tc.write_index('a.tar')",
    "dali_plugin.TensorCacheSource(cache, batch_size=4)",
    "dali_plugin.TensorCacheSource(cache, batch_size=4).tensors",
]
REVEAL = """
import dali_plugin
import wds_tensorcache as tc

cache = tc.open("cache")
joined = tc.join([cache])
loader = tc.Loader(cache, 4)
_, info = next(iter(loader.with_info()))
"""


WRONG = [
    "cache.reed_batch([0])",
    "info.indizes",
    "cache.keys()[0] + 1",
    "tc.open(3)",
    "tc.join(cache, how='outer')",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Run mypy once on all scripts, as the project does and with its cache; return the lines about each."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("typed")
    reveal = [f"reveal_type({expression})" for expression in OF_SAMPLES + TYPED]
    paths = [SCRIPT]
    for name, lines in (("right", []), ("wrong", WRONG), ("reveal", reveal)):
        paths.append(folder / f"{name}.py")
        paths[-1].write_text(REVEAL + "\n".join(lines))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr  # of "wrong"
    said: dict[str, list[str]] = {path.name: [] for path in paths}
    for line in done.stdout.splitlines():
        said[Path(line.partition(":")[0]).name].append(line)
    return said


def test_a_script_is_typed(found: dict[str, list[str]]) -> None:
    assert found[SCRIPT.name] == []
    assert found["right.py"] == []


def test_a_wrong_script_is_refused(found: dict[str, list[str]]) -> None:
    assert sum("error: " in line for line in found["wrong.py"]) >= len(WRONG)


def test_nothing_is_any_but_samples(found: dict[str, list[str]]) -> None:
    expressions = OF_SAMPLES + TYPED
    notes = [line for line in found["reveal.py"] if "Revealed type is" in line]
    assert len(notes) == len(expressions)
    for expression, note in zip(expressions, notes, strict=True):
        # a sample's type is a parameter of the cache's
        revealed = note.partition("Revealed type is ")[2].replace("Cache[Any]", "Cache")
        assert ("Any" in revealed) == (expression in OF_SAMPLES), f"{expression}: {revealed}"


def test_the_script_runs(tmp_path: Path) -> None:
    extra = ["dali"] if importlib.util.find_spec("nvidia.dali") else []
    command = [sys.executable, "-W", "error", str(SCRIPT), str(tmp_path), *extra]
    subprocess.run(command, cwd=ROOT, check=True, env=None, timeout=300)
