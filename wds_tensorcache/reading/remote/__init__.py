"""Caches on servers and in object stores: shards found, the reads of a batch as ranged requests."""
