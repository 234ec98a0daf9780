"""Shard files: tar headers, names, indexes, manifests; writing them, and reading them by sample number (FORMAT.md 1, 4)."""
