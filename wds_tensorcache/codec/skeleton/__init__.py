"""Skeletons: pickles of samples, written, and read safely and fast (FORMAT.md 2)."""
