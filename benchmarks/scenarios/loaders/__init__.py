"""Scenarios of loaders, which read batches ahead."""
