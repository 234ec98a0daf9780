"""Tar headers and archives, as files and as streams (FORMAT.md 1)."""
