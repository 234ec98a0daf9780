"""A page that shows a cache: one file that needs no network, or a local server for a whole dataset."""
