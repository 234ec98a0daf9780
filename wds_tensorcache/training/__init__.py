"""Loaders for training: the order of samples, batches read ahead, and the state for checkpoints."""
