"""Objects of a hub, through fsspec."""
