"""Encode samples as bytes and decode them, without files or threads. FORMAT.md is the specification."""
