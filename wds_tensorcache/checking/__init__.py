"""Verification and repair of shards, sidecars and manifests."""
