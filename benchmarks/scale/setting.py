"""The assumed dataset, cluster and store. Every table of scale.md follows from these numbers and from this package's code."""

from __future__ import annotations

NUM_SAMPLES, NUM_SHARDS, NUM_NODES = 10**9, 10**5, 1000
PER_SHARD = NUM_SAMPLES // NUM_SHARDS
PER_NODE = NUM_SAMPLES // NUM_NODES
RANKS_PER_NODE = 8  # processes, one for each GPU
NUM_RANKS = NUM_NODES * RANKS_PER_NODE
BATCH = 32  # samples of a rank in a step
SAMPLES_PER_S = 20  # of a rank
CACHE_NBYTES = 10**12  # of a node's disk

ONE_TENSOR_NBYTES = 2560  # the pooled text of a sample
# ranges nearer than this are one request, by `fetch_many`: 2 * 30 ms / 128 requests in flight, at 80 MB/s
GAP_NBYTES = 37_500
TAIL_NBYTES = (1 << 14) + 64 * PER_SHARD  # of a shard, which `tc.open` reads for its index
PER_PREFIX = 5500  # GET requests a second that S3 promises for a prefix

# list prices of S3 Standard in its first region; other stores charge about the same for requests
USD_PER_GET = 0.40 / 10**6
USD_PER_LIST = 5.00 / 10**6
USD_PER_GB_FROM_REGION = 0.02  # to another region; within the region, 0
USD_PER_GB_TO_INTERNET = 0.05


def request_usd(num_gets: float) -> float:
    """Return the price of GET requests."""
    return num_gets * USD_PER_GET
