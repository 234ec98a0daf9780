"""Commands that show what a cache contains."""
