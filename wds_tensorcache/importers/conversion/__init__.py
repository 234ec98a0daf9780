"""Convert samples of a source, in threads or in worker processes, and write them in their order."""
