"""What reading and writing cost, beside their peers and the ceiling. `make bench` runs it."""
