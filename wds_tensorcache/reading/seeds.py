"""Random bits from integers by SplitMix64: sample seeds, and draws from seeds.

Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014. Nothing here has a state, so each number
depends only on its arguments, in every process and in every release.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

Array = np.ndarray[Any, Any]
MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
GOLDEN = 0x9E3779B97F4A7C15
_FACTORS, _SHIFTS = [np.uint64(factor) for factor in MIX], [np.uint64(shift) for shift in (30, 27, 31)]
_MASK = (1 << 64) - 1
_NUM_KEYS = 8
_SAMPLES = 0x5A3D1E  # makes seeds independent of the order of the samples, which comes from the same seed and epoch


@lru_cache(maxsize=32)
def round_keys(seed: int, epoch: int) -> Array:
    """Return SplitMix64's first eight numbers for seed and epoch, uint64 `[8]`. Do not change the array: it is cached."""
    states = finalize(np.array([seed * GOLDEN & _MASK, (epoch + 1) * GOLDEN + 1 & _MASK], np.uint64))
    return finalize((states[0] ^ states[1]) + np.arange(1, _NUM_KEYS + 1, dtype=np.uint64) * np.uint64(GOLDEN))


def finalize(values: Array) -> Array:
    """Apply the finalizer of SplitMix64 to each value, uint64."""
    # hot path: arrays of one batch, so each numpy call counts
    mixed: Array = values >> _SHIFTS[0]
    mixed ^= values
    mixed *= _FACTORS[0]
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _FACTORS[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def random_bits(seed: int, epoch: int, numbers: Any) -> Array:
    values = np.array(numbers, np.int64).astype(np.uint64)
    for key in round_keys(seed, epoch)[:2]:
        values = finalize(values ^ key)
    return values


def sample_seeds(seed: int, epochs: int | Array, indices: Array) -> Array:
    """Return a seed for each sample index, int64 `[B]`, in `[0, 2^63)`. `epochs` is one epoch, or the epoch of each sample."""
    seed ^= _SAMPLES
    if isinstance(epochs, int):
        bits = random_bits(seed, epochs, indices)
    else:
        bits = np.empty(len(indices), np.uint64)
        for epoch in np.unique(epochs).tolist():
            bits[epochs == epoch] = random_bits(seed, epoch, indices[epochs == epoch])
    seeds: Array = (bits >> np.uint64(1)).astype(np.int64)
    return seeds


def stream_seed(seed: int, kind: str, number: int = 0) -> int:
    """Return the seed of a stream of random numbers, in `[0, 2^64)`."""
    # with `seed + number`, stream 1 of seed 0 is stream 0 of seed 1, so runs that only differ by seeds share orders
    return xxhash.xxh3_64_intdigest(f"{kind}|{number}|{seed}".encode())


def purpose_of(kind: str, names: Iterable[str]) -> str:
    """Return a text that identifies a kind of draw and its names. Different arguments give different texts."""
    return "|".join((kind, *(name.replace("\\", "\\\\").replace("|", "\\|") for name in names)))


def salt(purpose: str) -> int:
    """Return a number in `[0, 2^63)` that makes draws for different purposes independent."""
    return xxhash.xxh3_64_intdigest(purpose.encode()) >> 1


def fractions_of(seeds: Array, purpose: str) -> Array:
    """Return a random number in [0, 1) for each seed, float64 `[B]`. Draws for different purposes are independent."""
    return as_fractions(finalize(seeds.astype(np.uint64) ^ np.uint64(salt(purpose))))


def as_fractions(bits: Array) -> Array:
    """Return numbers in [0, 1), float64, from 64 random bits each."""
    fractions: Array = (bits >> np.uint64(11)).astype(np.float64) / (1 << 53)
    return fractions
