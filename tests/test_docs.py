"""The pages run, their links and commands exist, and they agree with each other."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import the_server
from tests.remote.servers.http_server import HttpServer
from tests.remote.servers.write_server import shared_server

ROOT = Path(__file__).parent.parent
FOLDERS = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [CONTRIBUTING] + [
    ROOT / path for path in ("CHANGELOG.md", "benchmarks/RESULTS.md", "wds_tensorcache/codec/FORMAT.md")
]
NEEDS = {
    "dali.md": ["nvidia.dali"],
    "tasks.md": ["PIL"],
    "training.md": ["torchdata", "lightning", "accelerate", "transformers"],
    "remote.md": ["urllib3"],
    "node_cache.md": ["urllib3"],
    "several_nodes.md": ["urllib3"],
    "remote_writing.md": ["obstore", "moto"],
    "ray.md": ["ray"],
}  # by page; all other pages need nothing optional
# By page, the address of a server of the current folder.
SERVED = dict.fromkeys(("remote.md", "node_cache.md", "several_nodes.md"), "https://data.example.org")
LONG = {"command_line.md", "importing.md", "ray.md"}  # pages that run many commands, or start a cluster
IN_STORES = {"remote_writing.md"}  # pages that write to s3://bucket


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _blocks(text: str) -> list[str]:
    """Return the python blocks of a page, and its bash blocks that call `tensorcache`, as python code.

    Each is moved down to its line so that errors name the right one.
    """
    return [
        "\n" * text.count("\n", 0, match.start(2)) + (match[2] if match[1] == "python" else _COMMANDS.format(match[2]))
        for match in re.finditer(r"^```(python|bash)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if match[1] == "python" or match[2].startswith("tensorcache ")
    ]


_COMMANDS = """from tests.test_docs import _run_commands
_run_commands({!r})"""


def _run_commands(block: str) -> None:
    """Run the commands of a bash block, in processes that need not import torch again; `> FILE` is its only syntax."""
    for line in block.splitlines():
        command, *arguments = shlex.split(line, comments=True)
        assert command == "tensorcache"
        arguments, files = (arguments[:-2], arguments[-1:]) if ">" in arguments else (arguments, [])
        result = the_server().run(*arguments, cwd=Path.cwd(), TENSORCACHE_INDEXES="off")
        assert result.status == 0, result.err
        for file in files:
            Path(file).write_bytes(result.stdout)


def _anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub spells them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(page, marks=pytest.mark.long if page.name in LONG else (), id=_name(page))
        for page in PAGES
        if _blocks(page.read_text())
    ],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata looks at all of torch
# Ray copies its own options, also those that it has deprecated, and leaves pipes of its processes to the garbage collector
@pytest.mark.filterwarnings("ignore:`use_:DeprecationWarning:ray", "ignore:unclosed:ResourceWarning:ray")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # Lightning
def test_python_blocks_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page's blocks run in order in one namespace, and print what the comments after `print(…)` say, up to `…`.

    They also print each block of `text`.
    """
    for needed in NEEDS.get(path.name, []):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    monkeypatch.setenv("TENSORCACHE_INDEXES", "off")
    namespace: dict[str, Any] = {}
    everything, address = "", SERVED.get(path.name)
    with contextlib.ExitStack() as stack:
        server = None if address is None else stack.enter_context(HttpServer(tmp_path))
        if path.name in IN_STORES:
            shared_server().clear()
            for name, value in shared_server().environment.items():
                monkeypatch.setenv(name, value)
        for block in _blocks(path.read_text()):
            code = block if server is None else block.replace(str(address), server.url)
            exec(compile(code, str(path), "exec"), namespace)
            printed = capsys.readouterr().out
            everything += printed
            for expected in re.findall(r"^ *print\(.*\) +# ([^…\n]*)", block, re.MULTILINE):
                assert expected in printed
    for expected in re.findall(r"^```text\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE):
        assert expected in everything


def test_commands_are_targets() -> None:
    """Wherever a page or a docstring names a target of make, there is one."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    modules = [path for folder in FOLDERS for path in folder.rglob("*.py")]
    texts = [path.read_text() for path in [*PAGES, CONTRIBUTING, ROOT / "CHANGELOG.md", *modules]]
    named = {name for text in texts for name in re.findall(r"`make ([a-z-]+)`", text)}
    for fence in re.findall(r"^```bash\n(.*?)^```$", "\n".join(texts), re.DOTALL | re.MULTILINE):
        named.update(re.findall(r"^make ([a-z-]+)", fence, re.MULTILINE))
    assert {"test", "demo", "check", "bench", "fuzz"} <= named <= targets


def test_links_lead_somewhere() -> None:
    for path in [*PAGES, *LINKING]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^):]*))?\)", path.read_text()):
            linked = path.parent / target if target else path
            assert linked.exists(), f"{_name(path)}: {target}"
            assert not anchor or anchor in _anchors(linked.read_text()), f"{_name(path)}: {target}#{anchor}"


def test_the_readme_links_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+)\)", README.read_text()))
    assert linked == {_name(page) for page in PAGES} - {"README.md"}


def test_figures_agree() -> None:
    """Every figure of the README, with its range, is in the table of the benchmarks."""
    figures = re.findall(r"[0-9.]+ \([0-9.]+\.\.[0-9.]+\)", README.read_text().replace("*", ""))
    whole = (ROOT / "docs" / "benchmarks.md").read_text().replace("*", "")
    assert len(figures) >= 16
    assert [figure for figure in figures if figure not in whole] == []


def test_the_tree_is_the_tree() -> None:
    """CONTRIBUTING.md names each folder of the packages, in the place where it is."""
    text = CONTRIBUTING.read_text()
    named, above = set(), [""]
    tree = text[text.index("## The tree") :]
    for indent, names in re.findall(r"^( *)([a-z_]+/(?:, [a-z_]+/)*)(?: |$)", tree, re.MULTILINE):
        for name in re.findall("[a-z_]+", names):  # folders that are side by side may share a line
            above[len(indent) // 2 :] = [name]
            named.add("/".join(above))
    packages = {path.parent.relative_to(ROOT).as_posix() for folder in FOLDERS for path in folder.rglob("__init__.py")}
    tops = {"wds_tensorcache", "dali_plugin"}
    assert {path for path in named if path.split("/")[0] in tops} == {
        path for path in packages if path.split("/")[0] in tops
    }


def test_contributing_names_what_exists() -> None:
    """Each path, below the root or the package, and each class or function after a path and a colon."""
    named = re.findall(r"`([\w./-]*/[\w./-]*)(?::(\w+))?`", CONTRIBUTING.read_text())
    assert len(named) > 40
    for path, name in named:
        found = [top / path for top in (ROOT, ROOT / "wds_tensorcache") if (top / path).exists()]
        assert found, path
        assert not name or re.search(rf"^(?:class|def) {name}\b", found[0].read_text(), re.MULTILINE), f"{path}:{name}"
