"""A node's cache: blocks of remote objects in a shared local folder."""
