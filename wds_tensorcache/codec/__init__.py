"""Encoding and decoding of samples, without files or threads. FORMAT.md is the specification."""
