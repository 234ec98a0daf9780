"""A node's cache: blocks of remote objects, shared by all its processes."""
