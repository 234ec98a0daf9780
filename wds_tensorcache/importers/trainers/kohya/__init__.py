"""Caches of kohya's sd-scripts, of its main branch and of the branch new_cache."""
