"""Datasets over shards: samples by number or key, and whole batches read at once."""
