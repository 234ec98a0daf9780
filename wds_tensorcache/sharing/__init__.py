"""One copy of a dataset's samples for all processes: `tc.SharedDataset`."""
