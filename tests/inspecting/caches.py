"""Caches whose content tries to break a page, and ordinary ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wds_tensorcache as tc
from tests.cli.command import run

EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">'`&{{report}}{{script}}"
    "\0\x1b[31m\r\u202e\u2066\u2028\ud800<!--<script>"
)
FLOATS = [
    getattr(torch, name)
    for name in "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float64".split()
    if hasattr(torch, name)
]
_OTHERS = [torch.complex64, torch.complex128, torch.uint8, torch.uint16, torch.uint64, torch.int64, torch.bool]


def write_photos(folder: Path, num_samples: int = 40, side: int = 16) -> None:
    """Write samples of a latent, a text of 3 to 7 states, a prompt and a size.

    Sample 7 has NaN, 11 is 50 times too large, 33 has a damaged photo.
    """
    torch.manual_seed(0)
    with tc.ShardWriter(f"{folder}/train-%05d.tar", max_samples=16, fsync=False, fingerprint={"model": "flux"}) as sink:
        for i in range(num_samples):
            latent = torch.randn(16, side, side, dtype=torch.bfloat16)
            if i == 7:
                latent[0, 0, :3] = float("nan")
            if i == 11:
                latent *= 50
            text = torch.randn(3 + i % 5, 32, dtype=torch.float16)
            what = ["a harbor at dawn", "a fox in the snow", "an old clock"][i % 3]
            sample = {"latent": latent, "text": {"states": text}, "prompt": f"{what}, number {i}", "size": (128, 128)}
            sink.write(f"photo-{i:05d}", sample, **({"jpg": b"no picture"} if i == 33 else {}))


def write_hostile(folder: Path) -> None:
    """Write samples with hostile names and texts, all dtypes, no elements, NaN everywhere, cycles, and 3,000 of everything."""
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: Any = [0]
    for _ in range(40):
        deep = [deep, deep]
    fingerprint = {"<b>": EVIL[:60], "x": {"y": ["</script>"]}}
    with tc.ShardWriter(f"{folder}/a-%05d.tar", fsync=False, fingerprint=fingerprint) as sink:
        sink.write(tc.safe_key(EVIL[:17]), {EVIL: torch.randn(4, 8, 8), "prompt": EVIL, "q": {'"><svg onload=x>': 1}})
        large = {"prompt": "<i></script>" * 100_000, "int": 10**5000, "bytes": b"\xff" * 1_000_000, "cycle": cycle}
        sink.write("large", {**large, "deep": deep, "t": torch.full((4, 16, 16), float("nan"))})
        inf = {"t": torch.full((4, 16, 16), float("inf")), "u": torch.tensor(float("-inf")), "z": torch.zeros(0)}
        sink.write("inf", {**inf, "zz": torch.zeros(3, 0, 5), "zzz": torch.zeros(0, 8, 8)})
        dtypes = {f"d{i}": torch.rand(4, 12, 12).to(dtype) for i, dtype in enumerate(FLOATS + _OTHERS)}
        sink.write("dtypes", dtypes)
        arrays = {"words": np.array(["<b>", "ab"]), "date": np.array(["2020-01-01"], "datetime64[D]")}
        arrays |= {"complex": np.ones((3, 9, 9), np.complex128), "huge": np.full((3, 16, 16), 1e308)}
        mixed = torch.tensor([float("nan"), 1e38, -1e38, float("inf")]).repeat(64).reshape(4, 8, 8)
        sink.write("arrays", {**arrays, "mixed": mixed})
        sink.write("many", {f"t{i}": torch.randn(3) for i in range(3000)})
        sink.write("values", {f"v{i}": "x" * 50 for i in range(3000)})
        sink.write("bare", torch.randn(8, 8, 8))
        sink.write("none", None)
        sink.write("text", "\u202eשלם\u202c <b>")
        sink.write("video", {"video": torch.randn(16, 9, 8, 8)}, txt=b"\xff</script> a caption")


def embedded(page: bytes) -> Any:
    """Return the data in a page, as an HTML parser finds it: up to the first end of a script element."""
    text = page.decode("utf-8")
    begin = text.index('<script type="application/json" id="report">')
    return json.loads(text[text.index(">", begin) + 1 : text.index("</script", begin)])


def view(folder: Path, status: int = 0) -> tuple[dict[str, Any], bytes, str]:
    """Run `tensorcache view`, and return the data in its page, the page, and the messages on stderr."""
    out = folder / "report.html"
    messages = run("view", folder, "-o", out, status=status).stderr
    page = out.read_bytes()
    return embedded(page), page, messages
