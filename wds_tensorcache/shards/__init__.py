"""Shard files: their tar headers, names, indexes and manifests; writing them, and reading them by sample number (FORMAT.md 1, 4)."""
