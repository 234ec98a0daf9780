"""The order of samples, batches ahead of training, and the state that goes into checkpoints."""
