"""Importers: the caches that trainers and other programs write, as samples to store in shards."""
