"""Shard files: what a tar's members are called (FORMAT.md 1)."""
