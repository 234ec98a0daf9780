"""The tables of scale.md."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.report import markdown
from benchmarks.scale.memory import (
    BUCKET_NBYTES,
    KEY_TABLE_NBYTES,
    NOTES_NBYTES,
    OPEN_NBYTES,
    PICKLED_NBYTES,
    manifest_nbytes,
    shards,
)
from benchmarks.scale.setting import (
    BATCH,
    CACHE_NBYTES,
    NUM_NODES,
    NUM_RANKS,
    NUM_SAMPLES,
    NUM_SHARDS,
    ONE_TENSOR_NBYTES,
    PER_NODE,
    PER_PREFIX,
    PER_SHARD,
    RANKS_PER_NODE,
    SAMPLES_PER_S,
    TAIL_NBYTES,
    USD_PER_GB_FROM_REGION,
    USD_PER_GB_TO_INTERNET,
    USD_PER_LIST,
    request_usd,
)
from benchmarks.scale.traffic import WAYS, Traffic, Way, node_hits, stream_requests, traffic
from wds_tensorcache.storage.remote.stream import AHEAD_NBYTES, num_requests

_UNITS = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
_PER_LISTING = 1000  # names in an answer
_STREAMS = "streams"


def _nbytes(count: float) -> str:
    scale, unit = next((each for each in _UNITS if count >= each[0]), (1, "B"))
    return f"{_digits(count / scale)} {unit}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _count(value: float) -> str:
    """Return a count with three significant digits; from 10^6 on as a power."""
    if value < 10**6:
        return _digits(float(f"{value:.3g}"))
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g} x 10^{int(power)}"


def _usd(value: float) -> str:
    return f"${value:,.0f}" if value >= 10 else f"${value:.2f}"


def _percent(share: float) -> str:
    return f"{share * 100:.3g}%"


def _setting() -> Iterable[list[str]]:
    sizes = shards()
    yield ["", "assumed, or computed from it"]
    yield ["samples, shards, nodes", f"{_count(NUM_SAMPLES)}, {_count(NUM_SHARDS)}, {_count(NUM_NODES)}"]
    yield ["samples of a shard", f"{PER_SHARD:,}"]
    yield ["a sample in a shard (three fp16 tensors, as in `make bench`)", _nbytes(sizes.sample_nbytes)]
    yield ["a shard, with its index", _nbytes(sizes.nbytes)]
    yield ["all shards", _nbytes(sizes.nbytes * NUM_SHARDS)]
    yield ["a node's part of them", _nbytes(sizes.nbytes * NUM_SHARDS / NUM_NODES)]
    yield ["ranks of a node, of all nodes", f"{RANKS_PER_NODE}, {NUM_RANKS:,}"]
    yield ["batch of a rank, of all ranks", f"{BATCH}, {BATCH * NUM_RANKS:,}"]
    yield ["samples per second of a rank, of all ranks", f"{SAMPLES_PER_S}, {SAMPLES_PER_S * NUM_RANKS:,}"]
    yield ["an epoch", f"{NUM_SAMPLES / SAMPLES_PER_S / NUM_RANKS / 3600:.2g} hours"]
    yield ["a node's disk for a cache", _nbytes(CACHE_NBYTES)]


def _memory() -> Iterable[list[str]]:
    index = shards().index
    keys = index.keys.text.nbytes + index.keys.ends.nbytes
    per_sample = {
        "index: keys": keys / PER_SHARD,
        "index: offsets, lengths, layouts": (index.nbytes - keys) / PER_SHARD - 8,
        "index: digests": 8.0,
        "notes of an open shard": float(NOTES_NBYTES),
    }
    of_index = sum(per_sample.values())
    more = {
        "keys that do not ascend from shard to shard": KEY_TABLE_NBYTES,
        "`bucket_by`, `filter`, a shuffled view": BUCKET_NBYTES,
        "weights of samples, and their sums": 16,
    }
    yield ["", "bytes a sample", "a process with all indexes", "a node of 8 processes", "a process with a node's part"]
    rows = {**per_sample, "**all indexes**": of_index, **{f"further: {name}": float(n) for name, n in more.items()}}
    for name, nbytes in rows.items():
        sizes = (nbytes * NUM_SAMPLES, nbytes * NUM_SAMPLES * RANKS_PER_NODE, nbytes * PER_NODE)
        yield [name, _digits(nbytes), *map(_nbytes, sizes)]


def _shards() -> Iterable[list[str]]:
    yield ["", "bytes a shard", "of all shards"]
    rows = {
        "manifest.json": manifest_nbytes() / NUM_SHARDS,
        "an open cache, no index read: memory of a process": OPEN_NBYTES,
        "the same, pickled for a spawned worker": PICKLED_NBYTES,
        '`shuffle="blocks"`: its arrays': 32,
        "`shuffle=True`: its order": 0,
        "an index, on disk (`keep_indexes=`)": shards().footer_nbytes,
    }
    for name, nbytes in rows.items():
        yield [name, _count(nbytes), _nbytes(nbytes * NUM_SHARDS)]


def _index_requests(way: Way, found: Traffic) -> float:
    """Return the requests of a node for indexes in its first epoch; its processes share what is on its disk."""
    is_own = way.num_shards < NUM_SHARDS
    share = 1.0 if is_own else 1 - (1 - min(found.rank_share, 1.0)) ** RANKS_PER_NODE
    return way.num_shards * share


def _first_batch() -> Iterable[list[str]]:
    yield ["until each rank has its first batch", "requests of a node", "bytes of a node", "requests of all", "price"]
    footer, sample = TAIL_NBYTES, shards().sample_nbytes
    for way in WAYS:
        found = traffic(way)
        indexes = found.shards_of_node  # the processes of a node share them on its disk
        requests = RANKS_PER_NODE + indexes + found.requests * BATCH * RANKS_PER_NODE
        nbytes = RANKS_PER_NODE * manifest_nbytes() + footer * indexes + sample * BATCH * RANKS_PER_NODE
        total = requests * NUM_NODES
        yield [way.name, _count(requests), _nbytes(nbytes), _count(total), _usd(request_usd(total))]
    stream_nbytes = BATCH * sample + AHEAD_NBYTES
    requests = RANKS_PER_NODE * (2 + num_requests(stream_nbytes))
    nbytes = RANKS_PER_NODE * (manifest_nbytes() + stream_nbytes)
    total = requests * NUM_NODES
    yield [_STREAMS, _count(requests), _nbytes(nbytes), _count(total), _usd(request_usd(total))]
    for name, times in (("all indexes, once a node", 1), ("all indexes, in every process", RANKS_PER_NODE)):
        requests, nbytes = NUM_SHARDS * times, footer * NUM_SHARDS * times
        total = requests * NUM_NODES
        yield [f"the same, and {name}", _count(requests), _nbytes(nbytes), _count(total), _usd(request_usd(total))]
    lists = NUM_SHARDS / _PER_LISTING * RANKS_PER_NODE * NUM_NODES
    total = NUM_SHARDS * RANKS_PER_NODE * NUM_NODES
    yield [
        "without a manifest, in every process",
        _count((total + lists) / NUM_NODES),
        _nbytes(footer * NUM_SHARDS * RANKS_PER_NODE),
        _count(total + lists),
        _usd(request_usd(total) + lists * USD_PER_LIST),
    ]


def _epoch() -> Iterable[list[str]]:
    head = ["an epoch of all nodes", "requests", "for indexes", "bytes", "price", "per second", "times the limit"]
    yield [*head, "one tensor: bytes"]
    seconds = NUM_SAMPLES / SAMPLES_PER_S / NUM_RANKS
    all_nbytes = shards().sample_nbytes * NUM_SAMPLES
    for way in WAYS:
        found = traffic(way)
        requests, indexes = found.requests * NUM_SAMPLES, _index_requests(way, found) * NUM_NODES
        nbytes = (1 + found.extra) * all_nbytes
        rate = requests / seconds
        yield [
            way.name,
            _count(requests),
            _count(indexes),
            _nbytes(nbytes),
            _usd(request_usd(requests + indexes)),
            _count(rate),
            _digits(rate / PER_PREFIX),
            _nbytes(ONE_TENSOR_NBYTES * NUM_SAMPLES),
        ]
    requests = stream_requests() * NUM_SHARDS
    rate = requests / seconds
    cells = [_count(requests), "0", _nbytes(all_nbytes), _usd(request_usd(requests)), _count(rate)]
    yield [_STREAMS, *cells, _digits(rate / PER_PREFIX), _nbytes(all_nbytes)]


def _places() -> Iterable[list[str]]:
    yield [
        "shards in use",
        "by a batch",
        "by a node's step",
        "by a step of the order",
        "requests/s for each",
        "indexes of a rank",
    ]
    for way in WAYS:
        found = traffic(way)
        # a step of `world_size` ranks; other nodes read other shards if each has its own
        rate = found.requests * SAMPLES_PER_S * way.world_size / found.shards_of_step
        each = (found.shards_of_batch, found.shards_of_node, found.shards_of_step)
        share = f"{_percent(found.rank_share)} of {way.num_shards:,}"
        yield [way.name, *map(_count, each), _digits(float(f"{rate:.2g}")), share]
    seconds_each = PER_SHARD / SAMPLES_PER_S
    yield [_STREAMS, "1", f"{RANKS_PER_NODE}", f"{NUM_RANKS:,}", f"{stream_requests() / seconds_each:.2g}", "none"]


def _hits() -> Iterable[list[str]]:
    sizes = (0.25, 0.5, 0.75, 1.0)
    yield ["size of the cache, by what a node reads in an epoch", *map(_percent, sizes)]
    for is_own, name in ((False, "all shards"), (True, "own shards")):
        for order in ("True", "blocks"):
            text = order if order == "True" else f'"{order}"'
            hits = [node_hits(order, is_own, size) for size in sizes]
            yield [f"{name}, `shuffle={text}`", *map(_percent, hits)]


def _transfer() -> Iterable[list[str]]:
    total = shards().sample_nbytes * NUM_SAMPLES / 1e9
    one = ONE_TENSOR_NBYTES * NUM_SAMPLES / 1e9
    yield ["bytes of an epoch", "in the region", "from another region", "to the internet"]
    for name, nbytes in (("whole samples", total), ("one tensor of 2.5 KB", one)):
        yield [name, "$0", _usd(nbytes * USD_PER_GB_FROM_REGION), _usd(nbytes * USD_PER_GB_TO_INTERNET)]


def tables() -> dict[str, str]:
    """Return the markdown tables by title."""
    found = {
        "setting": _setting(),
        "memory": _memory(),
        "shards": _shards(),
        "first batch": _first_batch(),
        "epoch": _epoch(),
        "transfer": _transfer(),
        "places": _places(),
        "hits": _hits(),
    }
    return {title: markdown(list(lines)) for title, lines in found.items()}
