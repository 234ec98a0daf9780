"""Transforms for loaders whose randomness comes only from the seeds of the samples, so that it resumes exactly."""
