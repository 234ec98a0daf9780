"""Shards, which are tar files: headers, member names, indexes, manifests, and reads of single samples (FORMAT.md 1, 4)."""
