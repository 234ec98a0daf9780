"""Tar shards: headers, names, indexes, manifests, and samples (FORMAT.md 1, 4)."""
