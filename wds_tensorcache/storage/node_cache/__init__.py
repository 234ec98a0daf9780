"""A node's cache: blocks of remote objects in a local folder, which all processes of the node share."""
