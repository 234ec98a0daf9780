"""Writers of shards and of whole caches; unfinished ones have temporary names, which readers ignore."""
