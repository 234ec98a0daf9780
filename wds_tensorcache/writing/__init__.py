"""Writers of shards and of whole caches. Unfinished files have temporary names, which readers ignore."""
