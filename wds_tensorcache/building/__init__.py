"""Caches made from datasets."""
