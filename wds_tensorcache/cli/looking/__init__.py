"""Commands that show the content of a cache."""
