"""Count the Python calls that each operation makes when warm: `python -m benchmarks.calls`.

The columns count calls, functions and files of `wds_tensorcache`, in the calling thread alone. A
comprehension counts as a function up to Python 3.11, and each resumption of a generator as a call.

`python -m benchmarks.calls --functions read_batch` lists the functions of an operation in the order of their first calls.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import wds_tensorcache as tc
from benchmarks.report import markdown

_BATCH_SIZE = 32
_COUNT = 256
_PACKAGE = Path(tc.__file__).parent


def traced(act: Callable[[], Any]) -> Counter[CodeType]:
    """Count the calls of our functions in `act`, in the order of their first calls."""
    calls: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(_PACKAGE)):
            calls[frame.f_code] += 1

    for profile in (None, None, None, count):  # the first runs fill all caches
        sys.setprofile(profile)
        try:
            act()
        finally:
            sys.setprofile(None)
    return calls


def _sample(index: int) -> dict[str, Any]:
    latents, states = torch.full((4, 64, 64), index).half(), torch.full((77, 768), index).half()
    return {"latents": latents, "text_states": states, "prompt": f"prompt number {index}", "index": index}


@contextmanager
def acts(folder: Path) -> Iterator[dict[str, Callable[[], Any]]]:
    """Write a cache of one shard into `folder`; yield the traced operations by name.

    Everything runs on one thread. The batches are of the same 32 random samples, so that no sample is new in the traced one.
    """
    with tc.ShardWriter(folder / "%06d.tar") as writer:
        for index in range(_COUNT):
            writer.write(f"{index:08d}", _sample(index))
    indices = random.Random(0).sample(range(_COUNT), _BATCH_SIZE)
    new = iter(range(_COUNT))
    members = tc.encode_sample(_sample(0))
    with tc.ShardWriter(folder / "more" / "%06d.tar") as writer, tc.open(folder, num_threads=1) as cache:
        yield {
            "write": lambda: writer.write(f"{next(new):08d}", _sample(0)),
            "read_batch": lambda: cache.read_batch(indices),
            "get": lambda: cache[indices[0]],
            "decode": lambda: tc.decode_sample(*members),
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    parser.add_argument(
        "--functions",
        choices=("write", "read_batch", "get", "decode"),
        help="list the functions of one operation instead",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="calls-") as folder, acts(Path(folder)) as operations:
        chosen = [options.functions] if options.functions else operations
        calls = {name: traced(operations[name]) for name in chosen}
    if options.functions:
        for index, (code, count) in enumerate(calls[options.functions].items(), start=1):
            place = Path(code.co_filename).relative_to(_PACKAGE.parent)
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the short one alone
            print(f"{index:4} {count:5} {name:44} {place}:{code.co_firstlineno}")
        return
    rows = [["", "calls", "functions", "files"]]
    for name, of_name in calls.items():
        files = {code.co_filename for code in of_name}
        rows.append([name, *map(str, (of_name.total(), len(of_name), len(files)))])
    print(markdown(rows))


if __name__ == "__main__":
    main()
