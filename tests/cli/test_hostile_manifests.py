"""Every command on a cache whose manifest another program has written: a result or one message, and nothing outside of OUT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.command import run_any
from tests.reading.batches import write

# each reads a manifest in its own way
READERS = [
    ("ls", "{cache}"),
    ("verify", "{cache}"),
    ("repair", "{cache}", "{out}"),
    ("drop", "{cache}", "{out}", "k1"),
    ("export", "{cache}", "{out}"),
    ("merge", "{cache}", "{out}"),
    ("index", "{cache}/000000.tar"),
]
# these open the cache as `ls` does; what they print differs
PRINTERS = [
    ("show", "{cache}", "k1"),
    ("schema", "{cache}"),
    ("stats", "{cache}"),
    ("diff", "{cache}", "{good}"),
    ("bench", "{cache}", "--seconds", "0", "--threads", "1"),
    ("view", "{cache}", "-o", "{out}.html"),
]


def entry(**changes: Any) -> Any:
    return lambda manifest: {**manifest, "shardlist": [{**manifest["shardlist"][0], **changes}]}


MANIFESTS: dict[str, Any] = {
    "deep": lambda manifest: "[" * 100_000,
    "nan": lambda manifest: '{"shardlist": NaN}',
    "list": lambda manifest: [],
    "no shards": lambda manifest: {**manifest, "shardlist": []},
    "twice": lambda manifest: {**manifest, "shardlist": manifest["shardlist"] * 2},
    "escapes": entry(url="\x1b[31mx\nforged: ok.tar"),
    "absolute": entry(url="/etc/passwd"),
    "outside": entry(url="../good/000000.tar"),
    "server": entry(url="http://127.0.0.1:1/x.tar"),
    "command": entry(url="pipe:touch hacked"),
    "huge": entry(nsamples=10**30),
    "negative": entry(nsamples=-1),
    "fingerprint": lambda manifest: {**manifest, "fingerprints": {"000000.tar": {"\x1b[31m": "\nforged: ok"}}},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_commands_on_a_hostile_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good" / "%06d.tar", {f"k{i}": {"x": torch.ones(3)} for i in range(3)})
    before = {path: path.read_bytes() for path in (tmp_path / "good").iterdir()}
    for number, command in enumerate(READERS + PRINTERS * (name in ("escapes", "fingerprint"))):
        cache, out = tmp_path / f"cache{number}", tmp_path / f"out{number}"
        shutil.copytree(tmp_path / "good", cache)
        made = MANIFESTS[name](json.loads((cache / "manifest.json").read_text()))
        (cache / "manifest.json").write_text(made if isinstance(made, str) else json.dumps(made))
        found = run_any(*(word.format(cache=cache, out=out, good=tmp_path / "good") for word in command))
        said = found.stdout + found.stderr
        assert found.returncode in (0, 1, 2), (command, said)
        assert "fault of tensorcache" not in said, (command, said)
        assert "\x1b" not in said, command
        assert not any(line.startswith("forged") for line in said.splitlines()), command
        assert "root:" not in said, command
    assert {path: path.read_bytes() for path in (tmp_path / "good").iterdir()} == before
    names = {path.name.rstrip("0123456789").removesuffix(".html").rstrip("0123456789") for path in tmp_path.iterdir()}
    assert names <= {"good", "cache", "out", ".out.repair", ".out"}, names
