"""Formats of trainers, and modules that they share."""
