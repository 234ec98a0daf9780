"""The fast translation of pickles by torch.save returns what the slow one does, or leaves the pickle to it."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from collections import OrderedDict
from typing import Any

import torch

from wds_tensorcache.integrations.pickles import translate


def pickled(value: Any) -> bytes:
    """Return the pickle in a file of `torch.save`."""
    out = io.BytesIO()
    torch.save(value, out)
    with zipfile.ZipFile(out) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


PICKLES = [
    pickled({"a": torch.ones(3), "b": [1, 2.5, "x" * 300, None, True, (1, 2, 3, 4)]}),
    pickled([torch.ones(2, dtype=torch.bfloat16)] * 3),
    pickled(torch.nn.Linear(3, 4).state_dict()),
    pickled({"l": list(range(300)), "t": "é" * 90, "s": {1, 2}, "big": 1 << 80, "neg": -5}),
    pickled(OrderedDict(x=1, y=torch.nn.Parameter(torch.ones(2)))),
    *(pickle.dumps([{"x": str(number)} for number in range(300)], protocol) for protocol in (2, 3, 4, 5)),
]


def test_fast_and_slow_are_equal() -> None:
    for each in PICKLES:
        assert translate._translate_usual(each) == translate._translate_any(each)


def test_changed_pickles() -> None:
    """If both translations accept a changed pickle, they return the same bytes."""
    chance, num_equal = random.Random(1), 0
    for _ in range(10_000):
        raw = bytearray(chance.choice([each for each in PICKLES if len(each) < 3000]))
        for _ in range(chance.randint(1, 3)):
            raw[chance.randrange(len(raw))] = chance.choice([chance.randrange(256), *b"qrhjcX.}]RQb\x94\x80\x95"])
        fast = translate._translate_usual(bytes(raw))
        if fast is None:
            continue
        try:
            slow = translate._translate_any(bytes(raw))
        except Exception:  # pickletools decodes texts and numbers, which `unpickle` does later
            continue
        assert fast == slow
        num_equal += 1
    assert num_equal > 1000
