"""Samples in shared memory, with real processes."""
