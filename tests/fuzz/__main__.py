"""Fuzz by coverage: `python -m tests.fuzz [TARGET …] --seconds 60 --findings DIR`; without targets, all of them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
MAX_NBYTES = 4096  # of an input
MAX_SECONDS = 2  # of processor time that one input may take, without the fuzzer's instruments
MAX_GROWTH_NBYTES = 100_000_000  # of the process by one input


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all of them")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument(
        "--findings", type=Path, default=Path("fuzz_out"), help="new inputs, and those that break a target"
    )
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print(f"atheris is missing, and has no wheel for every Python: nothing is fuzzed on {sys.version.split()[0]}")
        return 0
    targets = options.targets or [path.name for path in sorted((HERE / "corpus").iterdir())]
    run = import_with_instruments()
    codes, running = [0], dict[int, str]()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as tempfile.tempdir:
        while targets or running:
            if targets and len(running) < options.jobs:
                target = targets.pop(0)
                running[start(target, run, options.seconds, options.findings)] = target
                continue
            pid, status = os.wait()
            codes.append(os.waitstatus_to_exitcode(status))
            report(running.pop(pid), codes[-1], options.findings)
    return max(map(abs, codes))


def import_with_instruments() -> Callable[[str, bytes], None]:
    """Return the function that runs a target; once for all targets, since it takes seconds."""
    import atheris
    import torch
    import webdataset  # noqa: F401  other packages are not instrumented

    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["wds_tensorcache"]):
        from tests.fuzz.targets import run
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*links to other files are not followed")  # as documented
    return run


def start(target: str, run: Callable[[str, bytes], None], seconds: int, findings: Path) -> int:
    """Fuzz one target in a forked process, and return its pid."""
    (findings / target).mkdir(parents=True, exist_ok=True)
    log = findings / f"{target}.log"
    pid = os.fork()
    if pid:
        return pid
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    fuzz(target, run, seconds, findings)
    raise AssertionError("the fuzzer ends the process")


def report(target: str, code: int, findings: Path) -> None:
    """Print how a target ended."""
    log = findings / f"{target}.log"
    lines = log.read_text(errors="replace").splitlines()
    ends = [line for line in lines if line.startswith(("Done", "=="))]
    print(f"{target}: {'; '.join(ends) or 'no end'}{'' if code == 0 else f': FOUND SOMETHING, see {log}'}", flush=True)
    if code:
        print("\n".join(lines[-25:]), flush=True)  # the traceback, and the input in base64


def measure_apart(target: str, data: bytes) -> float:
    """Return how many seconds an input takes the second time, without the fuzzer's instruments, which slow code down."""
    code = (
        "import sys, time; from tests.fuzz.targets import run; data = sys.stdin.buffer.read(); run(sys.argv[1], data); "
    )
    code += "began = time.process_time(); run(sys.argv[1], data); print(time.process_time() - began)"
    command = [sys.executable, "-c", code, target]
    return float(subprocess.run(command, input=data, stdout=subprocess.PIPE, cwd=HERE.parent.parent, check=True).stdout)


def fuzz(target: str, run: Callable[[str, bytes], None], seconds: int, findings: Path) -> None:
    """Never return: the fuzzer ends the process."""
    import atheris

    def one(data: bytes) -> None:
        began, size = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run(target, data)
        took = time.process_time() - began
        growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size)
        if took > MAX_SECONDS:
            took = measure_apart(target, data)
        assert took < MAX_SECONDS, f"{took:.1f} s for {len(data)} bytes"
        assert growth < MAX_GROWTH_NBYTES, f"{growth} bytes more for {len(data)} bytes"

    settings = [f"-max_total_time={seconds}", f"-max_len={MAX_NBYTES}", "-timeout=20", "-rss_limit_mb=4096"]
    settings += [f"-dict={HERE / 'tokens.dict'}", f"-artifact_prefix={findings}/{target}-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *settings, str(findings / target), str(HERE / "corpus" / target)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    sys.exit(main())
