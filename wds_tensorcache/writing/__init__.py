"""Shards and whole caches, written so that nothing unfinished is ever seen."""
