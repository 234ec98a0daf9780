"""The tree is the architecture: imports in one direction, a light start, and one home for each thing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

import wds_tensorcache as tc

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for top in ("wds_tensorcache", "dali_plugin", "examples", "benchmarks") for path in (ROOT / top).rglob("*.py")
)


def test_public_names() -> None:
    assert tc.__all__ == sorted(tc.__all__)
    for name in tc.__all__:
        assert getattr(tc, name).__doc__, name
    modules = {name for name, value in vars(tc).items() if type(value) is type(sys)}
    assert {name for name in vars(tc) if not name.startswith("_")} - modules == set(tc.__all__) <= set(dir(tc))
    assert not hasattr(tc, "no_such_name")


def test_type_checkers_see_the_public_names() -> None:
    stub = ast.parse((ROOT / "wds_tensorcache" / "__init__.pyi").read_text())
    typed = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed.pop("ray") == "wds_tensorcache"
    assert typed == {name: f"wds_tensorcache.{module}" for name, module in tc._MODULES.items()}
    (names,) = (node.value for node in stub.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(names) == tc.__all__


def test_imports_are_light(tmp_path: Path) -> None:
    """In one process, step by step: what is not loaded after a step was not loaded before it."""
    with tc.ShardWriter(tmp_path / "cache" / "%06d.tar") as sink:
        sink.write("a", {"x": torch.ones(3), "y": 1})
    script = """
import sys
steps = []

import wds_tensorcache, wds_tensorcache.cli.app
steps.append(list(sys.modules))

# as a spawned worker of a loader, which gets its dataset as a pickle: it imports no public name
from wds_tensorcache.codec.sample import decode_sample, encode_sample
import torch.utils.data
sample = decode_sample(*encode_sample({"x": torch.ones(2)}))
assert torch.utils.data.default_collate([sample, sample])["x"].sum() == 4

cache = wds_tensorcache.open(sys.argv[1])
steps.append(list(sys.modules))
cache[0]["x"].load(), cache.read_batch([0])["y"][0]
steps.append(list(sys.modules))

from wds_tensorcache import *
steps.append(list(sys.modules))
for step in steps:
    print(*step)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    modules = [line.split() for line in output.splitlines()]
    light, _, read, whole = ({name.partition(".")[0] for name in names} for names in modules)
    assert not light & {"torch", "safetensors", "webdataset"}
    _, opened, ours, _ = ([name for name in names if name.startswith("wds_tensorcache")] for names in modules)
    assert len([name for name in opened if not name.startswith("wds_tensorcache.cli")]) <= 45, opened
    assert not [name for name in ours if "remote" in name or "node_cache" in name]
    assert not read & {"urllib3", "obstore", "fsspec", "huggingface_hub"}
    assert not whole & {"nvidia", "ray", "fsspec", "boto3", "matplotlib", "PIL", "dali_plugin"}


def test_other_threads_import_nothing(tmp_path: Path) -> None:
    """A child that is forked while another thread imports a module waits forever when it imports that module, too."""
    with tc.ShardWriter(tmp_path) as sink:
        sink.write("a", {"x": torch.ones(3)})
    script = """
import os, sys, numpy, torch
import wds_tensorcache as tc
for before, after in (
    ("tc.encode_sample({'x': torch.ones(2)})", "tc.encode_sample({'x': numpy.ones(2)})"),
    ("loader = tc.Loader(tc.open(sys.argv[1]), 1)", "next(iter(loader))"),
):
    if not (child := os.fork()):  # each in a process that has imported nothing else
        exec(before)
        loaded = set(sys.modules)
        exec(after)
        print(*sorted(set(sys.modules) - loaded), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout == "\n\n"


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_files_say_what_they_are() -> None:
    assert not [path for path in SOURCES if not ast.get_docstring(_tree(path))]


def test_no_import_circles() -> None:
    """Nor any of imports inside of functions, or of types alone."""
    names = {_module_of(path): path for path in SOURCES}
    left = {name: _imports(path, names) - {name} for name, path in names.items()}
    # remove modules that import none of the remaining ones: only circles, and modules that lead to them, stay
    while free := {name for name, imported in left.items() if not imported & left.keys()}:
        for name in free:
            del left[name]
    assert not left


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, names: dict[str, Path]) -> set[str]:
    """Return the modules of `names` that a file imports, the file's own names for them aside."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            # from a package: a module in it, or one of its names
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in names else str(node.module) for name in whole}
    return found & names.keys()


def test_import_contracts() -> None:
    subprocess.run([Path(sys.executable).with_name("lint-imports")], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("wds_tensorcache", "dali_plugin")]


def _nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a module but docstrings; comments are not among them."""
    nodes = list(ast.walk(_tree(path)))
    texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [node for node in nodes if id(node) not in texts]


def _names(*names: str) -> Callable[[ast.AST], bool]:
    """Return whether a node names one of these: a variable, an attribute, or an import."""

    def is_found(node: ast.AST) -> bool:
        found = getattr(node, "id", None), getattr(node, "attr", None)
        imported = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        return bool({*found, *imported} & {*names})

    return is_found


def _calls_os(*names: str) -> Callable[[ast.AST], bool]:
    return lambda node: (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in names
    )


def _has_text(*texts: str) -> Callable[[ast.AST], bool]:
    """Return whether a node is a string or bytes that contains one of these."""
    raws = [text.encode() for text in texts]

    def is_found(node: ast.AST) -> bool:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str):
            return any(text in value for text in texts)
        return isinstance(value, bytes) and any(raw in value for raw in raws)

    return is_found


HOMES: dict[str, tuple[Callable[[ast.AST], bool], set[str]]] = {
    "renaming files": (_calls_os("replace", "rename", "renames"), {"storage.atomic"}),
    "locks": (_names("flock", "lockf"), {"storage.locks", "sharing.reaper"}),
    "calls of fcntl": (_names("fcntl"), {"storage.locks", "sharing.reaper"}),
    "the path of DALI's index": (lambda node: getattr(node, "value", None) == ".idx", {"shards.names"}),
    "versions of DALI's index": (_has_text("v1.1", "v1.2"), {"shards.dali_index"}),
    "the path of a sidecar": (lambda node: getattr(node, "value", None) == ".index", {"shards.names"}),
    "the name of the manifest": (
        lambda node: getattr(node, "value", None) == "manifest.json",
        # in the second, it is the name of another program's file
        {"shards.manifest", "importers.trainers.nemo_hidden_states"},
    ),
    "the keys of the manifest": (_has_text("nsamples", "filesize", "shardlist"), {"shards.manifest"}),
    "names of the two members": (
        lambda node: getattr(node, "value", None) in ("skel.pyd", "safetensors"),
        # in all but the first, it is the name of a file format
        {
            "shards.names",
            "cli.looking.cat",
            "integrations.exporting",
            "importers.generic.file_folder",
        },
    ),
    "the magic of a footer": (lambda node: getattr(node, "value", None) == b"tcindex1", {"shards.footer"}),
}


def test_one_home() -> None:
    names: dict[str, set[str]] = {home: set() for home in HOMES}
    for path in PRODUCT:
        nodes = _nodes(path)
        for home, (is_found, _) in HOMES.items():
            if any(map(is_found, nodes)):
                names[home].add(_module_of(path).partition(".")[2])
    assert names == {home: homes for home, (_, homes) in HOMES.items()}
