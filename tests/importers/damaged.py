"""Damage files of a folder, one after another, and open it with its importer: the result is a sample or a FormatError."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from wds_tensorcache.errors import FormatError
from wds_tensorcache.importers.formats import choose_format
from wds_tensorcache.importers.source_folder import SourceFolder


def count_errors(folder: Path, name: str) -> tuple[int, int]:
    """Load all samples with the format `name`; return how many there are, and how many are bad or in bad files."""
    source = choose_format(SourceFolder(str(folder)), name).open(SourceFolder(str(folder)))
    num_bad = len(source.bad)
    for sample in source.samples:
        try:
            sample.load()
        except FormatError:
            num_bad += 1
    return len(source.samples), num_bad


def load_damaged(folder: Path, copy: Path, name: str, count: int, seed: int = 0) -> int:
    """Load `count` damaged copies of a folder; return how many of them had errors, which were all FormatError."""
    draw = random.Random(seed)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    num_bad = 0
    for _ in range(count):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        path = copy / draw.choice(files)
        raw = bytearray(path.read_bytes())
        if draw.random() < 0.2:
            del raw[draw.randrange(len(raw)) :]
        for _ in range(draw.choice((1, 1, 4))):
            if raw:
                raw[draw.randrange(len(raw))] = draw.choice((0, 1, 0x7F, 0xFF, draw.randrange(256)))
        path.write_bytes(raw)
        num_bad += count_errors(copy, name)[1] > 0
    return num_bad
