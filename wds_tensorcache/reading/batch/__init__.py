"""Read a batch: find its tensors, place them in memory, plan and run the reads, and build the result."""
