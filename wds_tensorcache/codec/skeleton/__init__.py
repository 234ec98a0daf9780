"""Write the skeleton, which is the pickle of a sample, and read it safely and fast (FORMAT.md 2)."""
