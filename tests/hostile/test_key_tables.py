"""Keys that were chosen to have one hash: a row of FORMAT.md's table of attacks."""

from __future__ import annotations

import random

from tests.shards.test_key_table import Counting, keys_of, text
from wds_tensorcache.shards.key_table import KeyTable


def test_keys_with_one_polynomial_hash_are_not_all_looked_at() -> None:
    """Thue and Morse's sequence and its complement have one sum of powers modulo 2^64, whatever the base."""
    bits = [number.bit_count() % 2 for number in range(1024)]
    blocks = [bytes(97 + (bit ^ flip) for bit in bits) for flip in (0, 1)]
    names = [b"".join(blocks[number >> at & 1] for at in range(7)) for number in range(128)]
    random.Random(0).shuffle(names)
    table = KeyTable([(keys_of(names, Counting), None)])
    Counting.num_read = 0
    assert [table.find(text(name)) for name in names] == [[at] for at in range(len(names))]
    assert Counting.num_read < 2 * len(names)
    Counting.num_read = 0
    assert table.shared() == []
    assert Counting.num_read < len(names)
