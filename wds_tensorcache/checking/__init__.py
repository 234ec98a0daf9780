"""Verify and repair shards and the files beside them."""
