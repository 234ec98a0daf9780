"""Importers: read the caches that trainers and other programs write, and store their samples in shards."""
