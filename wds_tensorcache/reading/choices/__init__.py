"""Alternatives of a tensor in one sample, such as crops or captions, of which a batch has one."""
