"""Where a writer's shards go: a local folder, or a folder of an object store."""
