"""Find samples: by key and by index."""
