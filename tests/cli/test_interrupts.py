"""Ctrl-C: one KeyboardInterrupt, at a place where it ends the command. Each case runs in its own process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

_BEGIN = """
import os, signal, sys, threading, time
from wds_tensorcache.cli.interrupts import delayed_interrupts, handle_interrupts
handle_interrupts()
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
"""


def _run(script: str) -> list[str]:
    command = [sys.executable, "-c", _BEGIN + script]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert found.stderr == ""
    return found.stdout.split()


def test_in_a_finalizer() -> None:
    """Python drops an exception in a finalizer; the interrupt arrives after it."""
    script = """
class Thing:
    def __del__(self):
        interrupt()
        time.sleep(60)
try:
    Thing()
    print("after")
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert _run(script) == ["after", "interrupted"]


def test_other_errors_in_a_finalizer_are_printed() -> None:
    script = """
class Thing:
    def __del__(self):
        raise ValueError("wrong")
sys.stderr = sys.stdout
Thing()
"""
    assert "wrong" in _run(script)


def test_repeated() -> None:
    """Those within half a second after an interrupt are ignored."""
    script = """
try:
    interrupt()
finally:
    try:
        for _ in range(100):
            interrupt()
        print("cleaned")
        time.sleep(0.6)
        interrupt()
    except KeyboardInterrupt:
        print("again")
        sys.exit()
"""
    assert _run(script) == ["cleaned", "again"]


def test_delayed() -> None:
    script = """
try:
    with delayed_interrupts():
        interrupt()
        print("inside")
    print("wrong")
except KeyboardInterrupt:
    print("interrupted")
with delayed_interrupts():
    print("nothing")
"""
    assert _run(script) == ["inside", "interrupted", "nothing"]


def test_a_process_that_ignores_or_handles_the_signal() -> None:
    """As commands that a shell starts with `&`."""
    script = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
handle_interrupts()
interrupt()
signal.signal(signal.SIGINT, lambda *_: print("mine"))
thread = threading.Thread(target=handle_interrupts)
thread.start()
thread.join()
handle_interrupts()
interrupt()
"""
    assert _run(script) == ["mine"]
