"""Damage files of a folder, one after another, and import it: samples are imported, or reported as bad."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import wds_tensorcache as tc


def count_errors(folder: Path, name: str) -> tuple[int, int]:
    """Import a folder with the format `name`; return the numbers of samples and of faults."""
    out = folder.with_name(f"{folder.name} imported")
    shutil.rmtree(out, ignore_errors=True)
    try:
        report = tc.import_cache(folder, out, format=name, on_error="skip", num_workers=1)
    except tc.FormatError:  # all samples are in bad files
        return 0, 1
    return report.num_read, len(report.skipped)


def load_damaged(folder: Path, copy: Path, name: str, count: int, seed: int = 0) -> int:
    """Load `count` damaged copies of a folder; return how many of them had faults."""
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
