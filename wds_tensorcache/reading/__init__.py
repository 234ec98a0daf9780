"""Datasets over shards: samples by index or key, and whole batches."""
