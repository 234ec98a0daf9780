"""The wheel and the sdist work without the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
TOPS = ("wds_tensorcache", "dali_plugin")
_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def _build(source: Path, what: str, out: Path) -> Path:
    """Return the archive that the package's build backend makes, as `python -m build` calls it, without a network."""
    command = [sys.executable, "-c", _BUILD, f"build_{what}", str(out)]
    run = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return out / run.stdout.splitlines()[-1]


def _files(root: Path) -> set[str]:
    """Return the files of the packages in a folder, without what Python leaves there."""
    found = [path for top in TOPS for path in (root / top).rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix() for path in found if path.suffix not in (".pyc", ".pyo")}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("sdist")
    # Building writes into the source tree, so the archive is made from a copy.
    copy = folder / "copy"
    copy.mkdir()
    left_out = shutil.ignore_patterns("__pycache__", "*_out")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
        elif not re.fullmatch(r"\..*|build|dist|.*\.egg-info|.*_out", path.name):
            shutil.copytree(path, copy / path.name, ignore=left_out)
    with tarfile.open(_build(copy, "sdist", folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (root,) = (folder / "unpacked").iterdir()
    return root


@pytest.fixture(scope="module")
def installed(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel is installed that the sdist builds."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(_build(sdist, "wheel", folder)) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_the_sdist_is_the_source(sdist: Path) -> None:
    assert _files(sdist) == _files(ROOT)
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"):
        assert (sdist / name).read_bytes() == (ROOT / name).read_bytes()
    for page in [sdist / "README.md", *(sdist / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    assert not (sdist / "tests").exists()


def test_the_wheel_is_the_packages(installed: Path) -> None:
    assert _files(installed) == _files(ROOT)
    tops = {path.name for path in installed.iterdir()}
    assert tops - set(TOPS) == {name for name in tops if name.endswith(".dist-info")}
    assert {"wds_tensorcache/py.typed", "dali_plugin/py.typed", "wds_tensorcache/codec/FORMAT.md"} <= _files(installed)


def test_the_readme_runs_with_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    where = "import wds_tensorcache, dali_plugin\nprint(wds_tensorcache.__file__, dali_plugin.__file__, sep='\\n')\n"
    (tmp_path / "example.py").write_text("\n".join([*blocks, where]))
    run = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert [Path(line).parent.parent for line in run.stdout.split()] == [installed] * 2
