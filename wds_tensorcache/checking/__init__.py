"""Verification and repair of shards, indexes and manifests."""
