"""One third party per file."""
