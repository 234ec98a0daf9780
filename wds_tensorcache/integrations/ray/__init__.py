"""Ray Data: datasets read from caches, caches written from datasets, and caches built by actors on a cluster."""
