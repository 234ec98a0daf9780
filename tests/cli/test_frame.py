"""Rules for every command: exit statuses, terminals that obey nothing, closed pipes, interruptions, colors, completion."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import wds_tensorcache as tc
from tests.cli.commands import Output, Result, Server
from tests.cli.conftest import HOSTILE
from tests.reading.batches import write
from tests.remote.servers.http_server import HttpServer
from tests.shards.tars import build_with_tarfile, fix_checksums

Run = Callable[..., Result]
ROOT = Path(__file__).parent.parent.parent
KEY = "photos/003%20a"
LOOKING = [("ls", "--long"), ("schema",), ("stats",)]


def _is_safe(text: str) -> bool:
    """Return whether each line of a text is printable."""
    return all(line.isprintable() for line in text.split("\n"))


def _without_styles(content: bytes) -> str:
    """Return the text of a terminal without the colors and styles that `tensorcache` itself sends."""
    return re.sub(r"\x1b\[[0-9;]*m", "", content.decode()).replace("\r\n", "\n")


# --- the script itself


def test_the_console_script(cache: Path, tmp_path: Path) -> None:
    """The function that setup.cfg names, as pip's script calls it, ends quietly when the reader of its output has ended."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    name, _, target = config["options.entry_points"]["console_scripts"].strip().partition(" = ")
    assert name == "tensorcache"
    module, _, function = target.partition(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    reading, writing = os.pipe()
    os.close(reading)
    command, environment = [sys.executable, "-c", code, "ls", "cache"], {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert process.communicate(timeout=120)[1] == b""
    assert process.returncode == 141


def _remove_click() -> None:
    for name in [name for name in sys.modules if name.startswith("wds_tensorcache.cli")]:
        del sys.modules[name]
    sys.modules["click"] = None  # type: ignore[assignment]


def test_a_missing_extra_is_named(run: Run) -> None:
    found = run("ls", prepare=_remove_click)
    assert (found.status, found.out) == (2, "")
    assert "pip install 'wds-tensorcache[cli]'" in found.err


# --- exit statuses


WRONG_USAGE = {
    ("frob",): "unknown command 'frob'",
    ("sho",): "'show'",
    ("ls",): "CACHE",
    ("ls", "cache", "--frob"): "--frob",
    ("ls", "cache", "--limit", "-1"): "--limit",
    ("stats", "cache", "--samples", "0"): "at least 1, or 'all'",
    ("stats", "cache", "--samples", "few"): "at least 1, or 'all'",
    ("ls", "nowhere"): "nowhere does not exist",
    ("ls", "nowhere/*.tar"): "matches no file",
    ("ls", ""): "'' does not exist",
    ("ls", "ftp://bucket/cache"): "expected a local path, or a url",
    ("ls", "cache", "--cache", "none"): "no cache 'none'",
    ("ls", "cache", "--cache", "not a name"): "not a name",
    ("show", "cache", "photos/03 a"): "photos/003 a",
    ("show", "cache", KEY, "--tensor", "latnets"): "there are 'latents'",
    ("cat", "cache", KEY, "text.state"): "there are 'text.states'",
    ("cat", "cache", KEY, "--member", "png"): "'jpg'",
    ("cat", "cache", KEY): "either the NAME of a tensor or small value, or --member",
    ("cat", "cache", KEY, "latents", "--member", "jpg"): "either the NAME of a tensor or small value, or --member",
}


def test_wrong_usage(run: Run, cache: Path) -> None:
    for arguments, word in WRONG_USAGE.items():
        found = run(*arguments)
        assert (found.status, found.out) == (2, ""), arguments
        assert word in found.err
        assert "Traceback" not in found.err


def test_help(run: Run) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        found = run(*arguments)
        assert found.status == (0 if arguments else 2)
        shown, nothing = (found.out, found.err) if arguments else (found.err, found.out)
        assert re.search(r"^  import +Write shards", shown, re.MULTILINE)
        assert re.search(r"^  show +Show", shown, re.MULTILINE)
        assert nothing == ""
    assert run("--version").out == f"tensorcache, version {tc.__version__}\n"


def _cut(cache: Path) -> None:
    shard = cache / "1.tar"
    shard.write_bytes(shard.read_bytes()[:-3000])


def _empty(cache: Path) -> None:
    for path in cache.iterdir():
        path.unlink()


def _no_shard(cache: Path) -> None:
    (cache / "1.tar").unlink()


def _not_a_tar(cache: Path) -> None:
    _empty(cache)
    (cache / "0.tar").write_bytes(b"not a tar at all" * 100)


def _only_members(cache: Path) -> None:
    _empty(cache)
    (cache / "0.tar").write_bytes(build_with_tarfile([("a.jpg", b"abc")]))


@pytest.mark.parametrize(
    ("damage", "word", "status"),
    [
        (_cut, "1.tar", 1),
        (_empty, "neither manifest.json nor any *.tar", 2),
        (_no_shard, "1.tar", 1),
        (_not_a_tar, "0.tar", 1),
        (_only_members, "only other members", 2),
    ],
)
def test_bad_data(run: Run, cache: Path, damage: Callable[[Path], None], word: str, status: int) -> None:
    damage(cache)
    for command, *options in [("ls",), ("schema", "--json"), ("stats",), ("show", KEY), ("cat", KEY, "latents")]:
        found = run(command, cache, *options)
        assert found.status == status, command
        assert word in found.err
        assert found.err.count("\n") == 1
        assert found.err.startswith("tensorcache: ")
        assert found.out == ""


def test_a_damaged_sample(run: Run, cache: Path) -> None:
    """The index is intact, so keys and shapes are known; reading the sample is refused, and names it."""
    shard = cache / "1.tar"
    shard.write_bytes(shard.read_bytes().replace(b"tensor:latents", b"nosens:latents", 1))
    assert run("ls", cache).status == 0
    for arguments in (["show", cache, "photos/004%20a"], ["cat", cache, "photos/004%20a", "latents"], ["stats", cache]):
        found = run(*arguments)
        assert (found.status, found.out) == (1, "")
        assert "1.tar" in found.err
        assert "photos/004%20a" in found.err
    assert run("show", cache, KEY).status == 0


def _break_open() -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError(HOSTILE)

    tc.open = fail


def test_a_fault_of_the_program(run: Run) -> None:
    """A traceback whose texts a terminal does not obey, and status 1."""
    found = run("ls", "cache", prepare=_break_open)
    assert (found.status, found.out) == (1, "")
    assert "Traceback" in found.err
    assert found.err.endswith("this is a fault of tensorcache; please report it\n")
    assert _is_safe(found.err)


# --- terminals obey nothing


def test_hostile_texts(run: Run, on_terminal: Run, hostile: Path) -> None:
    for command, *options in [*LOOKING, ("show", "a"), ("show", "a", "--tensor", "array"), ("ls", "--glob", HOSTILE)]:
        piped = run(command, hostile, *options)
        assert (piped.status, piped.err) == (0, "")
        assert _is_safe(piped.out), command
        assert "forged: line" not in piped.out.split("\n")
        seen = on_terminal(command, hostile, *options, stderr=False)
        assert seen.status == 0
        assert _is_safe(_without_styles(seen.stdout)), command
        assert b"\x1b[31m title" not in seen.stdout
        as_json = run(command, hostile, *options, "--json")
        assert _is_safe(as_json.out)
        as_json.json  # noqa: B018
    names = {child["name"] for child in run("show", hostile, "a", "--json").json["structure"]["children"]}
    assert names == {HOSTILE, "prompt", "list", "array"}


def test_hostile_arguments(run: Run, hostile: Path) -> None:
    """A file name that a shell expands may contain anything, too."""
    for arguments in (
        [HOSTILE],
        ["ls", HOSTILE],
        ["ls", "hostile", f"--{HOSTILE}"],
        ["ls", "hostile", "--cache", HOSTILE],
        ["show", "hostile", HOSTILE],
        ["show", "hostile", "a", "--tensor", HOSTILE + "x"],
        ["cat", "hostile", "a", "--member", HOSTILE],
        ["stats", "hostile", "--samples", HOSTILE],
        ["import", HOSTILE, "x"],
    ):
        found = run(*arguments)
        assert (found.status, found.out) == (2, "")
        assert _is_safe(found.err)
        assert "\nforged" not in found.err


def test_bytes_and_escapes_stay_off_the_terminal(on_terminal: Run, run: Run, cache: Path, hostile: Path) -> None:
    for arguments in (
        ["cat", cache, KEY, "latents"],
        ["cat", cache, KEY, "--member", "jpg"],
        ["cat", hostile, "a", "--member", "txt"],
        ["cat", hostile, "a", "prompt"],
    ):
        found = on_terminal(*arguments)
        assert found.status == 2
        assert b"redirect it to a file" in found.stdout
        assert _is_safe(_without_styles(found.stdout))
    assert on_terminal("cat", cache, KEY, "--member", "json").stdout == b'{"label": 3}'
    assert run("cat", hostile, "a", "--member", "txt").stdout.decode() == HOSTILE


def test_names_of_files(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / ("x" + HOSTILE.replace("/", ""))
    folder.mkdir()
    (folder / "0.tar").write_bytes(b"no shard")
    for command in ("stats", "verify"):
        found = run(command, folder)
        assert found.status == 1
        assert _is_safe(found.out + found.err)
        assert "\nforged" not in found.out + found.err


def test_a_line_break_in_a_key(run: Run, tmp_path: Path) -> None:
    options = {"footer": False, "dali_index": False, "manifest": False}
    shard = Path(write(tmp_path / "0.tar", {"aXforged": {"x": torch.full((3,), float("nan"))}}, **options))
    shard.write_bytes(fix_checksums(shard.read_bytes().replace(b"aXforged", b"a\nforged")))
    for command, *options in [*LOOKING, ("view", "-o", "page.html")]:
        result = run(command, shard, *options)
        assert (result.status, result.err) == (0, "")
        assert "\nforged" not in result.out


# --- pipes, files and signals


def _run_into(server: Server, folder: Path, arguments: list[str], stdout: int) -> tuple[int, str]:
    """Run a command with this stdout; return its status, and what it says on stderr."""
    with open(os.devnull) as null, Output() as errors:
        status = server.start(arguments, (null.fileno(), stdout, errors.fileno), folder).wait()
        return status, errors.read().decode()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a shard of which each command prints more than a pipe holds."""
    folder = tmp_path_factory.mktemp("large")
    wide = {f"{i}": torch.zeros(300) for i in range(180)} | {"x": torch.zeros(1 << 18)}
    write(folder / "0.tar", {f"{i:050d}": {"x": torch.zeros(1)} for i in range(4000)} | {"a": wide})
    return folder


def test_a_closed_pipe(server: Server, large: Path) -> None:
    """Each command ends quietly, with the status that a shell shows for SIGPIPE."""
    for line in ("ls 0.tar", "ls 0.tar --json", "show 0.tar a", "cat 0.tar a x --as raw", "--help", "ls nowhere"):
        reading, writing = os.pipe()
        os.close(reading)
        with open(os.devnull) as null:
            errors = writing if "nowhere" in line else null.fileno()  # both outputs are closed
            process = server.start(line.split(), (null.fileno(), writing, errors), large)
        os.close(writing)
        assert process.wait() == 141, line


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(server: Server, cache: Path, tmp_path: Path) -> None:
    for arguments in (["ls", "cache"], ["show", "cache", KEY], ["cat", "cache", KEY, "zeros"], ["--help"]):
        with open("/dev/full", "wb") as full:
            status, said = _run_into(server, tmp_path, arguments, full.fileno())
        assert status == 1, arguments
        assert "No space left" in said
        assert "Traceback" not in said


def test_a_closed_stdout(server: Server, cache: Path, tmp_path: Path) -> None:
    for arguments in (["ls", "cache"], ["show", "cache", KEY], ["cat", "cache", KEY, "zeros"]):
        assert _run_into(server, tmp_path, arguments, -1) == (0, ""), arguments


def _close_stdin() -> None:
    sys.stdin.close()
    sys.stdin = None  # type: ignore[assignment]  # as Python starts without a descriptor 0


def test_a_closed_stdin(server: Server, cache: Path, tmp_path: Path) -> None:
    arguments = ["drop", "cache", str(tmp_path / "out"), "--keys-from", "-"]
    result = server.run(*arguments, cwd=cache.parent, prepare=_close_stdin)
    assert (result.status, result.err) == (0, "")
    assert result.out.endswith("without 0 samples\n")


def test_interrupted_while_a_server_stalls(server: Server, tmp_path: Path) -> None:
    with HttpServer(tmp_path) as http:
        http.script("cache.tar", {"stall_s": 3600, "times": -1})
        with server.running("ls", f"{http.url}/cache.tar", cwd=tmp_path) as (process, said):
            while not http.log():
                time.sleep(0.01)
            process.interrupt()
            assert (process.wait(), said.read()) == (130, b"interrupted\n")


# --- heat maps and widths


def test_heat_maps(on_terminal: Run, run: Run, cache: Path) -> None:
    true_color = on_terminal("show", cache, KEY, COLORTERM="truecolor").stdout
    assert "▀" in true_color.decode()
    assert b"\x1b[38;2;" in true_color
    few_colors = on_terminal("show", cache, KEY).stdout
    assert "▀" in few_colors.decode()
    assert b"38;5;" in few_colors
    assert b"38;2;" not in few_colors
    for options in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "xterm"}):
        found = on_terminal("show", cache, KEY, **options).stdout.decode()
        assert "▀" not in found
        assert "░" in found, options
        assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38|48)", found) or options == {"TERM": "xterm"}
    ascii_only = on_terminal("show", cache, KEY, NO_COLOR="1", PYTHONIOENCODING="ascii").stdout
    assert ascii_only.isascii()
    assert b"@" in ascii_only
    assert "░" not in run("show", cache, KEY).out
    assert "░" in run("show", cache, KEY, "--heat-map").out
    assert "▀" not in on_terminal("show", cache, KEY, "--no-heat-map").out
    assert "2 planes" in on_terminal("show", cache, KEY, "--tensor", "latents").out


def test_a_dark_and_a_bright_end(on_terminal: Run, tmp_path: Path) -> None:
    """The first pixel of a ramp has the darkest color, the last one the brightest, NaN is red."""
    ramp = torch.arange(8.0).repeat(2, 1)
    ramp[0, 3] = float("nan")
    write(tmp_path / "0.tar", {"a": {"x": torch.cat([ramp] * 4)}})
    found = on_terminal("show", "0.tar", "a", COLORTERM="truecolor").stdout.decode()
    pixels = re.findall(r"\x1b\[38;2;(\d+);(\d+);(\d+)(?:;48;2;[\d;]+)?m▀", found)
    assert pixels[0] == ("68", "1", "84")
    assert pixels[3] == ("255", "0", "90")
    assert pixels[7] == ("253", "231", "37")


def test_a_narrow_terminal(on_terminal: Run, cache: Path) -> None:
    for command, *options in [("schema",), ("stats",), ("show", KEY), ("show", KEY, "--tensor", "text.states")]:
        found = _without_styles(on_terminal(command, cache, *options, columns=40).stdout)
        if command != "show":
            for word in ("latents", "bf16", "text.states", "histogram" if command == "stats" else "samples"):
                assert word in found, found
        for line in found.split("\n"):
            # tables and trees fit; texts are wrapped by the terminal
            assert len(line) <= 40 or not re.search("[▀░│▁█]", line), line
        assert on_terminal(command, cache, *options, columns=4).status == 0


def test_ascii_output(run: Run, cache: Path) -> None:
    for command, *options in [*LOOKING, ("show", KEY)]:
        found = run(command, cache, *options, PYTHONIOENCODING="ascii")
        assert (found.status, found.err) == (0, "")
        assert found.stdout.isascii()
    assert "histogram" not in run("stats", cache, PYTHONIOENCODING="ascii").out


# --- completion


def test_completion(run: Run, cache: Path) -> None:
    def complete(*words: str) -> list[str]:
        words = ("tensorcache", *words)
        found = run(_TENSORCACHE_COMPLETE="bash_complete", COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1))
        return found.out.split()

    assert complete("s") == ["plain,show", "plain,schema", "plain,stats"]
    assert "plain,--samples" in complete("stats", "--")
    assert complete("stats", "ca") == ["file,ca"]
    unknown = run(_TENSORCACHE_COMPLETE="bash_complete", COMP_WORDS="tensorcache frob x", COMP_CWORD="2")
    assert (unknown.status, unknown.err) == (0, "")
    assert "_TENSORCACHE_COMPLETE=zsh_complete" in run(_TENSORCACHE_COMPLETE="zsh_source").out
