"""The pickle of a sample: written, read safely, and read fast where it repeats (FORMAT.md 2)."""
