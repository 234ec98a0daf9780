"""Objects on servers and in object stores: read by ranges, written whole."""
