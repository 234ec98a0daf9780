"""Formats of trainers: one module for each program."""
