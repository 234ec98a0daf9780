"""Find samples: by key, by index, and in several caches by matching keys."""
