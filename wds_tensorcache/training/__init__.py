"""Loaders for training: sample order, batches read ahead, and states for checkpoints."""
