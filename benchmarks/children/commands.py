"""Run commands of `tensorcache`, each in a process forked from this one, so that no time is spent on importing torch.

A forked process is in the state of the console script: it has one thread, and no CUDA.
"""

from __future__ import annotations

import json
import os
import sys

import wds_tensorcache.cli.app
import wds_tensorcache.cli.import_command


def main() -> None:
    """Read the arguments of each command from a line of stdin, as JSON; print its exit status."""
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                status = wds_tensorcache.cli.app.run(json.loads(line))
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
