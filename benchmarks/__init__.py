"""Costs of reading and writing, compared with peers and with the ceiling. `make bench` runs it."""
