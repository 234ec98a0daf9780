"""Inspection of caches: structure, statistics, differences, and a page that shows them."""
