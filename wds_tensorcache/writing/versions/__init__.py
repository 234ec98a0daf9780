"""Versions of a cache: new folders that reuse the shards and samples of an old one."""
