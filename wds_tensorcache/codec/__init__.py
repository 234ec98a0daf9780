"""Bytes to samples and back; no files, no threads. FORMAT.md is the specification."""
