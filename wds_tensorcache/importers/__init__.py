"""Importers of the caches that trainers and other programs write."""
