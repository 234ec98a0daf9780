"""Completion of commands, paths and keys in a shell."""
