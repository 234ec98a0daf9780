"""Send SIGINT at random moments to a process that fetches; see `test_interrupts.py`.

    python -m tests.remote.interrupted URL ROUNDS

Prints the outcomes, and whether a buffer changed after `fetch_many` had raised.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter

from wds_tensorcache.storage.remote.fetch import fetch_many
from wds_tensorcache.storage.remote.remote_file import RemoteFile

NBYTES = 50_000


def main(url: str, rounds: int) -> None:
    """Fetch, and be interrupted, so many times; each time, watch the buffers for a moment."""
    file = RemoteFile(url)
    expected = file.read(0, file.nbytes)
    chance = random.Random(5)
    found = Counter[str]()
    slowest = 0.0
    for _ in range(rounds):
        memory = [bytearray(NBYTES) for _ in range(file.nbytes // NBYTES)]
        timer = threading.Timer(chance.uniform(0, 0.15), os.kill, (os.getpid(), signal.SIGINT))
        sent = time.monotonic()
        try:
            timer.start()
            while True:
                fetch_many([(file, NBYTES * i, [memoryview(one)]) for i, one in enumerate(memory)])
        except KeyboardInterrupt:
            slowest = max(slowest, time.monotonic() - sent)
            found["KeyboardInterrupt"] += 1
        before = [bytes(one) for one in memory]
        time.sleep(0.03)
        if before != [bytes(one) for one in memory]:
            found["written after the end"] += 1
        timer.join()
    memory = [bytearray(NBYTES)]
    fetch_many([(file, 0, memory)])
    assert memory[0] == expected[:NBYTES]
    print(dict(found), f"slowest {slowest:.1f} s", file=sys.stderr)
    print(found["KeyboardInterrupt"], found["written after the end"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
