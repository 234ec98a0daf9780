"""Manifests and indexes of shards on servers and in object stores."""
