"""Formats that many programs write: folders of arrays, tars, tables."""
