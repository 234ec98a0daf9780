"""Servers for tests, benchmarks and examples, each in its own process."""
