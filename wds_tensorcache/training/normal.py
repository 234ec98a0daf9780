"""Normal random numbers from seeds, bit for bit equal on every device.

They are also equal in any batch and at any position in it. torch's own generators do not promise this. Each number comes from
32 bits of SplitMix64, a counter-based generator (Steele, Lea and Flood, 2014), and from a table of the inverse normal
distribution. The table has linear pieces, 128 for each power of two of the tail probability. The method is by Cheung, Lee, Luk
and Villasenor ("Hardware Generation of Arbitrary Random Number Distributions from Uniform Distributions via the Inversion
Method", 2007). The arithmetic uses integers, and single operations on float32 that IEEE 754 rounds exactly. A logarithm or
cosine would differ in its last bits between devices. So would a product and a sum in one operation, as in `addcmul`, which some
devices round once, and other devices twice.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import torch

from wds_tensorcache.reading.batch.batch_memory import to_device
from wds_tensorcache.reading.seeds import GOLDEN, MIX, salt
from wds_tensorcache.reading.transfer import current_stream

_PIECE_BITS = 7  # 2^7 pieces for each power of two
_INSIDE_BITS = 23 - _PIECE_BITS  # the other bits of a float32's fraction: the place in a piece
_UNIT = 1 << 26  # quantiles are rounded to multiples of 1 / _UNIT
# pairs of numbers to compute at once on the CPU: 0.5 MB stays in its cache, and few calls wait for the GIL
_CHUNK = 1 << 16


def normal(seeds: torch.Tensor, shape: tuple[int, ...], purpose: str) -> torch.Tensor:
    """Return standard normal numbers, float32 `[B, *shape]`, on the device of `seeds`.

    Row `i` depends only on `seeds[i]`, int64, and on the text `purpose`, which makes different uses of a seed independent. The
    largest magnitude is 6.23. The quantiles of the distribution are exact up to 1e-5.
    """
    count = math.prod(shape)
    pairs = (count + 1) // 2
    table = _table(seeds.device, current_stream(seeds.device))
    keys = _finalize(seeds ^ salt(purpose))[:, None]
    result = torch.empty((len(seeds), 2 * pairs), dtype=torch.float32, device=seeds.device)
    # a GPU computes all numbers at once, the CPU a part of a row
    is_cpu = seeds.device.type == "cpu"
    width, height = (_CHUNK, 1) if is_cpu else (max(1, pairs), max(1, len(seeds)))
    for begin in range(0, pairs, width):
        end = min(begin + width, pairs)
        counters = torch.arange(begin + 1, end + 1, device=seeds.device).mul_(_signed(GOLDEN))
        for row in range(0, len(seeds), height):
            bits = _finalize(keys[row : row + height] + counters)
            _write_quantiles(bits.view(torch.int32), table, result[row : row + height, 2 * begin : 2 * end])
    return result[:, :count].reshape(len(seeds), *shape)


def _write_quantiles(bits: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Write the normal number of each int32 to `out`."""
    # sign, exponent and first bits of the float32 select a piece; the integer is odd, so it is not 0
    raw = (bits | 1).to(torch.float32).view(torch.int32)
    piece = ((raw >> _INSIDE_BITS) & 0xFFFF).view(-1)
    inside = (raw & ((1 << _INSIDE_BITS) - 1)).to(torch.float32)
    inside *= table[1].index_select(0, piece).view_as(inside)
    torch.add(table[0].index_select(0, piece).view_as(inside), inside, out=out)


@lru_cache(maxsize=16)
def _table(device: torch.device, stream: Any) -> torch.Tensor:
    """Return the start and the slope of each piece, float32 `[2, 2^16]`."""
    # Hazard: no other stream waits for the copy to a GPU, so each stream has its own table.
    # float32 rounds the largest integers up to 2^31, for which the number is 0
    units = [*_edges(), 0, 0]
    edges = torch.tensor(units, dtype=torch.float64, device="cpu") / _UNIT
    # slopes are per unit of the bits inside a piece
    pieces = torch.stack([edges[:-1], (edges[1:] - edges[:-1]) / (1 << _INSIDE_BITS)]).float()
    table = torch.zeros((2, 1 << 16), dtype=torch.float32, device="cpu")
    for sign, first in (1, 127 << _PIECE_BITS), (-1, 1 << 15 | 127 << _PIECE_BITS):
        table[:, first : first + len(edges) - 1] = sign * pieces
    return to_device(table, False, device)


def _edges() -> list[int]:
    """Return the starts of positive pieces, as multiples of `1 / _UNIT`."""
    inverse = NormalDist().inv_cdf
    per_octave = 1 << _PIECE_BITS
    tails = [2.0 ** (octave - 32) * (1 + at / per_octave) for octave in range(31) for at in range(per_octave)]
    # The last bits of `inv_cdf` depend on the compiler of Python and on its C library. Rounding removes them: no number
    # is within 6e-12 of the point where it would be rounded differently.
    return [round(-inverse(tail) * _UNIT) for tail in tails]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _finalize(values: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of SplitMix64 to int64 values, taken as uint64."""
    for shift, factor in (30, MIX[0]), (27, MIX[1]):
        values = (values >> shift).bitwise_and_((1 << 64 - shift) - 1).bitwise_xor_(values).mul_(_signed(factor))
    return (values >> 31).bitwise_and_((1 << 33) - 1).bitwise_xor_(values)
