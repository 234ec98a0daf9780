"""Operating-system services: files, memory maps, locks, memory and threads. Nothing here depends on the layout of a tar."""
