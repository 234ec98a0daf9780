"""Rows of a dataset: samples to the columns of a block, and the columns of a row to a sample."""
