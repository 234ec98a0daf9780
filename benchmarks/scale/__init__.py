"""Reading 10^9 samples on 1,000 nodes: memory, requests, bytes and costs, computed by this package's own code."""
