"""One copy of a dataset's samples for all processes of a machine: `tc.SharedDataset`."""
