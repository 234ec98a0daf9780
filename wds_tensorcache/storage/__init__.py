"""The operating system: files, maps, locks, memory and threads. Nothing here knows what a tar is."""
