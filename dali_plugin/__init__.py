"""NVIDIA DALI for caches of nested tensors."""
