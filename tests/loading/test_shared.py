"""Where epochs begin, as processes tell one another: also where they come in an order that is hardly ever seen."""

from __future__ import annotations

import itertools
import random

import pytest

from wds_tensorcache.training.shared import SharedPosition


def processes(count: int) -> list[SharedPosition]:
    """Return what as many processes have of one position."""
    state = SharedPosition([0, 0]).__getstate__()
    made = []
    for _ in range(count):
        made.append(SharedPosition.__new__(SharedPosition))
        made[-1].__setstate__(state)
    return made


@pytest.mark.parametrize("distance", [1, 61, 61 * 7])
def test_workers_that_are_late(distance: int) -> None:
    """Workers of an iteration that was left begin while those of the next one do, in every order."""
    first, second = 1000, 1000 + distance
    begin = [("begin", token, worker) for token in (first, second) for worker in (0, 1)]
    for order in itertools.permutations([*begin[1:], ("end", second, 0), ("end", second, 1)]):
        places = {(kind, token, worker): at for at, (kind, token, worker) in enumerate(order)}
        if any(places["begin", second, worker] > places["end", second, worker] for worker in (0, 1)):
            continue
        made = dict(zip(itertools.product((first, second), (0, 1)), processes(4), strict=True))
        assert made[first, 0].begin(first, 0) == [0, 0]
        made[first, 0].put([1, 0], first)
        for kind, token, worker in order:
            shared = made[token, worker]
            if kind == "end":
                shared.end(token, worker, 2, [2, 5])
                continue
            assert shared.begin(token, worker) == ([0, 0] if token == first else [1, 0])
            shared.put([1, 0] if token == first else [2, 0], token)
        assert made[second, 0].next == [2, 5]


def test_many_iterations() -> None:
    tokens = random.Random(0)
    main = SharedPosition([0, 0])
    for epoch in range(200):
        token = tokens.randrange(1 << 62)
        workers = [SharedPosition.__new__(SharedPosition) for _ in range(3)]
        for worker, shared in enumerate(workers):
            shared.__setstate__(main.__getstate__())
            assert shared.begin(token, worker) == [epoch, 0]
            shared.put([epoch + 1, 7], token)
        for worker, shared in enumerate(workers):
            shared.end(token, worker, 3, [epoch + 1, 0])
        assert main.next == [epoch + 1, 0]
